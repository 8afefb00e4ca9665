"""Whether NCCL keeps calls in CUDA graphs and calls outside of them in order, which costs every captured call time.

By default NCCL puts an event before and behind each call that is captured, so that replays and other calls of one
communicator never overlap, whatever the streams. ``NCCL_GRAPH_MIXING_SUPPORT=0`` leaves the events out; what remains
is the order of the caller's streams. That suffices for the kernels. It does not for what a kernel needs done on the
host: a graph posts it when it runs, a call outside when it is made, ahead of a graph that is still waiting. Between
GPUs of one host that reach each other by P2P or shared memory there is nothing to do on the host. Source: NCCL 2.28.9,
``ncclStrongStreamAcquire``, ``ncclLaunchPrepare``, ``ncclProxySaveOp`` and each transport's ``canConnect``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from sglang_fl.comm.processes import this_process
from sglang_fl.comm.variables import Found, find_variables, in_home
from sglang_fl.config import Settings
from sglang_fl.config.values import GraphMixing

SETTING = "comm.graph_mixing"
# NCCL's kernels for registered memory may start before the kernel in front of them is done, and in these releases do
# not wait for it themselves. Source: NCCL's commit 2948185, "Reintroduce cudaGridDependencySynchronize".
_FIRST_HASTY, _FIRST_MENDED = (2, 28, 0), (2, 30, 7)


@dataclass(frozen=True)
class Obstacle:
    """A variable that may take away what makes it safe.

    Attributes:
        variable: its name.
        harmless: values that do not; not set is one of them.
        effect: what the others do.
    """

    variable: str
    harmless: frozenset[str]
    effect: str


@dataclass(frozen=True)
class Library:
    """A collective library that keeps such an order.

    Attributes:
        torch_backend: of torch.distributed, that runs on it.
        variable, off: leave the order out.
        besides: set along with it, unless set otherwise: the library then fails where it would take the network.
        obstacles: see there.
        named_file, home_file, machine_file: where it reads further variables: the file that a variable names, or else
            the one in the user's home, and then that of the machine.
    """

    torch_backend: str
    variable: str
    off: str
    besides: Mapping[str, str]
    obstacles: tuple[Obstacle, ...]
    named_file: str
    home_file: str
    machine_file: str


_OFF = frozenset({"", "0"})
# What strtoll, with which NCCL reads numbers, takes for anything but 0.
_NOT_ZERO = re.compile(r"\s*[+-]?(0[xX]0*[1-9a-fA-F]|0*[1-9])")
# By torch.device's type.
LIBRARIES: dict[str, Library] = {
    "cuda": Library(
        torch_backend="nccl",
        variable="NCCL_GRAPH_MIXING_SUPPORT",
        off="0",
        besides={"NCCL_NET_DISABLE_INTRA": "1"},
        obstacles=(
            Obstacle("NCCL_NET_DISABLE_INTRA", frozenset({"1"}), "lets NCCL take the network between GPUs of one host"),
            Obstacle("NCCL_SHM_DISABLE", _OFF, "leaves NCCL the network where GPUs do not reach each other"),
            Obstacle("NCCL_HOSTID", frozenset({""}), "can make one host several to NCCL"),
            Obstacle("NCCL_P2P_USE_CUDA_MEMCPY", _OFF, "lets a thread of NCCL copy between GPUs"),
            Obstacle("NCCL_SHM_USE_CUDA_MEMCPY", _OFF, "lets a thread of NCCL copy between GPUs"),
            Obstacle("NCCL_PROFILER_PLUGIN", frozenset({""}), "lets a thread of NCCL follow each kernel"),
            Obstacle("NCCL_LAUNCH_ORDER_IMPLICIT", _OFF, "needs the events for the order of several communicators"),
            Obstacle("NCCL_ENV_PLUGIN", frozenset({""}), "lets NCCL read other settings than those seen here"),
        ),
        named_file="NCCL_CONF_FILE",
        home_file=".nccl.conf",
        machine_file="/etc/nccl.conf",
    )
}


@dataclass(frozen=True)
class Decision:
    """What becomes of the library's variable in this process.

    Attributes:
        library: whose.
        reason: why.
        sets: variables to set; empty where everything stays.
        needs_one_host: no group may span hosts, since the decision rests on that.
    """

    library: Library
    reason: str
    sets: Mapping[str, str] = field(default_factory=dict)
    needs_one_host: bool = False

    def line(self) -> str:
        """For reports."""
        if not self.sets:
            return f"{self.library.variable} left alone: {self.reason}"
        return f"{' and '.join(f'{name}={value}' for name, value in self.sets.items())} set: {self.reason}"


def decide(
    settings: Settings,
    library: Library,
    found: Mapping[str, Found],
    hosts: int | None,
    obstacles: Sequence[str] = (),
    is_late: bool = False,
) -> Decision:
    """Whether ``library``'s order is left out. Equal on all ranks if what is passed is; looks at nothing else.

    Args:
        settings: for ``comm.graph_mixing``.
        found: see :func:`variables`.
        hosts: on which all ranks of the deployment are; None if that is not known.
        obstacles: of the caller, such as options with which two streams use one group.
        is_late: the library has been used in this process, and may have read its variables.
    """
    own = _value(library, found)
    where = f"{SETTING} is {settings.comm.graph_mixing} (from {settings.source(SETTING).where})"
    if own is not None:
        return Decision(library, f"it is {own.value!r} in {own.where}, which wins over {SETTING}")
    if settings.comm.graph_mixing is GraphMixing.KEEP:
        return Decision(library, where)
    if is_late:
        return Decision(library, f"{where}, but this process has groups of NCCL already, which may have read it")
    if settings.comm.graph_mixing is GraphMixing.DROP:
        return Decision(library, where, {library.variable: library.off})
    against = [_against_hosts(hosts)] if hosts != 1 else []
    against += [f"{name}={value} ({where_it_is}) {effect}" for name, value, where_it_is, effect in _met(library, found)]
    against += obstacles
    if against:
        return Decision(library, f"{where}, and {'; '.join(against)}")
    besides = {name: value for name, value in library.besides.items() if name not in found}
    return Decision(
        library, f"{where}, and all ranks are on one host", {library.variable: library.off, **besides}, True
    )


def _value(library: Library, found: Mapping[str, Found]) -> Found | None:
    own = found.get(library.variable)
    return own if own is not None and own.value else None  # empty is as not set to the library


def _against_hosts(hosts: int | None) -> str:
    number = "an unknown number of hosts" if hosts is None else f"{hosts} hosts"
    return f"there are ranks on {number}: calls over a network need the order"


def _met(library: Library, found: Mapping[str, Found]) -> Iterator[tuple[str, str, str, str]]:
    for obstacle in library.obstacles:
        own = found.get(obstacle.variable)
        if own is not None and own.value not in obstacle.harmless:
            yield obstacle.variable, own.value, own.where, obstacle.effect


def variables(library: Library, environment: Mapping[str, str]) -> dict[str, Found]:
    """What the library will find: the environment, then its file of the user, then that of the machine."""
    named = environment.get(library.named_file)
    own = (Path(named),) if named else in_home(library.home_file)
    return find_variables(environment, (*own, Path(library.machine_file)))


_decisions: dict[str, Decision] = {}  # of this process, by device type; what a library has read stays


def prepare(
    settings: Settings,
    device_type: str,
    hosts: int | None,
    obstacles: Sequence[str] = (),
    environment: MutableMapping[str, str] = os.environ,
) -> Decision | None:
    """Decide for this process, and set the variables; None where the device's library keeps no such order.

    Before the library's first communicator, also torch's. Every rank of the deployment must do it, with equal
    arguments; groups check that it has come out alike. A second call returns the first one's decision. Within SGLang
    the plugin does it; ``hosts`` and ``obstacles`` as in :func:`decide`.
    """
    library = LIBRARIES.get(device_type)
    if library is None:
        return None
    if device_type not in _decisions:
        found = variables(library, environment)
        decision = decide(settings, library, found, hosts, obstacles, is_used(library))
        environment.update(decision.sets)
        _decisions[device_type] = decision
    return _decisions[device_type]


def is_used(library: Library) -> bool:
    """Whether torch.distributed may have brought up the library in this process: its first groups are on it."""
    return dist.is_initialized() and library.torch_backend in dist.get_backend_config()


def to_agree_on(device_type: str) -> dict[str, str]:
    """What ranks of one group must have in common, for ``also_equal`` of an agreement; empty without such a library."""
    library = LIBRARIES.get(device_type)
    if library is None:
        return {}
    own = _value(library, variables(library, os.environ))
    agreed = {library.variable: "no value" if own is None else own.value}
    decision = _decisions.get(device_type)
    if decision is not None and decision.needs_one_host:
        process = this_process()
        words = f"the host, which must be one with {library.variable}={library.off} (SGLANG_FL_COMM_GRAPH_MIXING=keep"
        agreed[f"{words} keeps the library's default)"] = f"{process.host} ({process.machine})"
    return agreed


def refuses_windows(device_type: str) -> str:
    """Why memory must not be registered with the library: in graphs, sums of it could be of stale values. "" if it may.

    Its kernels for registered memory rely on the events in some releases; see ``_FIRST_HASTY``.
    """
    library = LIBRARIES.get(device_type)
    if library is None:
        return ""
    own, version = _value(library, variables(library, os.environ)), nccl_version()
    if own is None or _NOT_ZERO.match(own.value) or not _FIRST_HASTY <= version < _FIRST_MENDED:
        return ""
    return (
        f"NCCL {'.'.join(map(str, version))}'s kernels for registered memory do not wait for the kernel before them "
        f"(mended in {'.'.join(map(str, _FIRST_MENDED))}); {library.variable}={library.off} takes away what makes them "
        f"wait in CUDA graphs"
    )


def nccl_version() -> tuple[int, int, int]:
    """Of torch's NCCL, which FlagCX finds loaded; zeros where torch has none."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return 0, 0, 0
    number = int(torch._C._nccl_version())  # as torch.cuda.nccl.version takes it apart
    return number >> 32, number >> 16 & 0xFFFF, number & 0xFFFF
