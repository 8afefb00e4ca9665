"""Calls with one wrong number each: a dtype, an operation, a root or a peer that does not exist."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sglang_fl.comm.backends.flagcx import DataType, FlagCXCommunicator, ReduceOp


@dataclass(frozen=True)
class WrongCall:
    """A call that must be refused before anything is enqueued."""

    what: str
    call: Callable[[FlagCXCommunicator, int, int], None]


def wrong_calls(world_size: int) -> Iterator[WrongCall]:
    """All of them; each is called with a communicator, the address of a buffer and a stream."""
    f32, total = DataType.FLOAT32, ReduceOp.SUM
    for dtype in (-1, 99):
        yield WrongCall(f"all_reduce dtype {dtype}", lambda c, a, s, d=dtype: c.all_reduce(a, a, 4, d, total, s))
        yield WrongCall(f"reduce dtype {dtype}", lambda c, a, s, d=dtype: c.reduce(a, a, 4, d, total, 0, s))
        yield WrongCall(
            f"reduce_scatter dtype {dtype}", lambda c, a, s, d=dtype: c.reduce_scatter(a, a, 4, d, total, s)
        )
        yield WrongCall(f"all_gather dtype {dtype}", lambda c, a, s, d=dtype: c.all_gather(a, a, 4, d, s))
        yield WrongCall(f"broadcast dtype {dtype}", lambda c, a, s, d=dtype: c.broadcast(a, a, 4, d, 0, s))
    for op in (-1, 5, 99):
        yield WrongCall(f"all_reduce op {op}", lambda c, a, s, o=op: c.all_reduce(a, a, 4, f32, o, s))
        yield WrongCall(f"reduce op {op}", lambda c, a, s, o=op: c.reduce(a, a, 4, f32, o, 0, s))
        yield WrongCall(f"reduce_scatter op {op}", lambda c, a, s, o=op: c.reduce_scatter(a, a, 4, f32, o, s))
    for rank in (-1, world_size, 1 << 30):
        yield WrongCall(f"reduce root {rank}", lambda c, a, s, r=rank: c.reduce(a, a, 4, f32, total, r, s))
        yield WrongCall(f"broadcast root {rank}", lambda c, a, s, r=rank: c.broadcast(a, a, 4, f32, r, s))
        yield WrongCall(f"gather root {rank}", lambda c, a, s, r=rank: c.gather(a, a, 4, f32, r, s))
        yield WrongCall(f"scatter root {rank}", lambda c, a, s, r=rank: c.scatter(a, a, 4, f32, r, s))
        yield WrongCall(f"send peer {rank}", lambda c, a, s, r=rank: c.send(a, 4, f32, r, s))
        yield WrongCall(f"recv peer {rank}", lambda c, a, s, r=rank: c.recv(a, 4, f32, r, s))
