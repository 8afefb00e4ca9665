"""Which process a rank is, and whether it still lives: a process number alone is given to another process one day."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")
_STATE, _START_TIME = 0, 19  # fields of /proc/PID/stat, counted behind the name


class State(Enum):
    """What the operating system says of a process."""

    RUNS = "runs"
    STOPPED = "is stopped"
    GONE = "has ended"
    ELSEWHERE = "runs on another machine, or did"


@dataclass(frozen=True)
class Process:
    """One process of one machine.

    Attributes:
        host: the machine's name, for people.
        machine: boot and pid namespace, within which process numbers mean the same; empty where there is no /proc.
        pid: its number.
        start: when it started, clock ticks since the boot; tells it from an earlier process of the same number.
    """

    host: str
    machine: str
    pid: int
    start: int

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def state(self) -> State:
        """What has become of it; a zombie has ended."""
        if not self.machine or self.machine != _machine():
            return State.ELSEWHERE
        fields = _stat(self.pid)
        if not fields or int(fields[_START_TIME]) != self.start or fields[_STATE] in "ZXx":
            return State.GONE
        return State.STOPPED if fields[_STATE] in "Tt" else State.RUNS


def this_process() -> Process:
    """The calling process, also after a fork."""
    return _process(os.getpid())


@cache
def _process(pid: int) -> Process:
    fields = _stat(pid)
    return Process(socket.gethostname(), _machine() if fields else "", pid, int(fields[_START_TIME]) if fields else 0)


@cache
def _machine() -> str:
    try:
        return f"{_BOOT_ID.read_text().strip()}/{_PID_NAMESPACE.stat().st_ino}"
    except OSError:
        return ""


def _stat(pid: int) -> list[str]:
    """The fields behind the name, which may itself hold spaces and brackets; empty if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()
