"""Values of environment variables on which FlagCX ends the process or fails without a word, caught before."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from sglang_fl.comm.backends.flagcx.errors import FlagCXError, ResultCode
from sglang_fl.comm.variables import Found, find_variables, in_home
from sglang_fl.config.numbers import whole_number

# Read with an unguarded std::stoi in one or more releases from 0.7 to the head of 2026-08: what is no number
# throws, nothing catches it, and the process aborts.
INTEGERS = (
    "FLAGCX_USE_HOST_COMM",
    "FLAGCX_USE_HETERO_COMM",
    "FLAGCX_USE_TUNER",
    "FLAGCX_TUNING_WITH_FLAGSCALE",
    "TUNNING_WITH_SINGLE_COMM",
    "FLAGCX_RUNTIME_PROXY",
    "FLAGCX_IB_GID_INDEX",
    "FLAGCX_DEVICE_FUNC_RELAXED_ORDERING",
)

# Set but empty, these make the creation of a communicator fail with a bare code.
NOT_EMPTY = {
    "FLAGCX_COMM_ID": "an address: host:port or [ipv6]:port",
    "FLAGCX_CLUSTER_SPLIT_LIST": "numbers: 2,2",
}

# What std::stoi reads: leading space, a sign, digits; what follows them is ignored.
_INTEGER = re.compile(r"[ \t\n\v\f\r]*(?P<sign>[+-]?)(?P<digits>[0-9]+)")
_INT_MAX = 2**31 - 1  # the least is one more below zero


def configuration_files() -> tuple[Path, ...]:
    """The files that FlagCX reads variables from, first one first; the home is the user database's, not $HOME."""
    return (*in_home(".flagcx.conf"), Path("/etc/flagcx.conf"))


def check(environment: Mapping[str, str], files: tuple[Path, ...] | None = None) -> None:
    """Raise before FlagCX reads a value that it does not survive.

    Args:
        environment: the process's variables; they win over the files.
        files: the configuration files; None means FlagCX's own.

    Raises:
        FlagCXError: BAD_ENVIRONMENT, naming the variable, its value, where it was set and what is allowed.
    """
    settings = find_variables(environment, configuration_files() if files is None else files)
    for name in INTEGERS:
        if name in settings and not _is_int(settings[name].value):
            raise _error(name, settings[name], "a whole number, such as 0 or 1", "ends the process with an abort")
    for name, allowed in NOT_EMPTY.items():
        if name in settings and not settings[name].value:
            raise _error(name, settings[name], allowed, "fails to create any communicator")


def _is_int(value: str) -> bool:
    found = _INTEGER.match(value)
    return found is not None and whole_number(found["digits"], _INT_MAX + (found["sign"] == "-")) is not None


def _error(name: str, own: Found, allowed: str, effect: str) -> FlagCXError:
    found = f"{name} is {own.value!r}" if own.value else f"{name} is set but empty"
    return FlagCXError(
        ResultCode.BAD_ENVIRONMENT,
        "check the environment",
        f"{found} (from {own.where}); allowed is {allowed}; FlagCX {effect} on it. Unset it or give it a value",
    )
