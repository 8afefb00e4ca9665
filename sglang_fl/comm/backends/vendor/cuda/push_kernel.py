"""A Triton kernel for all_reduce of few bytes: each rank writes its data to all others, who add up what has come.

One wait in a call, where reading from the peers needs two. What is written goes into one of two slots in turn: a rank
writes to a slot of a peer again after a call in between has ended here, for which the peer must have begun that call,
and so have ended the one that read the slot. That holds if every rank makes its calls one after the other on its
device. Numbers of calls are kept on the device, so that replays of a graph count. Import needs Triton.

A rank's block: flags (int32 [programs, ranks]: number of the last call whose data is there), then data
([2 slots, ranks, slot_bytes]). ``counter`` is this rank's own: calls so far, programs of this call that have ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

_Decorator = Callable[[Callable[..., Any]], Any]
_jit: _Decorator = triton.jit


@_jit
def _place(anchor_ptr: tl.tensor, distance: tl.tensor) -> tl.tensor:
    """``anchor_ptr`` and as many bytes, a multiple of 16: so told, loads and stores are 16 bytes a thread."""
    item: tl.constexpr = anchor_ptr.dtype.element_ty.primitive_bitwidth // 8
    return anchor_ptr + tl.multiple_of(distance // item, 16 // item)


@_jit
def push_kernel(
    source_ptr: tl.tensor,
    target_ptr: tl.tensor,
    anchor_ptr: tl.tensor,
    distances_ptr: tl.tensor,
    counter_ptr: tl.tensor,
    count: tl.tensor,
    rank: tl.constexpr,
    world: tl.constexpr,
    flag_bytes: tl.constexpr,
    slot_bytes: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """``target`` gets the sum of all ranks' ``source``, which may be the same; grid (blocks of ``count``).

    ``distances``: int64, bytes from ``anchor``, memory of this rank's own of the tensors' dtype, to each rank's block.
    """
    program = tl.program_id(0)
    offsets = program * block + tl.arange(0, block)
    mask = offsets < count
    call = tl.load(counter_ptr)
    wanted = call + 1
    slot = flag_bytes + (call & 1).to(tl.int64) * (world * slot_bytes)
    flags_ptr = anchor_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    own = tl.load(source_ptr + offsets, mask=mask)
    for peer in tl.static_range(world):
        if peer != rank:
            place = _place(anchor_ptr, tl.load(distances_ptr + peer) + slot + rank * slot_bytes)
            tl.store(place + offsets, own, mask=mask)
    tl.debug_barrier()  # the flag follows what all threads have written
    for peer in tl.static_range(world):
        if peer != rank:
            flag = flags_ptr + tl.load(distances_ptr + peer) // 4 + program * world + rank
            tl.atomic_xchg(flag, wanted, sem="release", scope="sys")
    for peer in tl.static_range(world):
        if peer != rank:
            flag = flags_ptr + tl.load(distances_ptr + rank) // 4 + program * world + peer
            # A peer may be one call further; the difference is right beyond 2**31 calls as well.
            while tl.atomic_add(flag, 0, sem="acquire", scope="sys") - wanted < 0:
                pass
    tl.debug_barrier()
    total = tl.zeros([block], dtype=tl.float32)
    # In the order of the ranks, so that all get the same bits.
    for peer in tl.static_range(world):
        if peer == rank:
            total += own.to(tl.float32)
        else:
            place = _place(anchor_ptr, tl.load(distances_ptr + rank) + slot + peer * slot_bytes)
            total += tl.load(place + offsets, mask=mask, volatile=True).to(tl.float32)
    tl.store(target_ptr + offsets, total.to(target_ptr.dtype.element_ty), mask=mask)
    ended = tl.atomic_add(counter_ptr + 1, 1)
    if ended == tl.num_programs(0) - 1:
        tl.store(counter_ptr + 1, 0)
        tl.store(counter_ptr, wanted)
