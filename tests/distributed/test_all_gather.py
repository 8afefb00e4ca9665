"""all_gather: the concatenation along any dimension, and the form that fills a list of tensors."""

from __future__ import annotations

import pytest
import torch

from sglang_fl.comm.communicator import CommunicatorFL
from sglang_fl.testing.ranks import RankContext, run_ranks
from tests.distributed.groups import over_groups, over_world, world
from tests.distributed.matrix import (
    DTYPES,
    Case,
    blank,
    cases,
    few_cases,
    layouts_of,
    place,
    same,
    surroundings_intact,
)


def _concatenates(communicator: CommunicatorFL, case: Case) -> None:
    parts = [case.bits(rank) for rank in range(communicator.world_size)]
    tensor = place(parts[communicator.rank_in_group], case.layout)
    for dim in range(-len(case.shape), len(case.shape)):
        gathered = communicator.all_gather(input_=tensor, dim=dim)
        same(gathered, torch.cat(parts, dim), f"all_gather dim {dim} {case}")
    if case.shape:
        same(communicator.all_gather(tensor), torch.cat(parts, -1), f"all_gather without dim {case}")
    same(tensor, parts[communicator.rank_in_group], f"input of all_gather {case}")


def _fills_a_list(communicator: CommunicatorFL, case: Case) -> None:
    parts = [case.bits(rank) for rank in range(communicator.world_size)]
    tensor = place(parts[communicator.rank_in_group], case.layout)
    choices = layouts_of(len(case.shape))
    outputs = [blank(case.shape, case.dtype, choices[rank % len(choices)]) for rank in range(communicator.world_size)]

    assert communicator.all_gather(tensor, output_tensor_list=outputs) is None

    for output, part in zip(outputs, parts, strict=True):
        same(output, part, f"all_gather into a list {case}")
        surroundings_intact(output, f"all_gather into a list {case}")


def _both(communicator: CommunicatorFL, case: Case) -> None:
    _concatenates(communicator, case)
    _fills_a_list(communicator, case)


@pytest.mark.parametrize("world_size", [2, 3])
def test_concatenates_along_any_dimension(world_size: int, backend: dict[str, str]) -> None:
    """Cases 7 and 11. Given any dtype, shape and layout, when all ranks gather along a dimension, counted from
    either end, then each has a new tensor with every rank's part in rank order, bit for bit."""
    run_ranks(over_world, world_size, _concatenates, cases(DTYPES), env=backend)


@pytest.mark.parametrize("world_size", [2, 3])
def test_fills_a_list_of_tensors(world_size: int, backend: dict[str, str]) -> None:
    """Given a list of outputs in different layouts, when all ranks gather, then each output has its rank's part,
    and None is returned."""
    run_ranks(over_world, world_size, _fills_a_list, cases(DTYPES), env=backend)


def test_in_several_groups(backend: dict[str, str]) -> None:
    """Given groups in any order that are used in turn, when each gathers, then parts come in the group's order."""
    run_ranks(over_groups, 4, _both, few_cases(DTYPES), env=backend)


def _column_into_transposed(context: RankContext) -> None:
    communicator = world(context)
    column = torch.arange(8.0).view(4, 2)[:, 0] + context.rank
    outputs = [torch.empty(2, 2).t(), torch.empty(2, 2).t()]
    communicator.all_gather(column.view(2, 2), output_tensor_list=outputs)
    assert [output.tolist() for output in outputs] == [[[0.0, 2.0], [4.0, 6.0]], [[1.0, 3.0], [5.0, 7.0]]]


def test_column_into_transposed(backend: dict[str, str]) -> None:
    """Case 7, its own numbers: a column of a matrix as input, transposed matrices as outputs."""
    run_ranks(_column_into_transposed, 2, env=backend)


def _wrong(context: RankContext) -> None:
    communicator = world(context)
    with pytest.raises(ValueError, match=r"all_gather: dim=2 is none of the dimensions of shape \(2, 3\)"):
        communicator.all_gather(torch.zeros(2, 3), dim=2)
    with pytest.raises(ValueError, match=r"all_gather, group .*: output_tensor_list has 1 tensors for 2 ranks"):
        communicator.all_gather(torch.zeros(2), output_tensor_list=[torch.zeros(2)])
    same(communicator.all_gather(torch.tensor([context.rank])), torch.tensor([0, 1]), "the next call")


def test_wrong_arguments_are_named(backend: dict[str, str]) -> None:
    """Given a dimension that is not there or a list of another length, when gathered, then all ranks get a
    ValueError with what was found, and the next call pairs."""
    run_ranks(_wrong, 2, env=backend)
