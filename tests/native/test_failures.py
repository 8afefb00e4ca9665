"""What the others see when a rank of hostcx is killed, and what is left in memory when all are."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from sglang_fl.comm.backends.flagcx import (
    DataType,
    FlagCXCommunicator,
    FlagCXError,
    FlagCXLibrary,
    ReduceOp,
    ResultCode,
)
from sglang_fl.testing.ranks import RankContext, run_ranks

from .conformance.session import Session, hostcx_path

NOTICED_WITHIN_S = 5.0
_SHARED_MEMORY = Path("/dev/shm")
# What Python and torch make there for other programs of this machine, and may leave when those are killed.
_FOREIGN_NAMES = ("psm_", "sem.", "torch_")
_LARGE = 16 * 1024 * 1024  # elements of float32: 64 MiB


@pytest.fixture(scope="module")
def hostcx() -> dict[str, str]:
    """FLAGCX_PATH of the host library: the caller's, or this checkout's hostcx, built if need be."""
    return {"FLAGCX_PATH": os.environ.get("FLAGCX_PATH") or str(hostcx_path()), "HOSTCX_QUIET": "1"}


@dataclass(frozen=True)
class Noticed:
    """What a survivor saw: its error, when (on the clock that all processes share), and what came after."""

    code: ResultCode | int
    text: str
    at_s: float
    async_error: int
    next_call: ResultCode | int | None
    left_mapped: list[str]


def _die_in(context: RankContext, seconds: float) -> None:
    """Kill this process from a thread, and say when in a file."""

    def die() -> None:
        time.sleep(seconds)
        (context.directory / "died-at").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die).start()


def _all_reduce(session: Session, tensor: torch.Tensor) -> None:
    address = tensor.data_ptr()
    session.communicator.all_reduce(address, address, tensor.numel(), DataType.FLOAT32, ReduceOp.SUM)


def _segments_in_this_process() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [entry for entry in lines + links if "memfd:" in entry or _is_own_file(entry)]


def _is_own_file(entry: str) -> bool:
    """Whether a mapping or descriptor is of a file in /dev/shm that this process did not inherit from others' code."""
    _, found, name = entry.partition(f"{_SHARED_MEMORY}/")
    return bool(found) and not name.startswith(_FOREIGN_NAMES)


def _noticed(session: Session, call: Callable[[], None]) -> Noticed:
    """Repeat ``call`` until it raises; then look at the communicator and end it."""
    before = _segments_in_this_process()
    assert before, "the segment of a live communicator is not seen: the check below could not fail"
    while True:
        try:
            call()
        except FlagCXError as error:
            at_s, first = time.monotonic(), error
            break
    async_error, next_call = session.communicator.async_error(), None
    try:
        call()
    except FlagCXError as error:
        next_call = error.code
    session.communicator.abort()
    session.communicator.close()
    session.library.close()
    return Noticed(first.code, str(first), at_s, async_error, next_call, _segments_in_this_process())


def _assert_noticed(survivors: list[Noticed], died_at_s: float, victim: int) -> None:
    # The first to see it names the victim; another one may hear of it from the first.
    assert any(f"rank {victim} (process" in noticed.text for noticed in survivors), survivors
    for noticed in survivors:
        assert noticed.code is ResultCode.REMOTE_ERROR, noticed.text
        assert 0 <= noticed.at_s - died_at_s < NOTICED_WITHIN_S
        assert noticed.async_error == ResultCode.REMOTE_ERROR
        assert noticed.next_call is ResultCode.REMOTE_ERROR
        assert noticed.left_mapped == []


class _SharedMemory:
    """Which files in /dev/shm appeared since this was made and have no living user: nobody else's count."""

    def __init__(self) -> None:
        self._before = self._names()

    @staticmethod
    def _names() -> set[str]:
        return {path.name for path in _SHARED_MEMORY.iterdir() if not path.name.startswith(_FOREIGN_NAMES)}

    def left_behind(self, for_s: float = 5.0) -> set[str]:
        """Those that stay; other processes of this machine make and remove files at any time."""
        until = time.monotonic() + for_s
        while True:
            names = {name for name in self._names() - self._before if not _is_in_use(_SHARED_MEMORY / name)}
            if not names or time.monotonic() > until:
                return names
            time.sleep(0.1)


