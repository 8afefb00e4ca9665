"""A Triton kernel for all_reduce in symmetric memory: each rank reads its peers' tensors where they lie, adds them up.

Ranks wait for each other twice: until the peers' tensors are complete, and until they have read this rank's, which may
be overwritten from then on. Numbers of flags are kept on the device by each program for itself, so that replays of a
graph count; they stay equal on all ranks if all make the same calls. Import needs Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from sglang_fl.comm.backends.vendor.cuda.flags import arrived, peers_flags, tell, tell_read, wait

_Decorator = Callable[[Callable[..., Any]], Any]
_jit: _Decorator = triton.jit


@_jit
def pull_kernel(
    source_ptr: tl.tensor,
    target_ptr: tl.tensor,
    distances_ptr: tl.tensor,
    flags_ptr: tl.tensor,
    flag_distances_ptr: tl.tensor,
    counters_ptr: tl.tensor,
    count: tl.tensor,
    rank: tl.constexpr,
    world: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """``target`` gets the sum of all ranks' ``source``, which may be the same; grid (programs), the same on all ranks,
    all resident.

    ``distances``: int64, bytes, multiples of 16, from this rank's ``source`` to each rank's; ``flag_distances`` alike.
    ``counters``: int32 [programs], this rank's own, the last number told.
    """
    program = tl.program_id(0)
    item: tl.constexpr = source_ptr.dtype.element_ty.primitive_bitwidth // 8
    step_size = tl.num_programs(0) * block
    steps = (count + step_size - 1) // step_size
    number = tl.load(counters_ptr + program) + 1
    places = peers_flags(flags_ptr, flag_distances_ptr, rank, world)
    tell(places, number, rank, world)
    sources = tl.tuple(())
    for peer in tl.static_range(world):
        sources += (source_ptr + tl.multiple_of(tl.load(distances_ptr + peer) // item, 16 // item),)
    wait(flags_ptr, places, number, rank, world)
    for step in range(0, steps):
        offsets = step * step_size + program * block + tl.arange(0, block)
        mask = offsets < count
        values = tl.tuple(())  # all under way before the first one is waited for
        for peer in tl.static_range(world):
            values += (tl.load(sources[peer] + offsets, mask=mask, cache_modifier=".cg"),)
        # In the order of the ranks, so that all get the same bits.
        total = values[0].to(tl.float32)
        for peer in tl.static_range(1, world):
            total += values[peer].to(tl.float32)
        result = arrived(total.to(target_ptr.dtype.element_ty))
        number += 1
        tell_read(places, number, rank, world)
        wait(flags_ptr, places, number, rank, world)
        tl.store(target_ptr + offsets, result, mask=mask)
    tl.store(counters_ptr + program, number)
