"""reduce_scatter: a list of inputs, the sum of each for one rank; the parts may differ in size."""

from __future__ import annotations

import pytest
import torch

from sglang_fl.comm.communicator import CommunicatorFL
from sglang_fl.testing.ranks import RankContext, run_ranks
from tests.distributed.groups import over_groups, over_world, world
from tests.distributed.matrix import (
    DTYPES,
    ROWS,
    SUMMED,
    Case,
    blank,
    cases,
    few_cases,
    place,
    same,
    summed,
    surroundings_intact,
)


def _check(communicator: CommunicatorFL, case: Case) -> None:
    _check_shapes(communicator, case, [case.shape] * communicator.world_size)


def _uneven(communicator: CommunicatorFL, case: Case) -> None:
    shapes = [(rows, *case.shape[1:]) for rows in (2, 0, 5, 1)]
    _check_shapes(communicator, case, shapes[: communicator.world_size])


def _check_shapes(communicator: CommunicatorFL, case: Case, shapes: list[tuple[int, ...]]) -> None:
    mine, size = communicator.rank_in_group, communicator.world_size
    numbers = [[case.summands(rank + 3 * part, shape) for part, shape in enumerate(shapes)] for rank in range(size)]
    inputs = [place(part.to(case.dtype), case.layout) for part in numbers[mine]]
    output = blank(shapes[mine], case.dtype, case.layout)
    if case.dtype not in SUMMED[communicator.backend]:
        words = f"reduce_scatter.*, group .*: backend {communicator.backend} has no sum for {case.dtype}"
        with pytest.raises(TypeError, match=words):
            communicator.reduce_scatter(output, inputs)
        return

    assert communicator.reduce_scatter(output=output, input_list=inputs) is output

    same(output, summed([row[mine] for row in numbers], case.dtype), f"reduce_scatter {case}")
    surroundings_intact(output, f"reduce_scatter {case}")
    for tensor, part in zip(inputs, numbers[mine], strict=True):
        same(tensor, part.to(case.dtype), f"input of reduce_scatter {case}")


@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_the_parts(world_size: int, backend: dict[str, str]) -> None:
    """Cases 7 and 11. Given any dtype, shape and layout, when all ranks reduce a list, then each has the sum of its
    part, the inputs are as they were, and a dtype that has no sum is a TypeError."""
    run_ranks(over_world, world_size, _check, cases(DTYPES), env=backend)


@pytest.mark.parametrize("world_size", [2, 3])
def test_parts_of_different_sizes(world_size: int, backend: dict[str, str]) -> None:
    """Case 9. Given parts of different sizes, empty ones among them, when reduced, then each rank has its sum."""
    run_ranks(over_world, world_size, _uneven, cases(DTYPES, shapes=ROWS), env=backend)


def test_in_several_groups(backend: dict[str, str]) -> None:
    """Given groups in any order that are used in turn, when each reduces, then parts go by the group's ranks."""
    run_ranks(over_groups, 4, _check, few_cases(DTYPES), env=backend)


def _wrong(context: RankContext) -> None:
    communicator = world(context)
    with pytest.raises(ValueError, match=r"reduce_scatter, group .*: input_list has 1 tensors for 2 ranks"):
        communicator.reduce_scatter(torch.zeros(2), [torch.zeros(2)])
    with pytest.raises(ValueError, match=r"output has 3 elements, input_list\[.\] has 2"):
        communicator.reduce_scatter(torch.zeros(3), [torch.zeros(2), torch.zeros(2)])
    assert communicator.reduce_scatter(torch.zeros(1), [torch.ones(1), torch.ones(1)]).item() == 2.0


def test_wrong_lists_are_named(backend: dict[str, str]) -> None:
    """Given a list of another length or an output of another size, when reduced, then all ranks get a ValueError
    with what was found, and the next call pairs."""
    run_ranks(_wrong, 2, env=backend)
