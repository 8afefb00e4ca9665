"""The extension ``sglang_fl._flagcx``: loaded once, checked against the package, its absence explained."""

from __future__ import annotations

import importlib
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import sglang_fl
from sglang_fl.comm.backends.flagcx.errors import FlagCXError, ResultCode

REINSTALL = "reinstall it: pip install --force-reinstall --no-deps sglang_fl (or, in a checkout, make setup)"
REASON_FILE = "_flagcx_absent.txt"


class Native(NamedTuple):
    """cffi's two objects of the extension."""

    lib: Any
    ffi: Any


@lru_cache(maxsize=1)
def load() -> Native:
    """The extension.

    Raises:
        FlagCXError: NO_EXTENSION, with the reason that the build recorded, or naming both versions that differ.
    """
    reason = _recorded_reason()
    if reason is not None:  # an extension that lies there all the same is of an earlier build
        raise FlagCXError(
            ResultCode.NO_EXTENSION,
            "load the extension",
            f"sglang_fl was built without it: {reason}; install a C compiler and {REINSTALL}",
        )
    try:
        module = importlib.import_module("sglang_fl._flagcx")
    except ImportError as error:
        raise FlagCXError(ResultCode.NO_EXTENSION, "load the extension", f"{error}; {REINSTALL}") from error
    native = Native(module.lib, module.ffi)
    built_for = native.ffi.string(native.lib.sglang_fl_flagcx_package_version()).decode()
    if built_for != sglang_fl.__version__:
        raise FlagCXError(
            ResultCode.NO_EXTENSION,
            "load the extension",
            f"{module.__file__} was built for sglang_fl {built_for}, the package is {sglang_fl.__version__}; "
            f"{REINSTALL}",
        )
    return native


def _recorded_reason() -> str | None:
    try:
        return (Path(sglang_fl.__file__).parent / REASON_FILE).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
