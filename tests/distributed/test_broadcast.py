"""broadcast and broadcast_object_list: what one rank of the group has, on all of them, in place."""

from __future__ import annotations

import pytest
import torch

from sglang_fl.comm.communicator import CommunicatorFL
from sglang_fl.testing.ranks import RankContext, run_ranks
from tests.distributed.groups import over_groups, over_world, world
from tests.distributed.matrix import DTYPES, Case, cases, few_cases, place, same, surroundings_intact


def _check(communicator: CommunicatorFL, case: Case) -> None:
    mine = communicator.rank_in_group
    for src in range(communicator.world_size):
        tensor = place(case.bits(mine), case.layout)

        assert communicator.broadcast(input_=tensor, src=src) is tensor

        same(tensor, case.bits(src), f"broadcast from {src} {case}")
        surroundings_intact(tensor, f"broadcast from {src} {case}")


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_has_the_sources(world_size: int, backend: dict[str, str]) -> None:
    """Cases 7 and 11. Given any dtype, shape and layout, when each rank in turn broadcasts, then all have its values,
    bit for bit, in the tensor they gave."""
    run_ranks(over_world, world_size, _check, cases(DTYPES), env=backend)


def test_in_several_groups(backend: dict[str, str]) -> None:
    """Case 5. Given groups in any order that are used in turn, when each broadcasts, then src is a rank of the
    group."""
    run_ranks(over_groups, 4, _check, few_cases(DTYPES), env=backend)


def _expanded(context: RankContext) -> None:
    communicator = world(context)
    row = torch.arange(3.0)
    tensor = row.expand(4, 3) if context.rank == 1 else torch.zeros(4, 3)
    communicator.broadcast(tensor, src=1)
    assert torch.equal(tensor, torch.arange(3.0).expand(4, 3))


def test_a_source_whose_elements_share_memory(backend: dict[str, str]) -> None:
    """Case 7. Given an expanded tensor on the source, which nobody can write to, when it is broadcast, then all have
    its values: the source is only read."""
    run_ranks(_expanded, 2, env=backend)


def _objects(context: RankContext) -> None:
    communicator = world(context)
    for src in range(context.world_size):
        given = [{"rank": context.rank, "text": "é" * 5000}, None, [context.rank] * 3]

        assert communicator.broadcast_object_list(obj_list=given, src=src) is given

        assert given == [{"rank": src, "text": "é" * 5000}, None, [src] * 3]


@pytest.mark.parametrize("world_size", [2, 3])
def test_objects_of_one_rank(world_size: int, backend: dict[str, str]) -> None:
    """Given a list of objects, when each rank in turn broadcasts it, then all have that rank's objects in the list
    they gave."""
    run_ranks(_objects, world_size, env=backend)


def _objects_in_group(communicator: CommunicatorFL, case: Case) -> None:
    for src in range(communicator.world_size):
        given = [(communicator.ranks[communicator.rank_in_group], case.salt)]
        communicator.broadcast_object_list(given, src)
        assert given == [(communicator.ranks[src], case.salt)]


def test_objects_in_several_groups(backend: dict[str, str]) -> None:
    """Case 5. Given groups in any order, when objects are broadcast, then src is a rank of the group."""
    run_ranks(over_groups, 4, _objects_in_group, few_cases([torch.float32]), env=backend)


def _wrong(context: RankContext) -> None:
    communicator = world(context)
    for src in (2, -1):
        words = rf"broadcast.*, group .*: src={src} is not a rank within the group \(0 to 1\)"
        with pytest.raises(ValueError, match=words):
            communicator.broadcast(torch.zeros(1), src=src)
        with pytest.raises(ValueError, match=words):
            communicator.broadcast_object_list([1], src=src)
        with pytest.raises(ValueError, match=words):
            communicator.broadcast_tensor_dict({"a": 1}, src=src)
    assert communicator.broadcast(torch.tensor([context.rank + 4])).item() == 4


def test_a_source_outside_the_group(backend: dict[str, str]) -> None:
    """Given a rank that is not in the group, when it is to broadcast, then all ranks get a ValueError; given none,
    rank 0 is meant."""
    run_ranks(_wrong, 2, env=backend)
