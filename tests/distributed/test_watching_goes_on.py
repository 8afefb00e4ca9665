"""Calls that hang end with the names of the missing, whatever this process is short of and whatever its clock does."""

from __future__ import annotations

import logging
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sglang_fl.comm.communicator import CommunicatorFL
from sglang_fl.comm.errors import CollectiveTimeout, CommError
from sglang_fl.comm.monitor.monitor import EXPLAIN_LIMIT_S
from sglang_fl.testing.ranks import RankContext, run_ranks
from tests.distributed.groups import communicator_of_all

LIMIT_S = 2.0
NEVER_S = 60.0
JOB_LIMIT_S = 6.0


@contextmanager
def nobody_reads() -> Iterator[None]:
    """Standard error, to which the log goes, is a pipe that is full."""
    handler = logging.StreamHandler(os.fdopen(2, "w", closefd=False))
    logging.getLogger().addHandler(handler)
    own, (read, write) = os.dup(2), os.pipe()
    os.dup2(write, 2)
    os.set_blocking(2, False)
    with suppress(BlockingIOError):
        while True:
            os.write(2, b"x")
    os.set_blocking(2, True)
    try:
        yield
    finally:
        os.dup2(own, 2)
        for descriptor in (write, read, own):  # whoever waits in it gets an error
            os.close(descriptor)
        logging.getLogger().removeHandler(handler)


@contextmanager
def no_thread() -> Iterator[None]:
    """No further thread can be started: there is no address space for its stack."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 4 * 2**20, resource.RLIM_INFINITY))
    done = threading.Event()
    try:
        with suppress(RuntimeError):
            while True:
                threading.Thread(target=done.wait, daemon=True).start()
        yield
    finally:
        done.set()
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@contextmanager
def clock_set_back() -> Iterator[None]:
    """The clock of the day is set back by an hour while the call waits."""
    day_s, day_ns = time.time, time.time_ns
    is_set = threading.Event()

    def set_back() -> None:
        is_set.wait(LIMIT_S / 2)
        time.time, time.time_ns = lambda: day_s() - 3600.0, lambda: day_ns() - 3600 * 10**9

    setter = threading.Thread(target=set_back)
    setter.start()
    try:
        yield
    finally:
        is_set.set()
        setter.join()
        time.time, time.time_ns = day_s, day_ns


@contextmanager
def no_descriptor() -> Iterator[None]:
    """No file can be opened."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    free = os.open(os.devnull, os.O_RDONLY)
    taken = [free]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 8, hard))
    with suppress(OSError):
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        for descriptor in taken:
            os.close(descriptor)


def _meets_a_stopped_rank(
    context: RankContext, hindrance: Callable[[], AbstractContextManager[None]], operation: str
) -> str:
    """Rank 1 is stopped while rank 0, short of something, makes a call."""
    group, store = communicator_of_all(context, operation_timeout_s=LIMIT_S), context.store("stopped")
    group.all_reduce(torch.ones(1))
    if context.rank == 1:
        store.set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        return ""
    pid = int(store.get("pid"))
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    tensor = torch.ones(4)
    call = group.barrier if operation == "barrier" else lambda: group.all_reduce(tensor)
    try:
        with hindrance():
            call()
    except CollectiveTimeout as error:
        return str(error)
    finally:
        os.kill(pid, signal.SIGCONT)
    raise AssertionError("it did not fail")


@pytest.mark.parametrize("operation", ["all_reduce", "barrier"])
@pytest.mark.parametrize("hindrance", [nobody_reads, no_thread, clock_set_back])
def test_a_stopped_rank_is_named(
    hindrance: Callable[[], AbstractContextManager[None]], operation: str, backend: dict[str, str], tmp_path: Path
) -> None:
    """Given a standard error that nobody reads, no further thread, or a clock that is set back, when a peer is stopped,
    then the call of the other rank ends all the same, with a dump and the peer's name."""
    env = {**backend, "SGLANG_FL_COMM_DUMP_DIR": str(tmp_path / "dumps")}
    text, _ = run_ranks(_meets_a_stopped_rank, 2, hindrance, operation, env=env, timeout_s=NEVER_S)
    assert f"did not complete within {LIMIT_S:g} s: global rank 1 (process " in text, text
    assert "is stopped (SIGSTOP, a debugger). The calls of this process are in " in text, text


def _meets_a_late_rank(context: RankContext) -> float:
    group = communicator_of_all(context, operation_timeout_s=NEVER_S)
    group.all_reduce(torch.ones(1))
    tensor = torch.ones(4)
    if context.rank == 1:
        time.sleep(4.0)
        group.all_reduce(tensor)
    else:
        with no_descriptor():
            group.all_reduce(tensor)
    return tensor.sum().item()


