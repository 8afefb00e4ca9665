"""reduce_scatterv: the sum over the ranks, divided among them by rows, as many as each is to have."""

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

# Rows for each rank of up to four; the first is case 9's.
SIZES = ([2, 0, 3, 1], [0, 4, 0, 2], [3, 3, 3, 3])


def _check(communicator: CommunicatorFL, case: Case) -> None:
    mine, size, tail = communicator.rank_in_group, communicator.world_size, case.shape[1:]
    for sizes in (row[:size] for row in SIZES):
        numbers = [case.summands(rank, (sum(sizes), *tail)) for rank in range(size)]
        tensor = place(numbers[mine].to(case.dtype), case.layout)
        if case.dtype not in SUMMED[communicator.backend]:
            words = f"reduce_scatter.*, group .*: backend {communicator.backend} has no sum for {case.dtype}"
            with pytest.raises(TypeError, match=words):
                communicator.reduce_scatterv(tensor, sizes=sizes)
            continue
        start = sum(sizes[:mine])
        expected = summed(numbers, case.dtype)[start : start + sizes[mine]]
        output = blank((sizes[mine], *tail), case.dtype, case.layout)

        made = communicator.reduce_scatterv(tensor, sizes=sizes)
        given = communicator.reduce_scatterv(input_=tensor, output=output, sizes=sizes)

        assert given is output
        same(made, expected, f"reduce_scatterv {sizes} {case}")
        same(output, expected, f"reduce_scatterv into an output {sizes} {case}")
        surroundings_intact(output, f"reduce_scatterv into an output {sizes} {case}")
        same(tensor, numbers[mine].to(case.dtype), f"input of reduce_scatterv {sizes} {case}")


def _even(communicator: CommunicatorFL, case: Case) -> None:
    mine, size = communicator.rank_in_group, communicator.world_size
    rows = 2 * size
    numbers = [case.summands(rank, (rows, *case.shape[1:])) for rank in range(size)]
    result = communicator.reduce_scatterv(place(numbers[mine].to(case.dtype), case.layout))
    same(result, summed(numbers, case.dtype)[2 * mine : 2 * mine + 2], f"reduce_scatterv without sizes {case}")


@pytest.mark.parametrize("world_size", [2, 3])
def test_uneven_rows(world_size: int, backend: dict[str, str]) -> None:
    """Cases 7, 9 and 11. Given uneven sizes, ranks without rows among them, rows of any dimension, dtype and layout,
    when all ranks reduce, then each has the sum of its rows, and the input is as it was."""
    run_ranks(over_world, world_size, _check, cases(DTYPES, shapes=ROWS), env=backend)


def test_without_sizes_rows_are_divided_evenly(backend: dict[str, str]) -> None:
    """Given no sizes, when all ranks reduce, then each has as many rows of the sum."""
    run_ranks(over_world, 3, _even, cases([torch.float32, torch.int64], minimum_dimensions=1), env=backend)


def test_in_several_groups(backend: dict[str, str]) -> None:
    """Given groups in any order that are used in turn, when each reduces, then rows go by the group's ranks."""
    run_ranks(over_groups, 4, _check, few_cases(DTYPES), env=backend)


def _wrong(context: RankContext) -> None:
    communicator, tensor = world(context), torch.ones(5, 2)
    for sizes in ([2, 3], [2, 0, 4], [2, 0, 3, 0], [6, -4, 3]):
        words = rf"reduce_scatterv, group .*: sizes=\[{', '.join(map(str, sizes))}\] must be 3 numbers .* sum is 5"
        with pytest.raises(ValueError, match=words):
            communicator.reduce_scatterv(tensor, sizes=sizes)
    with pytest.raises(ValueError, match="5 rows cannot be divided evenly among 3 ranks; pass sizes"):
        communicator.reduce_scatterv(tensor)
    with pytest.raises(ValueError, match=r"output has shape \(9, 9\), not"):
        communicator.reduce_scatterv(tensor, torch.zeros(9, 9), [2, 0, 3])
    assert communicator.reduce_scatterv(tensor, sizes=[2, 0, 3]).sum().item() == [12.0, 0.0, 18.0][context.rank]


def test_wrong_sizes_are_refused_on_all_ranks(backend: dict[str, str]) -> None:
    """Case 9. Given sizes of the wrong length or sum, or another output, when reduced, then all ranks raise ValueError
    and the next call pairs."""
    run_ranks(_wrong, 3, env=backend)
