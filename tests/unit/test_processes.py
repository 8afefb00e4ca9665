"""What is told of a process: only what the system says has ended is gone."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sglang_fl.comm import processes
from sglang_fl.comm.processes import Process, State, this_process

_SLEEPER = [sys.executable, "-c", "import time; time.sleep(1e6)"]


@contextmanager
def no_descriptors() -> Iterator[None]:
    """No further file can be opened within."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 8, hard))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)


def of(child: subprocess.Popen[bytes]) -> Process:
    """The process as its peers know it."""
    here = this_process()
    start = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
    return Process(here.host, here.machine, child.pid, start)


def test_a_process_is_not_gone_because_nothing_can_be_opened() -> None:
    """Given no file descriptor left, when a process that runs, a stopped one and one that is gone are asked about, then
    the first two are not known, the last one is gone, and afterwards all are as they are."""
    children = [subprocess.Popen(_SLEEPER) for _ in range(3)]
    runs, stopped, gone = (of(child) for child in children)
    os.kill(stopped.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, stopped.pid, os.WSTOPPED)
    children[2].kill()
    children[2].wait()
    with no_descriptors():
        assert [one.state() for one in (runs, stopped, gone)] == [State.UNKNOWN, State.UNKNOWN, State.GONE]
    assert [one.state() for one in (runs, stopped, gone)] == [State.RUNS, State.STOPPED, State.GONE]
    for child in children[:2]:
        child.kill()
        child.wait()


def test_what_could_not_be_read_is_asked_for_again() -> None:
    """Given no file descriptor left when a process first looks at itself, then later it knows itself all the same."""
    processes._process.cache_clear()
    processes._machine.cache_clear()
    other = Process("elsewhere", "another machine", os.getpid(), 1)
    with no_descriptors():
        assert this_process() == Process(this_process().host, "", os.getpid(), 0)
        assert other.state() is State.UNKNOWN
    assert this_process().state() is State.RUNS
    assert other.state() is State.ELSEWHERE