def test_a_late_rank_is_waited_for_without_a_descriptor(backend: dict[str, str]) -> None:
    """Given no file descriptor left, when a peer is late by more than the patience with one that is gone, then the call
    completes."""
    assert run_ranks(_meets_a_late_rank, 2, env=backend) == [8.0, 8.0]


def _is_stopped_as_a_whole(context: RankContext) -> float:
    """Ranks 0 and 1 are a job, which rank 2 stops, as Ctrl-Z does, while rank 0 waits for rank 1."""
    own = dist.new_group([0, 1], backend="gloo")
    store = context.store("job")
    if context.rank == 2:
        pids = [int(store.get(f"pid{rank}")) for rank in (0, 1)]
        store.wait(["waits"])
        time.sleep(1.0)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                os.kill(pid, number)
            if number == signal.SIGSTOP:
                time.sleep(JOB_LIMIT_S + 3.0)
        time.sleep(1.0)  # a verdict would have fallen by then
        store.set("goes on", "1")
        return 0.0
    group = CommunicatorFL(
        cpu_group=own, device_group=own, device="cpu", ranks=[0, 1], name="tp:0", operation_timeout_s=JOB_LIMIT_S
    )
    tensor = torch.ones(4)
    group.all_reduce(torch.ones(1))
    store.set(f"pid{context.rank}", str(os.getpid()))
    if context.rank == 0:
        store.set("waits", "1")
    else:
        store.wait(["goes on"])
    group.all_reduce(tensor)
    time.sleep(1.0)
    group.all_reduce(tensor)
    return tensor.sum().item()


def test_a_job_that_was_stopped_as_a_whole_goes_on(backend: dict[str, str]) -> None:
    """Given both ranks stopped for longer than the limit while one waits for the other, when they go on, then so does
    the call."""
    assert run_ranks(_is_stopped_as_a_whole, 3, env=backend, timeout_s=NEVER_S) == [16.0, 16.0, 0.0]


def _is_made_without_threads(context: RankContext) -> str:
    dist.new_group([0], backend="gloo")
    group = dist.new_group(list(range(context.world_size)), backend="gloo")
    dist.barrier(group=group)
    real, threading.Thread.start = threading.Thread.start, _refuse  # type: ignore[method-assign]
    try:
        CommunicatorFL(cpu_group=group, device_group=group, device="cpu", ranks=range(context.world_size), name="tp:0")
    except CommError as error:
        return str(error)
    finally:
        threading.Thread.start = real  # type: ignore[method-assign]
    raise AssertionError("it was made")


def _refuse(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_group_that_cannot_be_watched_is_not_made(backend: dict[str, str]) -> None:
    """Given no thread to be had, when a group is made, then an error says which group, and what to look at."""
    for rank, text in enumerate(run_ranks(_is_made_without_threads, 2, env=backend)):
        assert text.startswith(f"group tp:0, global rank {rank} of [0, 1]: its calls cannot be watched"), text
        assert "can't start new thread" in text and "ulimit -u" in text, text


def _transfers_without_threads(context: RankContext) -> dict[str, str]:
    """A further group, then a send and a receive, which need a thread of their own, in rank 0."""
    # Less than why a call failed is looked for.
    group, store = communicator_of_all(context, operation_timeout_s=EXPLAIN_LIMIT_S / 2), context.store("tried")
    texts = {}
    real, threading.Thread.start = threading.Thread.start, _refuse  # type: ignore[method-assign]
    try:
        second = communicator_of_all(context)
        second.all_reduce(torch.ones(1))
        if context.rank == 0:
            calls = {"send": lambda: group.send(torch.ones(3), 1)}
            if group.backend == "flagcx":
                calls["recv"] = lambda: group.recv(torch.Size([3]), torch.float32, 1)
            for name, call in calls.items():
                with pytest.raises(CommError) as raised:
                    call()
                texts[name] = str(raised.value)
            store.set("tried", "1")
        store.wait(["tried"])
        second.destroy()
    finally:
        threading.Thread.start = real  # type: ignore[method-assign]
    return texts


def test_a_transfer_without_a_thread_says_so(backend: dict[str, str]) -> None:
    """Given no further thread to be had, when a group is made beside a first one, then it works; a transfer that needs
    a thread is an error that names group and reason, and none that says its limit had passed."""
    texts, _ = run_ranks(_transfers_without_threads, 2, env=backend, timeout_s=NEVER_S)
    assert "send" in texts
    for text in texts.values():
        assert text.startswith("group tp:0") and "can't start new thread" in text and "ulimit -u" in text, text
