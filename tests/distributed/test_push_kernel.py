"""The kernel of the route symm_push, interpreted by Triton, between real processes over shared memory.

On a GPU the block is torch's symmetric memory and the kernel is compiled; what a call writes where, what it waits for
and when it uses a slot again is the same here.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sglang_fl.comm.backends.vendor.cuda.push import PushBackend, PushBuffer, PushTransport, block_bytes
from sglang_fl.comm.types import GroupContext
from sglang_fl.testing.ranks import RankContext, run_ranks

SLOT_BYTES = 8192  # two programs
INTERPRETED = {"TRITON_INTERPRET": "1"}


class NoStreams:
    """The order of streams where there are none."""

    def take_turn(self) -> None:
        """Nothing to wait for."""


def open_transport(context: RankContext, folder: Path, calls: int) -> PushTransport:
    """A transport whose counters begin at ``calls``, on files that all ranks map."""
    ranks = list(range(context.world_size))
    group = dist.new_group(ranks, backend="gloo")
    described = GroupContext("tp:0", tuple(ranks), context.rank, torch.device("cpu"), group, group)
    size = block_bytes(context.world_size, SLOT_BYTES)
    blocks = [torch.from_file(str(folder / f"block{rank}"), True, size, dtype=torch.uint8) for rank in ranks]
    addresses = [block.data_ptr() for block in blocks]
    buffer = PushBuffer.at(blocks[context.rank], addresses, context.rank, SLOT_BYTES)
    buffer.counter[0] = calls
    blocks[context.rank][: size - 2 * context.world_size * SLOT_BYTES].view(torch.int32).fill_(calls)
    dist.barrier()
    order: Any = NoStreams()
    transport = PushTransport("symm_push", described, order, buffer)
    transport.blocks = blocks  # type: ignore[attr-defined]  # mapped as long as the transport is used
    return transport


def data(rank: int, count: int, dtype: torch.dtype, turn: int) -> torch.Tensor:
    """Whole numbers that depend on everything."""
    return ((torch.arange(count) * 7 + rank * 13 + turn * 5) % 50).to(dtype)


def total(count: int, dtype: torch.dtype, turn: int, world_size: int) -> torch.Tensor:
    """The sum over the ranks."""
    return torch.stack([data(rank, count, torch.float32, turn) for rank in range(world_size)]).sum(0).to(dtype)


def sums(context: RankContext, folder: Path, calls: int) -> list[str]:
    """What was wrong in calls of every kind, of ranks that take their time in turns."""
    transport = open_transport(context, folder, calls)
    delays = random.Random(context.rank)
    wrong = []
    turn = 0
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for count in (1, 16, 17, 2048, 2049, 4096, 9000, 0):
            for method in ("all_reduce", "all_reduce_result", "all_reduce_new"):
                turn += 1
                time.sleep(delays.choice((0, 0, 0.01)))
                whole = torch.full((count + 2,), -1, dtype=dtype)
                tensor = whole[1 : count + 1]
                tensor.copy_(data(context.rank, count, dtype, turn))
                result = getattr(transport, method)(tensor)
                result = tensor if result is None else result
                if not torch.equal(result, total(count, dtype, turn, context.world_size)):
                    wrong.append(f"turn {turn}, {method} of {count} {dtype}: {result[:4].tolist()}")
                if method == "all_reduce_new" and not torch.equal(tensor, data(context.rank, count, dtype, turn)):
                    wrong.append(f"turn {turn}: the argument changed")
                if whole[0] != -1 or whole[-1] != -1:
                    wrong.append(f"turn {turn}: a neighbour changed")
    dist.barrier()
    return wrong


@pytest.mark.parametrize(("world_size", "calls"), [(3, 0), (2, 2**31 - 20)], ids=["from-0", "beyond-2**31"])
def test_sums(world_size: int, calls: int, tmp_path: Path) -> None:
    """Given tensors of each dtype, from one element to more than a slot, in one program and several, when ranks that
    are late in turns sum them, then every value is right, also where the number of calls runs over."""
    results = run_ranks(sums, world_size, tmp_path, calls, env=INTERPRETED, start_method="spawn", timeout_s=150)
    assert results == [[]] * world_size


def ahead(context: RankContext, folder: Path) -> list[list[float]]:
    """Rank 0 makes its calls as fast as it can, rank 1 sleeps before each."""
    transport = open_transport(context, folder, 0)
    results = []
    for turn in range(8):
        if context.rank:
            time.sleep(0.05)
        results.append(transport.all_reduce_new(data(context.rank, 4096, torch.float32, turn)))
    dist.barrier()
    return [(result - total(4096, torch.float32, turn, 2)).abs().max().item() for turn, result in enumerate(results)]  # type: ignore[misc]


def test_a_rank_that_is_ahead_overwrites_nothing(tmp_path: Path) -> None:
    """Given a rank that is always first, then no sum of the other one is of data of a later call."""
    assert run_ranks(ahead, 2, tmp_path, env=INTERPRETED, start_method="spawn", timeout_s=60) == [[0.0] * 8] * 2


def test_not_on_a_cpu() -> None:
    """Given a group on the CPU, then the backend is not available there."""
    group: Any = None
    context = GroupContext("tp:0", (0, 1), 0, torch.device("cpu"), group, group)
    assert PushBackend("symm_push").probe(context).reason == "the group's tensors are on cpu, not on cuda"
