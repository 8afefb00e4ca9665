"""all_reduce and quant_all_reduce: the sum over the ranks, in place, whatever the tensor's layout."""

from __future__ import annotations

import pytest
import torch

from sglang_fl.comm.communicator import CommunicatorFL
from sglang_fl.testing.ranks import RankContext, run_ranks
from tests.distributed.groups import group_of, over_groups, over_world, world
from tests.distributed.matrix import (
    DTYPES,
    SUMMED,
    Case,
    Layout,
    blank,
    cases,
    few_cases,
    layouts_of,
    place,
    same,
    summed,
    surroundings_intact,
)


def _check(communicator: CommunicatorFL, case: Case) -> None:
    if case.dtype not in SUMMED[communicator.backend]:
        _refused(communicator, case)
        return
    parts = [case.summands(rank) for rank in range(communicator.world_size)]
    expected = summed(parts, case.dtype)
    for method in (communicator.all_reduce, communicator.quant_all_reduce):
        tensor = place(parts[communicator.rank_in_group].to(case.dtype), case.layout)

        result = method(input_=tensor)

        assert result is tensor
        same(result, expected, f"{method.__name__} {case}")
        surroundings_intact(tensor, f"{method.__name__} {case}")


def _refused(communicator: CommunicatorFL, case: Case) -> None:
    tensor = place(case.bits(communicator.rank_in_group), case.layout)
    kept = tensor.clone()
    words = rf"all_reduce, group .*: backend {communicator.backend} has no sum for {case.dtype}; it sums .*float32"
    with pytest.raises(TypeError, match=words):
        communicator.all_reduce(tensor)
    same(tensor, kept, f"refused all_reduce {case}")


@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_in_place(world_size: int, backend: dict[str, str]) -> None:
    """Cases 7 and 11. Given any dtype, shape and layout, when all ranks reduce, then each has the sum in the tensor
    it gave, and a dtype that has no sum is a TypeError that leaves the tensor as it was."""
    run_ranks(over_world, world_size, _check, cases(DTYPES), env=backend)


def test_in_several_groups(backend: dict[str, str]) -> None:
    """Given groups in any order that are used in turn, when each reduces, then only its own ranks are summed."""
    run_ranks(over_groups, 4, _check, few_cases(DTYPES), env=backend)


def _only_the_first_pair(context: RankContext) -> None:
    first, second = group_of([0, 1], context), group_of([2, 3], context)
    if first is not None:
        assert first.all_reduce(torch.tensor([context.rank + 1.0])).item() == 3.0
    assert (first is None) == (second is not None)


def test_returns_when_only_one_group_calls(backend: dict[str, str]) -> None:
    """Case 4. Given groups [0, 1] and [2, 3], when only the first reduces, then it returns: never the world group."""
    run_ranks(_only_the_first_pair, 4, env=backend)


def _the_strided_case(context: RankContext) -> None:
    communicator = world(context)
    column = torch.arange(8.0).view(4, 2)[:, 0]
    assert communicator.all_reduce(column) is column
    assert column.tolist() == [context.world_size * value for value in (0.0, 2.0, 4.0, 6.0)]
    transposed = torch.arange(6.0).view(2, 3).t()
    assert communicator.all_reduce(transposed) is transposed
    assert torch.equal(transposed, torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]) * context.world_size)


def test_column_and_transposed(backend: dict[str, str]) -> None:
    """Case 7, its own numbers: a column of a matrix and a transposed matrix keep identity and get right values."""
    run_ranks(_the_strided_case, 2, env=backend)


def _pairs_after_a_refusal(context: RankContext) -> None:
    communicator = world(context)
    for dtype in set(DTYPES) - SUMMED[communicator.backend]:
        with pytest.raises(TypeError):
            communicator.all_reduce(blank((2,), dtype))
    assert communicator.all_reduce(torch.ones(1)).item() == context.world_size


def test_nothing_is_enqueued_by_a_refusal(backend: dict[str, str]) -> None:
    """Case 11. Given refused reductions, when the ranks reduce again, then that call pairs on all of them."""
    run_ranks(_pairs_after_a_refusal, 3, env=backend)


def _fused(context: RankContext) -> None:
    communicator = world(context)
    tensor = torch.ones(2, 4)
    assert communicator.fused_allreduce_rmsnorm(tensor, tensor.clone(), torch.ones(4), 1e-6) is None
    assert torch.equal(tensor, torch.ones(2, 4))


def test_fused_rmsnorm_is_left_to_sglang(backend: dict[str, str]) -> None:
    """Given backends without a fused norm, when SGLang asks, then it gets None and its tensors are as they were."""
    run_ranks(_fused, 2, env=backend)


def test_layouts_are_what_they_say() -> None:
    """Given the layouts of the matrix, when a tensor is placed, then only two of them are contiguous."""
    values = torch.arange(6).view(2, 3)
    found = {layout: place(values, layout).is_contiguous() for layout in layouts_of(2)}
    assert found == {
        Layout.CONTIGUOUS: True,
        Layout.STRIDED: False,
        Layout.TRANSPOSED: False,
        Layout.OFFSET: True,
    }