def _is_in_use(path: Path) -> bool:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(path) in (process / "maps").read_text():
                return True
            if any(link.readlink() == path for link in (process / "fd").iterdir()):
                return True
        except OSError:
            continue  # it has ended meanwhile
    return False


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_killed_in_the_middle_of_all_reduce(hostcx: dict[str, str], world_size: int) -> None:
    """Given ranks that all_reduce 64 MiB again and again, when one is killed, then the others get an error soon."""
    victim = world_size - 1

    def rank_main(context: RankContext) -> tuple[float, Noticed] | None:
        session = Session(context)
        tensor = torch.ones(_LARGE)
        _all_reduce(session, tensor)
        if context.rank == victim:
            _die_in(context, 0.1)
            while True:
                _all_reduce(session, tensor)
        noticed = _noticed(session, lambda: _all_reduce(session, tensor))
        return float((context.directory / "died-at").read_text()), noticed

    memory = _SharedMemory()
    results = run_ranks(rank_main, world_size, gloo=False, env=hostcx, expect_killed=[victim])

    _assert_noticed([noticed for _, noticed in results[:victim]], results[0][0], victim)
    assert memory.left_behind() == set()


def _wait_in(name: str, session: Session, victim: int) -> None:
    communicator = session.communicator
    tensor = torch.ones(1 << 20)
    address, count = tensor.data_ptr(), tensor.numel()
    if name == "recv":
        communicator.recv(address, count, DataType.FLOAT32, victim)
    elif name == "send":
        communicator.send(address, count, DataType.FLOAT32, victim)
    elif name == "barrier":
        communicator.barrier()
    elif name == "broadcast":
        communicator.broadcast(address, address, count, DataType.FLOAT32, victim)
    elif name == "group":
        with communicator.group():
            communicator.all_reduce(address, address, count, DataType.FLOAT32, ReduceOp.SUM)
            communicator.recv(address, count, DataType.FLOAT32, victim)


@pytest.mark.parametrize("name", ["recv", "send", "barrier", "broadcast", "group"])
def test_a_rank_killed_while_others_wait_for_it(hostcx: dict[str, str], name: str) -> None:
    """Given ranks that wait in a call for one that never enters it, when that one is killed, then they get an error."""
    victim = 1

    def rank_main(context: RankContext) -> tuple[float, Noticed] | None:
        session = Session(context)
        if context.rank == victim:
            _die_in(context, 0.2)
            time.sleep(60)
        noticed = _noticed(session, lambda: _wait_in(name, session, victim))
        return float((context.directory / "died-at").read_text()), noticed

    results = run_ranks(rank_main, 3, gloo=False, env=hostcx, expect_killed=[victim])

    survivors = [result for rank, result in enumerate(results) if rank != victim]
    _assert_noticed([noticed for _, noticed in survivors], survivors[0][0], victim)


@pytest.mark.parametrize("victim", [0, 2], ids=["the maker of the unique id", "another rank"])
def test_a_rank_killed_while_creating(hostcx: dict[str, str], victim: int) -> None:
    """Given a rank that has not come yet, when one that waits for it is killed, then the other waiting ones fail."""
    world_size, late = 4, 3

    def rank_main(context: RankContext) -> tuple[float, ResultCode | int, str] | None:
        waiting = [rank for rank in range(world_size) if rank not in (victim, late)]
        if context.rank == late:  # holds the creation open until the others have seen enough
            _wait_for(context.directory / f"seen-by-{rank}" for rank in waiting)
            return None
        library, store = FlagCXLibrary.open(), context.store("id")
        if context.rank == 0:
            store.set("id", library.unique_id())
        unique_id = store.get("id")
        if context.rank == victim:
            _die_in(context, 0.5)
        try:
            FlagCXCommunicator.create(library, unique_id, world_size, context.rank, timeout_s=50.0)
        except FlagCXError as error:
            at_s = time.monotonic()
            (context.directory / f"seen-by-{context.rank}").touch()
            return at_s - float((context.directory / "died-at").read_text()), error.code, str(error)
        raise AssertionError("a communicator was created without all its ranks")

    memory = _SharedMemory()
    results = run_ranks(rank_main, world_size, gloo=False, env=hostcx, expect_killed=[victim])

    for rank in set(range(world_size)) - {victim, late}:
        after_s, code, text = results[rank]
        assert code is ResultCode.REMOTE_ERROR, text
        assert 0 <= after_s < NOTICED_WITHIN_S
        assert f"rank {rank} of {world_size}" in text
        assert "The library says: " in text and "rank" in text.split("The library says: ")[1], text
    assert memory.left_behind() == set()


