"""Communicators of a test, and the three ways in which every operation is tried on them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from sglang_fl.comm.communicator import CommunicatorFL
from sglang_fl.testing.ranks import RankContext
from tests.distributed.matrix import Case

Check = Callable[[CommunicatorFL, Case], None]

# In a world of four: two groups at once, one of which does not start at rank 0; a cyclic order of three, whose
# inverse is another one; all ranks in an order that torch.distributed does not have.
GROUPS = ([0, 1], [2, 3], [3, 1, 2], [2, 0, 3, 1])


def world(context: RankContext) -> CommunicatorFL:
    """A communicator of all ranks, on the selected backend and no other."""
    communicator = group_of(list(range(context.world_size)), context)
    assert communicator is not None
    return communicator


def group_of(ranks: list[int], context: RankContext, timeout_s: float = 30.0) -> CommunicatorFL | None:
    """A communicator of some of the ranks; None on the others, which must call it too, to make the groups."""
    cpu_group, device_group = (dist.new_group(ranks, backend="gloo") for _ in range(2))
    if context.rank not in ranks:
        return None
    communicator = CommunicatorFL(
        cpu_group=cpu_group,
        device_group=device_group,
        device="cpu",
        ranks=ranks,
        name=f"test:{ranks}",
        timeout_s=timeout_s,
    )
    assert communicator.backend == os.environ["SGLANG_FL_DIST_BACKEND"]
    assert communicator.exceptions() == {}
    return communicator


def communicator_of_all(
    context: RankContext, timeout_s: float = 20.0, operation_timeout_s: float | None = None
) -> CommunicatorFL:
    """A communicator of all ranks, whatever its backend."""
    group = dist.new_group(list(range(context.world_size)), backend="gloo")
    return CommunicatorFL(
        cpu_group=group,
        device_group=group,
        device="cpu",
        ranks=range(context.world_size),
        name="tp:0",
        timeout_s=timeout_s,
        operation_timeout_s=operation_timeout_s,
    )


def call_everything(communicator: CommunicatorFL) -> None:
    """Each operation of a transport once, with data that depends on the rank."""
    rank, size = communicator.rank_in_group, communicator.world_size
    total = sum(range(size))
    mine = torch.tensor([float(rank)])
    assert communicator.all_reduce(mine.clone()).item() == total
    gathered = communicator.all_gather(mine)
    assert gathered is not None and gathered.tolist() == list(range(size))
    assert communicator.reduce_scatter_tensor(torch.zeros(1), mine.repeat(size)).item() == total
    uneven = communicator.reduce_scatterv(mine.repeat(3), sizes=[0, 3, *[0] * (size - 2)])
    assert uneven.tolist() == [total] * (3 if rank == 1 else 0)
    assert communicator.broadcast(mine.clone(), src=1).item() == 1.0
    collected = communicator.gather(mine, dst=1)
    assert collected is None if rank != 1 else collected.tolist() == list(range(size))  # type: ignore[union-attr]
    communicator.send(mine)
    assert communicator.recv(torch.Size([1]), torch.float32).item() == (rank - 1) % size


def over_world(context: RankContext, check: Check, cases: Iterable[Case]) -> None:
    """``check`` each case on the group of all ranks."""
    communicator = world(context)
    for case in cases:
        _checked(context, communicator, check, case)
    communicator.destroy()


def over_groups(context: RankContext, check: Check, cases: Iterable[Case]) -> None:
    """``check`` each case on every group of a world of four, all of them alive and used in turn."""
    communicators = [communicator for ranks in GROUPS if (communicator := group_of(ranks, context)) is not None]
    for case in cases:
        for communicator in communicators:
            _checked(context, communicator, check, case)
    for communicator in communicators:
        communicator.destroy()


def _checked(context: RankContext, communicator: CommunicatorFL, check: Check, case: Case) -> None:
    context.note(f"{communicator.name}: {case}")
    check(communicator, case)
