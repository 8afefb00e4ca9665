"""reduce_scatter_tensor: the sum over the ranks of one tensor, a share of it for each, in place or not."""

from __future__ import annotations

import pytest
import torch

from sglang_fl.comm.communicator import CommunicatorFL
from sglang_fl.testing.ranks import RankContext, run_ranks
from tests.distributed.groups import over_groups, over_world, world
from tests.distributed.matrix import (
    DTYPES,
    SUMMED,
    Case,
    blank,
    cases,
    few_cases,
    layouts_of,
    place,
    same,
    summed,
    surroundings_intact,
)

IN_PLACE_DTYPES = [torch.float32, torch.bfloat16, torch.int64]


def _check(communicator: CommunicatorFL, case: Case) -> None:
    mine, size = communicator.rank_in_group, communicator.world_size
    numbers = [case.summands(rank, (size, *case.shape)) for rank in range(size)]
    tensor = place(numbers[mine].to(case.dtype), case.layout)
    for layout in layouts_of(len(case.shape)):
        output = blank(case.shape, case.dtype, layout)
        if case.dtype not in SUMMED[communicator.backend]:
            words = f"reduce_scatter.*, group .*: backend {communicator.backend} has no sum for {case.dtype}"
            with pytest.raises(TypeError, match=words):
                communicator.reduce_scatter_tensor(output, tensor)
            continue

        assert communicator.reduce_scatter_tensor(output=output, input=tensor) is output

        what = f"reduce_scatter_tensor {case} into {layout}"
        same(output, summed([row[mine] for row in numbers], case.dtype), what)
        surroundings_intact(output, what)
        same(tensor, numbers[mine].to(case.dtype), f"input of {what}")


@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_this_ranks_share(world_size: int, backend: dict[str, str]) -> None:
    """Cases 7 and 11. Given any dtype, shape and layout of input and output, when all ranks reduce, then each has the
    sum of its share, the input is as it was, and a dtype that has no sum is a TypeError."""
    run_ranks(over_world, world_size, _check, cases(DTYPES), env=backend)


def test_in_several_groups(backend: dict[str, str]) -> None:
    """Given groups in any order that are used in turn, when each reduces, then shares go by the group's ranks."""
    run_ranks(over_groups, 4, _check, few_cases(DTYPES), env=backend)


def _in_place(communicator: CommunicatorFL, case: Case) -> None:
    mine, size = communicator.rank_in_group, communicator.world_size
    numbers = [case.summands(rank, (size, *case.shape)) for rank in range(size)]
    tensor = place(numbers[mine].to(case.dtype), case.layout)

    communicator.reduce_scatter_tensor(tensor[mine], tensor)

    same(tensor[mine], summed([row[mine] for row in numbers], case.dtype), f"reduce_scatter_tensor in place {case}")


@pytest.mark.parametrize("world_size", [2, 3])
def test_in_place(world_size: int, backend: dict[str, str]) -> None:
    """Given an output that is this rank's share of the input, when all ranks reduce, then it has the sum."""
    run_ranks(over_world, world_size, _in_place, cases(IN_PLACE_DTYPES), env=backend)


def _wrong(context: RankContext) -> None:
    communicator = world(context)
    with pytest.raises(ValueError, match=r"reduce_scatter_tensor, group .*: 2 elements of torch.float32 .* not fit"):
        communicator.reduce_scatter_tensor(torch.zeros(2), torch.zeros(3))
    share = communicator.reduce_scatter_tensor(torch.zeros(1), torch.tensor([10.0, 20.0]))
    assert share.item() == [20.0, 40.0][context.rank]


def test_wrong_sizes_are_named(backend: dict[str, str]) -> None:
    """Given an output of another size, when reduced, then all ranks get a ValueError with both sizes, and the next
    call pairs."""
    run_ranks(_wrong, 2, env=backend)
