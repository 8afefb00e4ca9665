"""gather: every rank's tensor, concatenated along any dimension on one rank."""

from __future__ import annotations

import pytest
import torch

from sglang_fl.comm.communicator import CommunicatorFL
from sglang_fl.testing.ranks import RankContext, run_ranks
from tests.distributed.groups import over_groups, over_world, world
from tests.distributed.matrix import DTYPES, Case, cases, few_cases, place, same


def _check(communicator: CommunicatorFL, case: Case) -> None:
    mine, size = communicator.rank_in_group, communicator.world_size
    parts = [case.bits(rank) for rank in range(size)]
    tensor = place(parts[mine], case.layout)
    dimensions = len(case.shape)
    for dst in range(size):
        dim = (case.salt + dst) % (2 * dimensions) - dimensions

        gathered = communicator.gather(input_=tensor, dst=dst, dim=dim)

        if mine == dst:
            same(gathered, torch.cat(parts, dim), f"gather to {dst} dim {dim} {case}")
        else:
            assert gathered is None
    same(tensor, parts[mine], f"input of gather {case}")


@pytest.mark.parametrize("world_size", [2, 3])
def test_concatenates_on_one_rank(world_size: int, backend: dict[str, str]) -> None:
    """Cases 7 and 11. Given any dtype, shape and layout, when all ranks gather to each of them in turn, then that one
    has every rank's part in rank order, bit for bit, and the others None."""
    run_ranks(over_world, world_size, _check, cases(DTYPES, minimum_dimensions=1), env=backend)


def test_in_several_groups(backend: dict[str, str]) -> None:
    """Case 5. Given groups in any order that are used in turn, when each gathers, then dst is a rank of the group and
    parts come in the group's order."""
    run_ranks(over_groups, 4, _check, few_cases(DTYPES), env=backend)


def _wrong(context: RankContext) -> None:
    communicator = world(context)
    with pytest.raises(ValueError, match=r"gather, group .*: dst=2 is not a rank within the group \(0 to 1\)"):
        communicator.gather(torch.zeros(1), dst=2)
    with pytest.raises(ValueError, match=r"gather: dim=1 is none of the dimensions of shape \(3,\)"):
        communicator.gather(torch.zeros(3), dim=1)
    gathered = communicator.gather(torch.tensor([[context.rank, 5]]))
    if context.rank:
        assert gathered is None
    else:
        same(gathered, torch.tensor([[0, 5, 1, 5]]), "gather without dst and dim")


def test_defaults_and_wrong_arguments(backend: dict[str, str]) -> None:
    """Given a rank or a dimension that is not there, when gathered, then all ranks get a ValueError; given none, the
    last dimension and rank 0 are meant."""
    run_ranks(_wrong, 2, env=backend)
