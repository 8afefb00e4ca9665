"""Makes the pool that SGLang allocates from under --enable-symm-mem known to FlagCX, as windows.

There SGLang allocates what it reduces from memory that it registers with PyNccl's communicator. FlagCX has one of its
own, for which the same memory is ordinary until it is registered there, too. SGLang fills the pool once, before it
serves and captures (SGLANG_SYMM_MEM_PREALLOC_GB_SIZE, 4 GiB), and splits that; what the pool takes beyond it later
stays ordinary memory to FlagCX, since looking for it would cost every layer's call.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang_fl.comm.memory import in_words
from sglang_fl.comm.sizes import adopt_block
from sglang_fl.sglang_hooks.registration import Hook, HookKind

logger = logging.getLogger("sglang_fl.comm")

_CONTEXT = "sglang.srt.distributed.device_communicators.pynccl_allocator.SymmetricMemoryContext"


def hooks() -> list[Hook]:
    """A hook on the end of a stretch of code that allocates there; after a group's first one it is a look-up."""
    return [Hook(f"{_CONTEXT}.__exit__", _after_exit, HookKind.AFTER)]


def _after_exit(result: Any, self: Any, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
    coordinator = self.group_coordinator
    # What captures cannot register; it allocates from what a run before it has left in the pool.
    if getattr(coordinator, "fl_has_pool", False) or exc_type is not None or self.is_graph_capture:
        return
    coordinator.fl_has_pool = True
    communicator = coordinator.fl_communicator
    if communicator is None:
        return
    from sglang.srt.distributed.device_communicators import pynccl_allocator

    # The first stretch is the same on all ranks, and so are the segments; their registration checks it.
    for segment in pynccl_allocator.get_nccl_mem_pool().snapshot():
        size = int(segment["total_size"])
        reasons = adopt_block(communicator, int(segment["address"]), size)
        if reasons is None:
            return
        pool = f"SGLang's symmetric pool ({in_words(size)})"
        if reasons:
            logger.warning(
                "[sglang_fl] group %s: %s is ordinary memory to it: %s", communicator.name, pool, "; ".join(reasons)
            )
        else:
            logger.info("[sglang_fl] group %s: %s is registered", communicator.name, pool)
