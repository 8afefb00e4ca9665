"""Which machine a process runs on: a library over host memory connects processes of one machine only."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")


@dataclass(frozen=True)
class Machine:
    """One boot of one kernel and, within it, one pid namespace: where process numbers mean the same."""

    host_name: str
    boot_id: str
    pid_namespace: int

    @property
    def identity(self) -> tuple[str, int]:
        """What decides; host names are for people."""
        return self.boot_id, self.pid_namespace

    def __str__(self) -> str:
        return f"{self.host_name} (boot {self.boot_id[:8]}, pid namespace {self.pid_namespace})"


def this_machine() -> Machine:
    """The machine of the calling process."""
    return Machine(socket.gethostname(), _BOOT_ID.read_text().strip(), _PID_NAMESPACE.stat().st_ino)


def spread(machines: Sequence[Machine], ranks: Sequence[int]) -> str:
    """Where the ranks are, if they are not all on one machine; otherwise empty. ``machines[i]`` is of ``ranks[i]``."""
    by_identity: dict[tuple[str, int], list[int]] = {}
    for machine, rank in zip(machines, ranks, strict=True):
        by_identity.setdefault(machine.identity, []).append(rank)
    if len(by_identity) == 1:
        return ""
    names = {machine.identity: str(machine) for machine in machines}
    return ", ".join(f"global rank(s) {members} on {names[identity]}" for identity, members in by_identity.items())
