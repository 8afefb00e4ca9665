"""SGLang's symmetric pool as windows of FlagCX: SGLang's own class and our hook on it, with a pool of host memory."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from sglang_fl.comm.backends.flagcx.transport import FlagCXTransport
from sglang_fl.sglang_hooks import symmetric_pool
from sglang_fl.sglang_hooks.registration import misfits
from sglang_fl.testing.ranks import RankContext, run_ranks
from tests.distributed.groups import communicator_of_all

SIZE = 2**20


class StandInPool:
    """A pool with one segment of host memory, where SGLang's has device memory."""

    def __init__(self) -> None:
        self.memory = torch.zeros(SIZE, dtype=torch.uint8)
        self.looks = 0

    def snapshot(self) -> list[dict[str, int]]:
        """As torch.cuda.MemPool's."""
        self.looks += 1
        return [{"address": self.memory.data_ptr(), "total_size": SIZE}]


def leave(coordinator: Any, is_graph_capture: bool = False, error: type[BaseException] | None = None) -> None:
    """What SGLang's __exit__ is followed by."""
    symmetric_pool._after_exit(
        None, SimpleNamespace(group_coordinator=coordinator, is_graph_capture=is_graph_capture), error, None, None
    )


def registered(context: RankContext) -> tuple[list[int], list[str]]:
    """Windows that the library was asked for after each step, and what the log says."""
    from sglang.srt.distributed.device_communicators import pynccl_allocator

    pool = StandInPool()
    pynccl_allocator.get_nccl_mem_pool = lambda: pool
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("sglang_fl.comm")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    communicator = communicator_of_all(context)
    transport = communicator.agreed.transport
    counts: list[int] = []
    library = None
    if isinstance(transport, FlagCXTransport):
        library = ctypes.CDLL(transport.communicator.library.path)
        library.hostcxCallCountOf.restype = ctypes.c_uint64

    def count() -> None:
        counts.append(0 if library is None else int(library.hostcxCallCountOf(b"flagcxCommWindowRegister")))

    coordinator = SimpleNamespace(fl_communicator=communicator)
    for arguments in ({"is_graph_capture": True}, {"error": KeyError}, {}, {}):
        leave(coordinator, **arguments)  # type: ignore[arg-type]
        count()
    leave(SimpleNamespace(fl_communicator=None))
    communicator.destroy()
    return [*counts, pool.looks], [text for text in said if "pool" in text]


def test_the_pool_becomes_a_window_once(hostcx: Path) -> None:
    """Given FlagCX, when SGLang leaves its pool in a capture, by an error, and then twice in good order, then the first
    time in good order the segment is registered and said to be, and no other time is anything looked at."""
    wanted = ([0, 0, 1, 1, 1], ["[sglang_fl] group tp:0: SGLang's symmetric pool (1.0 MiB) is registered"])
    assert run_ranks(registered, 2, env={"FLAGCX_PATH": str(hostcx)}) == [wanted, wanted]


def test_routes_of_mode_fastest_know_the_pool(hostcx: Path) -> None:
    """Given mode fastest over FlagCX, then the pool is registered there as well."""
    routes = {"SGLANG_FL_COMM_MODE": "fastest", "SGLANG_FL_COMM_ROUTES": "all_reduce=torch:1KiB"}
    for _, said in run_ranks(registered, 2, env={"FLAGCX_PATH": str(hostcx), **routes}):
        assert said == ["[sglang_fl] group tp:0: SGLang's symmetric pool (1.0 MiB) is registered"]


def test_without_flagcx_nothing_is_done() -> None:
    """Given a backend that registers no memory, then the pool is looked at once and nothing is said."""
    wanted: tuple[list[int], list[str]] = ([0, 0, 0, 0, 1], [])
    assert run_ranks(registered, 2, env={"SGLANG_FL_DIST_BACKEND": "torch"}) == [wanted, wanted]


def test_the_hook_fits_sglang() -> None:
    """Given the installed SGLang, then the hook's target is there with the parameters that the hook knows, and what
    the hook reads of it."""
    from sglang.srt.distributed.device_communicators import pynccl_allocator

    assert misfits(symmetric_pool.hooks()) == []
    source = Path(pynccl_allocator.__file__).read_text(encoding="utf-8")
    for text in ("self.group_coordinator = ", "self.is_graph_capture = ", "def get_nccl_mem_pool():"):
        assert text in source
