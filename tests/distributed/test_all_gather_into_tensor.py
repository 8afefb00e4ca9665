"""all_gather_into_tensor and cp_all_gather_into_tensor_async: every rank's tensor into one output, in place or not."""

from __future__ import annotations

import pytest
import torch

from sglang_fl.comm.communicator import CommunicatorFL
from sglang_fl.testing.ranks import RankContext, run_ranks
from tests.distributed.groups import over_groups, over_world, world
from tests.distributed.matrix import (
    DTYPES,
    LARGE_DTYPES,
    Case,
    blank,
    cases,
    few_cases,
    layouts_of,
    place,
    same,
    surroundings_intact,
)


def _check(communicator: CommunicatorFL, case: Case) -> None:
    parts = [case.bits(rank) for rank in range(communicator.world_size)]
    tensor = place(parts[communicator.rank_in_group], case.layout)
    stacked = torch.stack(parts)
    for output_layout in layouts_of(len(case.shape)):
        output = blank((communicator.world_size, *case.shape), case.dtype, output_layout)

        assert communicator.all_gather_into_tensor(output, tensor) is output

        same(output, stacked, f"all_gather_into_tensor {case} into {output_layout}")
        surroundings_intact(output, f"all_gather_into_tensor {case} into {output_layout}")
    output = blank((communicator.world_size * tensor.numel(),), case.dtype, case.layout)
    communicator.cp_all_gather_into_tensor_async(output=output, input=tensor, stream=None)
    same(output, stacked.reshape(-1), f"cp_all_gather_into_tensor_async {case}")
    surroundings_intact(output, f"cp_all_gather_into_tensor_async {case}")


@pytest.mark.parametrize("world_size", [2, 3])
def test_gathers_in_rank_order(world_size: int, backend: dict[str, str]) -> None:
    """Cases 7 and 11. Given any dtype, shape and layout of input and output, when all ranks gather, then the output
    has every rank's input in rank order, bit for bit, and nothing around it is touched."""
    run_ranks(over_world, world_size, _check, cases(DTYPES), env=backend)


def test_in_several_groups(backend: dict[str, str]) -> None:
    """Given groups in any order that are used in turn, when each gathers, then parts come in the group's order."""
    run_ranks(over_groups, 4, _check, few_cases(DTYPES), env=backend)


def _in_place(communicator: CommunicatorFL, case: Case) -> None:
    parts = [case.bits(rank) for rank in range(communicator.world_size)]
    output = blank((communicator.world_size, *case.shape), case.dtype, case.layout)
    own = output[communicator.rank_in_group]
    own.copy_(parts[communicator.rank_in_group])

    communicator.all_gather_into_tensor(output, own)

    same(output, torch.stack(parts), f"all_gather_into_tensor in place {case}")


@pytest.mark.parametrize("world_size", [2, 3])
def test_in_place(world_size: int, backend: dict[str, str]) -> None:
    """Given an input that is this rank's block of the output, when all ranks gather, then the output is right."""
    run_ranks(over_world, world_size, _in_place, cases(sorted(LARGE_DTYPES, key=str)), env=backend)


def _wrong(context: RankContext) -> None:
    communicator = world(context)
    for method in ("all_gather_into_tensor", "cp_all_gather_into_tensor_async"):
        for output in (torch.zeros(3), torch.zeros(4, dtype=torch.float64)):
            extra = () if method == "all_gather_into_tensor" else (None,)
            with pytest.raises(ValueError, match=f"{method}, group .*: 2 elements of torch.float32 .* do not fit"):
                getattr(communicator, method)(output, torch.zeros(2), *extra)
    output = communicator.all_gather_into_tensor(torch.zeros(2), torch.tensor([float(context.rank)]))
    assert output.tolist() == [0.0, 1.0]


def test_wrong_sizes_are_named(backend: dict[str, str]) -> None:
    """Given an output of another size or dtype, when gathered, then all ranks get a ValueError with both sizes, and
    the next call pairs."""
    run_ranks(_wrong, 2, env=backend)