def test_a_rank_that_gave_its_creation_up_fails_the_others_calls(hostcx: dict[str, str]) -> None:
    """Given a rank that gave up waiting for a late one, when that one comes and calls, then it gets an error."""

    def rank_main(context: RankContext) -> tuple[ResultCode | int, str]:
        library, store = FlagCXLibrary.open(), context.store("id")
        if context.rank == 0:
            unique_id = library.unique_id()
            try:
                FlagCXCommunicator.create(library, unique_id, 2, 0, timeout_s=0.3)
            except FlagCXError as error:
                store.set("id", unique_id)
                _wait_for([context.directory / "seen"])
                return error.code, str(error)
            raise AssertionError("a communicator was created without all its ranks")
        try:
            communicator = FlagCXCommunicator.create(library, store.get("id"), 2, 1, timeout_s=20.0)
            tensor = torch.ones(1 << 20)
            communicator.all_reduce(tensor.data_ptr(), tensor.data_ptr(), tensor.numel(), DataType.FLOAT32, 0)
        except FlagCXError as error:
            return error.code, str(error)
        finally:
            (context.directory / "seen").touch()
        raise AssertionError("an all_reduce succeeded without its other rank")

    early, late = run_ranks(rank_main, 2, gloo=False, env=hostcx)

    assert early[0] is ResultCode.TIMED_OUT, early
    assert late[0] is ResultCode.REMOTE_ERROR, late


def _wait_for(paths: object) -> None:
    for path in paths:
        while not path.exists():
            time.sleep(0.01)


@pytest.mark.parametrize("stage", ["all_reduce", "creation"])
def test_all_ranks_killed_at_once_leave_nothing(hostcx: dict[str, str], stage: str) -> None:
    """Given ranks in the middle of a call, when all are killed at the same time, then no shared memory stays."""
    world_size = 3

    def rank_main(context: RankContext) -> None:
        library, store = FlagCXLibrary.open(), context.store("id")
        if context.rank == 0:
            store.set("id", library.unique_id())
            store.set("deadline", str(time.monotonic() + 1.0))
        unique_id = store.get("id")
        _die_in(context, float(store.get("deadline")) - time.monotonic())
        # One rank more than there are: the creation never ends.
        ranks = world_size + 1 if stage == "creation" else world_size
        communicator = FlagCXCommunicator.create(library, unique_id, ranks, context.rank, timeout_s=50.0)
        tensor = torch.ones(_LARGE)
        address = tensor.data_ptr()
        while True:
            communicator.all_reduce(address, address, _LARGE, DataType.FLOAT32, ReduceOp.SUM)

    memory = _SharedMemory()
    results = run_ranks(rank_main, world_size, gloo=False, env=hostcx, expect_killed=range(world_size))

    assert results == [None] * world_size
    assert memory.left_behind() == set()


def test_a_file_left_in_shared_memory_is_noticed() -> None:
    """Given a file that its maker left behind, when the check looks, then it names it: the check can fail."""
    memory = _SharedMemory()
    path = _SHARED_MEMORY / f"sglang_fl-left-behind-{os.getpid()}"
    path.touch()
    try:
        assert path.name in memory.left_behind(for_s=0.0)
        with path.open():
            assert path.name not in memory.left_behind(for_s=0.0)
    finally:
        path.unlink()
