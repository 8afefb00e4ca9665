"""all_gatherv: rows of all ranks, as many as each has, for one tensor or a list; the result is always a list."""

from __future__ import annotations

import pytest
import torch

from sglang_fl.comm.communicator import CommunicatorFL
from sglang_fl.testing.ranks import RankContext, run_ranks
from tests.distributed.groups import over_groups, over_world, world
from tests.distributed.matrix import DTYPES, ROWS, Case, cases, few_cases, place, same

# Rows of each rank of up to four; the first is case 9's.
SIZES = ([2, 0, 3, 1], [0, 4, 0, 2], [3, 3, 3, 3])


def _check(communicator: CommunicatorFL, case: Case) -> None:
    mine, tail = communicator.rank_in_group, case.shape[1:]
    for sizes in (row[: communicator.world_size] for row in SIZES):
        parts = [case.bits(rank, (rows, *tail)) for rank, rows in enumerate(sizes)]
        others = [case.bits(rank + 8, (rows, *tail)) for rank, rows in enumerate(sizes)]
        tensor, other = place(parts[mine], case.layout), place(others[mine], case.layout)

        gathered = communicator.all_gatherv(tensor, sizes=sizes)
        both = communicator.all_gatherv([tensor, other], sizes)

        assert isinstance(gathered, list) and len(gathered) == 1 and len(both) == 2
        same(gathered[0], torch.cat(parts), f"all_gatherv {sizes} {case}")
        same(both[0], torch.cat(parts), f"all_gatherv of a list {sizes} {case}")
        same(both[1], torch.cat(others), f"all_gatherv of a list {sizes} {case}")


def _even(communicator: CommunicatorFL, case: Case) -> None:
    parts = [case.bits(rank) for rank in range(communicator.world_size)]
    gathered = communicator.all_gatherv(place(parts[communicator.rank_in_group], case.layout))
    assert len(gathered) == 1
    same(gathered[0], torch.cat(parts), f"all_gatherv without sizes {case}")


@pytest.mark.parametrize("world_size", [2, 3])
def test_uneven_rows(world_size: int, backend: dict[str, str]) -> None:
    """Cases 9 and 10. Given uneven sizes, ranks without rows among them, rows of any dimension, dtype and layout,
    when all ranks gather a tensor and a list, then the result is a list with one concatenated tensor per input."""
    run_ranks(over_world, world_size, _check, cases(DTYPES, shapes=ROWS), env=backend)


@pytest.mark.parametrize("world_size", [2, 3])
def test_without_sizes_all_ranks_have_as_many_rows(world_size: int, backend: dict[str, str]) -> None:
    """Case 10. Given no sizes, when all ranks gather, then their equal parts are concatenated."""
    run_ranks(over_world, world_size, _even, cases(DTYPES, minimum_dimensions=1), env=backend)


def test_in_several_groups(backend: dict[str, str]) -> None:
    """Given groups in any order that are used in turn, when each gathers, then parts come in the group's order."""
    run_ranks(over_groups, 4, _check, few_cases(DTYPES), env=backend)


def _wrong(context: RankContext) -> None:
    communicator = world(context)
    rows = [2, 0, 3][context.rank]
    tensor = torch.zeros(rows, 4)
    with pytest.raises(ValueError, match=r"all_gatherv, group .*: sizes=\[2, 0\] must be 3 numbers of rows"):
        communicator.all_gatherv(tensor, sizes=[2, 0])
    with pytest.raises(ValueError, match=rf"all_gatherv, group .*: input has {rows} rows, but sizes\[.\] is"):
        communicator.all_gatherv(tensor, sizes=[3, 1, 1])
    with pytest.raises(ValueError, match=r"sizes=\[6, -4, 3\]"):
        communicator.all_gatherv(tensor, sizes=[6, -4, 3])
    assert communicator.all_gatherv(tensor, sizes=[2, 0, 3])[0].shape == (5, 4)


def test_wrong_sizes_are_refused_on_all_ranks(backend: dict[str, str]) -> None:
    """Case 9. Given sizes of the wrong length or other rows than the inputs have, when gathered, then all ranks raise
    ValueError and the next call pairs."""
    run_ranks(_wrong, 3, env=backend)
