"""A scheduler of a real server dies or stops: the server ends in time, says which one it was, and leaves nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from sglang_fl.comm.dumps import PATTERN
from sglang_fl.comm.monitor import EXIT_CODE
from sglang_fl.testing.server import Server, ServerError
from sglang_fl.testing.tiny_model import Family

from .conftest import ROOT
from .topologies import TP

pytestmark = pytest.mark.e2e

LIMIT_S = 3.0
END_LIMIT_S = 10.0
CLIENTS = 3
PROMPT = [1, 2, 3, 4, 5]


@dataclass(frozen=True)
class Fault:
    """What happens to one scheduler of two.

    Attributes:
        number: the signal that it gets.
        rank: its global rank.
        backend: what carries the groups.
        is_loaded: whether requests are under way; otherwise nothing is asked of the server.
    """

    number: signal.Signals
    rank: int
    backend: str
    is_loaded: bool = True

    def __str__(self) -> str:
        return f"{self.number.name}-rank{self.rank}-{self.backend}-{'load' if self.is_loaded else 'idle'}"


FAULTS = (
    Fault(signal.SIGKILL, 1, "flagcx"),
    Fault(signal.SIGKILL, 0, "torch"),
    Fault(signal.SIGSTOP, 1, "flagcx"),
    Fault(signal.SIGSTOP, 0, "torch", is_loaded=False),
)


@dataclass
class Clients:
    """What came of the requests: tokens of those that were answered, errors of those that were not."""

    answers: list[list[int]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@contextmanager
def load(server: Server) -> Iterator[Clients]:
    """Requests one after the other from several clients, until the server no longer answers."""
    clients = Clients()

    def ask() -> None:
        try:
            while True:
                clients.answers.append(server.generate(PROMPT, 16))
        except ServerError as error:
            clients.errors.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield clients
    finally:
        for thread in threads:
            thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a client still waits"


def scheduler(server: Server, rank: int) -> psutil.Process:
    """The scheduler process of a rank."""
    (found,) = [process for process in server.schedulers() if f"_TP{rank}" in process.cmdline()[0]]
    return found


def shared_memory(server: Server) -> set[Path]:
    """Files of /dev/shm that the server's processes have mapped and that have a name.

    By their numbers: a semaphore is mapped under a name that it loses before it gets its own.
    """
    named = {entry.inode(): Path(entry.path) for entry in os.scandir("/dev/shm")}
    mapped: set[int] = set()
    for process in server.tree():
        maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        mapped |= {int(line.split(maxsplit=5)[4]) for line in maps if "/dev/shm/" in line}
    return {named[inode] for inode in mapped & named.keys()}


def comm_diff(folder: Path) -> subprocess.CompletedProcess[str]:
    """What a user would look at next."""
    command = [sys.executable, "-m", "sglang_fl", "comm-diff", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def ask_for_dumps(server: Server, folder: Path) -> None:
    """SIGUSR1 under load: each scheduler writes its calls, which are equal, and works on. Leaves the folder empty."""
    schedulers = server.schedulers()
    for process in schedulers:
        process.send_signal(signal.SIGUSR1)
    until_s = time.monotonic() + 30
    while len(list(folder.glob(PATTERN))) < len(schedulers):
        assert time.monotonic() < until_s, server.log()[-4000:]
        time.sleep(0.05)
    done = comm_diff(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the ranks' calls are equal" in done.stdout
    for path in folder.glob(PATTERN):
        path.unlink()


def wait_for_end(server: Server, limit_s: float) -> float:
    """Seconds until no process of the server is left; they are reaped as a shell would."""
    start_s = time.monotonic()
    while [process.poll() for process in server.processes] and server.tree():
        took_s = time.monotonic() - start_s
        assert took_s < limit_s, f"left after {took_s:.1f} s: {server.tree()}; {server.log()[-6000:]}"
        time.sleep(0.05)
    return time.monotonic() - start_s


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_server_ends_and_names_the_scheduler(fault: Fault, models: Mapping[Family, Path], tmp_path: Path) -> None:
    """Given a server at tp=2, when a scheduler is killed or stopped, then within 10 s, for a stopped one the limit
    and 10 s, no process and no shared memory is left, the log names the rank, and no client got wrong tokens."""
    dumps = tmp_path / "dumps"
    environment = {
        "FLAGCX_PATH": str(ROOT / "build/hostcx"),
        "SGLANG_FL_DIST_BACKEND": fault.backend,
        "SGLANG_FL_COMM_TIMEOUT_S": f"{LIMIT_S}",
        "SGLANG_FL_COMM_DUMP_DIR": str(dumps),
    }
    stopped = fault.number is signal.SIGSTOP
    with TP.server(models, tmp_path, environment) as server:
        right = server.generate(PROMPT, 16)
        names = shared_memory(server)
        victim = scheduler(server, fault.rank)
        if fault.is_loaded:
            with load(server) as clients:
                while len(clients.answers) < 20:
                    assert not clients.errors
                    time.sleep(0.05)
                ask_for_dumps(server, dumps)
                victim.send_signal(fault.number)
                wait_for_end(server, END_LIMIT_S + LIMIT_S * stopped)
            assert len(clients.errors) == CLIENTS
            assert all(answer == right for answer in clients.answers)
        else:
            victim.send_signal(fault.number)
            wait_for_end(server, END_LIMIT_S + LIMIT_S * stopped)
        assert server.processes[0].returncode != 0
        log = server.log()
    assert [path for path in names if path.exists()] == []
    ended = rf"scheduler_{fault.rank} \(pid={victim.pid}\) crashed with exit code -9"
    gone = rf"global rank {fault.rank} \(process {victim.pid} on \S+\) (was killed|has ended)"
    told = rf"global rank {fault.rank} \(process {victim.pid} on \S+\) is stopped"
    assert re.search(told if stopped else f"{ended}|{gone}", log), log[-8000:]
    if not stopped:
        return
    assert f"did not complete within {LIMIT_S:g} s" in log
    if not fault.is_loaded:
        assert f"This process ends with code {EXIT_CODE}." in log
    assert len(list(dumps.glob(PATTERN))) == 1
    done = comm_diff(dumps)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"rank {fault.rank} left no dump: gone, or stopped" in done.stdout
