"""Flags by which programs of a Triton kernel wait for the programs of the same number on the other ranks' GPUs.

A rank's flags: int32 [programs, ROW], in memory that all ranks reach; program P of rank R writes its numbers, which
only grow, to [P, R] of every other rank. Import needs Triton, whose interpreter has atomics in the place of PTX.

Flags are written and read without an order of memory (relaxed), as SGLang's kernel does it (custom_all_reduce.cuh, one
shot). PTX's memory model does not say that this is enough; the hardware's ways are:

- What kernels before on the stream wrote is in their GPU's L2 cache once this one runs (it is not launched early, as
  programmatic dependents are), and peers read it there (``.cg`` passes their L1 by). A fence before the first flag
  would find nothing left to do.
- A value that is in a register (:func:`arrived`) does not change by what a peer stores once it has been told.
- No store is made before a branch that it depends on, nor moved across a barrier.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

_Decorator = Callable[[Callable[..., Any]], Any]
_jit: _Decorator = triton.jit

IS_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
ROW = tl.constexpr(32)  # a cache line for each program: looks at one hold up what peers write to the same one
# Thread T is for rank T's flags, all at once; the others, and the rank itself, have no place there.
PLACE = tl.constexpr(
    "{ .reg .pred is_peer; .reg .u32 thread; .reg .u64 from; mov.u32 thread, %tid.x; mov.u64 $0, 0; "
    "setp.lt.u32 is_peer, thread, $4; setp.ne.and.u32 is_peer, thread, $3, is_peer; "
    "mad.wide.u32 from, thread, 8, $2; @is_peer ld.global.u64 $0, [from]; @is_peer add.u64 $0, $0, $1; }"
)
PUT = tl.constexpr(
    "{ .reg .pred is_peer; setp.ne.u64 is_peer, $1, 0; @is_peer st.relaxed.sys.global.u32 [$1], $2; mov.u32 $0, 0; }"
)
# The difference is right beyond 2**31 as well.
WAIT = tl.constexpr(
    "{ .reg .pred is_other, is_early; .reg .u32 thread, found; .reg .u64 flag; setp.eq.u64 is_other, $1, 0; "
    "@is_other bra DONE; mov.u32 thread, %tid.x; mad.wide.u32 flag, thread, 4, $2; "
    "LOOK: ld.relaxed.sys.global.u32 found, [flag]; sub.s32 found, found, $3; setp.lt.s32 is_early, found, 0; "
    "@is_early bra LOOK; DONE: mov.u32 $0, 0; }"
)
# Four registers as they are, and a fence, without an effect on them, if they have one value of all.
ARRIVED = tl.constexpr(
    "{ .reg .b32 all; .reg .pred is_one; xor.b32 all, $4, $5; xor.b32 all, all, $6; xor.b32 all, all, $7; "
    "setp.eq.u32 is_one, all, 0x7fc0ffee; @is_one fence.acq_rel.gpu; "
    "mov.b32 $0, $4; mov.b32 $1, $5; mov.b32 $2, $6; mov.b32 $3, $7; }"
)


@_jit
def peers_flags(flags_ptr: tl.tensor, distances_ptr: tl.tensor, rank: tl.constexpr, world: tl.constexpr) -> Any:
    """Where this program writes on each other rank, for :func:`tell` and :func:`wait`.

    ``distances``: int64, bytes from this rank's flags to each rank's. Looked up once: it takes as long as a flag.
    """
    own_ptr = flags_ptr + tl.program_id(0) * ROW + rank
    if IS_INTERPRETED:
        places = tl.tuple(())
        for peer in tl.static_range(world):
            places += (own_ptr + tl.load(distances_ptr + peer) // 4,)
    else:
        arguments = [own_ptr.to(tl.int64), distances_ptr.to(tl.int64), rank, world]
        place = tl.inline_asm_elementwise(PLACE, "=l,l,l,r,r", arguments, dtype=tl.int64, is_pure=False, pack=1)
        places = tl.tuple((place,))
    return places


@_jit
def tell(places: tl.tuple, number: tl.tensor, rank: tl.constexpr, world: tl.constexpr) -> None:
    """Write ``number`` to this program's flag on each other rank, in no order with what was read and written."""
    if IS_INTERPRETED:
        for peer in tl.static_range(world):
            if peer != rank:
                tl.atomic_xchg(places[peer], number, sem="release", scope="sys")
    else:
        tl.inline_asm_elementwise(PUT, "=r,l,r", [places[0], number], dtype=tl.int32, is_pure=False, pack=1)


@_jit
def arrived(values: tl.tensor) -> tl.tensor:
    """``values``, of which each thread has at least 16 bytes, once all that was loaded for them has arrived.

    A barrier alone does not say so: ptxas lets loads be under way across it, and for each warp looks at them only
    where their values are used. A branch that depends on the values cannot be put off until after the barrier.
    """
    if IS_INTERPRETED:
        return values
    item: tl.constexpr = values.dtype.primitive_bitwidth // 8
    bits = values.to(tl.int32 if item == 4 else tl.int16, bitcast=True)
    bits = tl.inline_asm_elementwise(
        ARRIVED, "=r,=r,=r,=r,r,r,r,r", [bits], dtype=bits.dtype, is_pure=False, pack=16 // item
    )
    return bits.to(values.dtype, bitcast=True)


@_jit
def tell_read(places: tl.tuple, number: tl.tensor, rank: tl.constexpr, world: tl.constexpr) -> None:
    """As :func:`tell`, after all that the program's threads have read before (:func:`arrived`)."""
    tl.debug_barrier()
    tell(places, number, rank, world)


@_jit
def wait(flags_ptr: tl.tensor, places: tl.tuple, number: tl.tensor, rank: tl.constexpr, world: tl.constexpr) -> None:
    """Until each other rank's program has told ``number`` or a later one; a thread looks for each rank."""
    own_ptr = flags_ptr + tl.program_id(0) * ROW
    if IS_INTERPRETED:
        for peer in tl.static_range(world):
            if peer != rank:
                while tl.atomic_add(own_ptr + peer, 0, sem="acquire", scope="sys") - number < 0:
                    pass
    else:
        arguments = [places[0], own_ptr.to(tl.int64), number]
        tl.inline_asm_elementwise(WAIT, "=r,l,l,r", arguments, dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()
