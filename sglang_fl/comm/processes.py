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
    UNKNOWN = "cannot be asked about"


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
        """What has become of it; a zombie has ended. Only what the system says has ended is gone."""
        here = _machine_or_none()
        if here is None:
            return State.UNKNOWN
        if not self.machine or self.machine != here:
            return State.ELSEWHERE
        try:
            fields = _stat(self.pid)
        except OSError:  # such as no file descriptor left in this process
            return _without_a_file(self.pid)
        if not fields or int(fields[_START_TIME]) != self.start or fields[_STATE] in "ZXx":
            return State.GONE
        return State.STOPPED if fields[_STATE] in "Tt" else State.RUNS


def this_process() -> Process:
    """The calling process, also after a fork."""
    try:
        return _process(os.getpid())
    except OSError:  # no /proc, or no file descriptor left
        return Process(socket.gethostname(), "", os.getpid(), 0)


# What raises is not kept: the next call asks again.
@cache
def _process(pid: int) -> Process:
    return Process(socket.gethostname(), _machine(), pid, int(_stat(pid)[_START_TIME]))


@cache
def _machine() -> str:
    return f"{_BOOT_ID.read_text().strip()}/{_PID_NAMESPACE.stat().st_ino}"


def _machine_or_none() -> str | None:
    """Empty where there is no /proc, None where that is not known."""
    try:
        return _machine()
    except FileNotFoundError:
        return ""
    except OSError:
        return None


def _stat(pid: int) -> list[str]:
    """The fields behind the name, which may itself hold spaces and brackets; empty if there is no such process.

    Raises:
        OSError: that is not known.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()


def _without_a_file(pid: int) -> State:
    """What can be told without opening anything: that the number is nobody's."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return State.GONE
    except OSError:
        pass  # it is another user's by now, or may not be asked
    return State.UNKNOWN
