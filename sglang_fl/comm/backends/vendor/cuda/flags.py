"""Flags by which programs of a Triton kernel wait for the programs of the same number on the other ranks' GPUs.

A rank's flags: int32 [programs, ranks], in memory that all ranks reach; program P of rank R writes its numbers, which
only grow, to [P, R] of every other rank. Import needs Triton, whose interpreter has atomics in the place of PTX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

_Decorator = Callable[[Callable[..., Any]], Any]
_jit: _Decorator = triton.jit

IS_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
# An atomic on a flag is a round trip through the L2 cache, to a peer through NVLink; plain loads and stores are less.
_ONE_THREAD = "{ .reg .pred is_first; .reg .u32 thread; mov.u32 thread, %tid.x; setp.eq.u32 is_first, thread, 0; "
_END = " mov.u32 $0, 0; }"
PUT = tl.constexpr(_ONE_THREAD + "@is_first st.relaxed.sys.global.u32 [$1], $2;" + _END)
FENCE = tl.constexpr(_ONE_THREAD + "@is_first fence.acq_rel.sys;" + _END)
GET = tl.constexpr("ld.acquire.sys.global.u32 $0, [$1];")
# Four values as they are, and a fence, without an effect on them, if their sum is no number.
ARRIVED = tl.constexpr(
    "{ .reg .f32 sum; .reg .pred is_nan; "
    "add.f32 sum, $4, $5; add.f32 sum, sum, $6; add.f32 sum, sum, $7; setp.nan.f32 is_nan, sum, sum; "
    "@is_nan fence.acq_rel.gpu; "
    "mov.f32 $0, $4; mov.f32 $1, $5; mov.f32 $2, $6; mov.f32 $3, $7; }"
)


@_jit
def _put(flag_ptr: tl.tensor, number: tl.tensor) -> None:
    if IS_INTERPRETED:
        tl.atomic_xchg(flag_ptr, number, sem="release", scope="sys")
    else:
        tl.inline_asm_elementwise(PUT, "=r,l,r", [flag_ptr, number], dtype=tl.int32, is_pure=False, pack=1)


@_jit
def _get(flag_ptr: tl.tensor) -> tl.tensor:
    if IS_INTERPRETED:
        number = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    else:
        number = tl.inline_asm_elementwise(GET, "=r,l", [flag_ptr], dtype=tl.int32, is_pure=False, pack=1)
    return number


@_jit
def peers_flags(flags_ptr: tl.tensor, distances_ptr: tl.tensor, rank: tl.constexpr, world: tl.constexpr) -> Any:
    """Where this program writes on each rank; its own place is there, too, and not used.

    ``distances``: int64, bytes from this rank's flags to each rank's. Looked up once: it takes as long as a flag.
    """
    own_ptr = flags_ptr + tl.program_id(0) * world + rank
    places = tl.tuple(())
    for peer in tl.static_range(world):
        places += (own_ptr + tl.load(distances_ptr + peer) // 4,)
    return places


@_jit
def tell(places: tl.tuple, number: tl.tensor, rank: tl.constexpr, world: tl.constexpr) -> None:
    """Write ``number`` to this program's flag on each other rank, in no order with what was read and written."""
    for peer in tl.static_range(world):
        if peer != rank:
            _put(places[peer], number)


@_jit
def arrived(values: tl.tensor) -> tl.tensor:
    """``values``, float32, of which each thread has at least four, once all that was loaded for them has arrived.

    A barrier alone does not say so: ptxas lets loads be under way across it, and for each warp looks at them only
    where their values are used. A branch that depends on the values cannot be put off until after the barrier.
    """
    if not IS_INTERPRETED:
        values = tl.inline_asm_elementwise(
            ARRIVED, "=f,=f,=f,=f,f,f,f,f", [values], dtype=tl.float32, is_pure=False, pack=4
        )
    return values


@_jit
def tell_done(places: tl.tuple, number: tl.tensor, rank: tl.constexpr, world: tl.constexpr) -> None:
    """As :func:`tell`, after all that the program's threads have read (:func:`arrived`) and written before."""
    tl.debug_barrier()
    # One for all flags: with a store of its own order each would wait until the one before has arrived.
    if not IS_INTERPRETED:
        tl.inline_asm_elementwise(FENCE, "=r,r", [number], dtype=tl.int32, is_pure=False, pack=1)
    tell(places, number, rank, world)


@_jit
def wait(flags_ptr: tl.tensor, number: tl.tensor, rank: tl.constexpr, world: tl.constexpr) -> None:
    """Until each other rank's program has told ``number`` or a later one; all threads look, each for itself."""
    own_ptr = flags_ptr + tl.program_id(0) * world
    for peer in tl.static_range(world):
        if peer != rank:
            # The difference is right beyond 2**31 as well.
            while _get(own_ptr + peer) - number < 0:
                pass
