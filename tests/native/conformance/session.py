"""One rank's opened library, its device and its communicators, whatever library FLAGCX_PATH names."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import subprocess
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import torch

from sglang_fl.comm.backends.flagcx import FlagCXCommunicator, FlagCXLibrary, MemoryKind
from sglang_fl.testing.ranks import RankContext

ROOT = Path(__file__).parents[3]
_CREATION_LIMIT_S = 60.0
_numbers = itertools.count()  # of this process's sessions: the same on all ranks


def hostcx_path() -> Path:
    """The hostcx of this checkout as a FLAGCX_PATH directory, built if it is not there."""
    path = ROOT / "build" / "hostcx"
    path.parent.mkdir(exist_ok=True)
    with (path.parent / "hostcx.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        if not (path / "lib" / "libflagcx.so").exists() and not (path / "build" / "lib" / "libflagcx.so").exists():
            subprocess.run(["make", "-C", str(ROOT / "csrc" / "hostcx"), f"OUT={path}"], check=True)
    return path


class Session:
    """What the cases call: rank ``rank`` of ``world_size`` with a communicator over all ranks."""

    def __init__(self, context: RankContext) -> None:
        self.context = context
        self.world_size = context.world_size
        self.rank = context.rank
        self.library = FlagCXLibrary.open()
        self.on_host = self.library.capabilities.memory is MemoryKind.HOST
        self.device = torch.device("cpu") if self.on_host else torch.device("cuda", context.local_rank)
        if not self.on_host:
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(torch.cuda.Stream(self.device))  # no box for it exists beforehand
        self._store = context.store(f"unique-ids-of-session-{next(_numbers)}")
        self.communicator = self.join("all", self.rank)

    def join(self, name: str, rank: int) -> FlagCXCommunicator:
        """Another communicator over all ranks, in which this process is ``rank``; all ranks call this."""
        if rank == 0:
            self._store.set(name, self.library.unique_id())
        return FlagCXCommunicator.create(self.library, self._store.get(name), self.world_size, rank, _CREATION_LIMIT_S)

    @property
    def next_rank(self) -> int:
        return (self.rank + 1) % self.world_size

    @property
    def previous_rank(self) -> int:
        return (self.rank - 1) % self.world_size

    @cached_property
    def stream(self) -> int:
        """The raw stream that everything is enqueued on; the host has none."""
        return 0 if self.on_host else torch.cuda.current_stream(self.device).cuda_stream

    def synchronize(self) -> None:
        """Wait for what was enqueued."""
        if not self.on_host:
            torch.cuda.synchronize(self.device)


@contextlib.contextmanager
def opened(context: RankContext) -> Iterator[Session]:
    """A session whose communicator is closed at the end if all went well."""
    session = Session(context)
    yield session
    session.communicator.close()
    session.library.close()
