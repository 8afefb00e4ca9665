"""Which groups of the same ranks share symmetric memory; its blocks are only on GPUs."""

from __future__ import annotations

import torch
import torch.distributed as dist

from sglang_fl.comm.backends.vendor.cuda.symmetric import shared_group
from sglang_fl.comm.backends.vendor.cuda.symmetric_group import SymmetricGroup
from sglang_fl.comm.types import GroupContext
from sglang_fl.testing.ranks import RankContext, run_ranks


def _over_time(context: RankContext) -> list[bool]:
    """Of groups of all ranks: whether the second shares with the first, one of another name, and one made once the
    first one's process group is gone, on rank 1 before rank 0."""
    ranks = tuple(range(context.world_size))

    def group_over(process_group: dist.ProcessGroup, name: str = "tp:0") -> SymmetricGroup:
        cpu = torch.device("cpu")
        described = GroupContext(
            name, ranks, context.rank, cpu, process_group, process_group, shares_communicator=False
        )
        return shared_group(described)

    one, other, third = (dist.new_group(list(ranks), backend="gloo") for _ in range(3))
    first = group_over(one)
    found = [group_over(other) is first, group_over(other, "dp:0") is first]
    if context.rank == 1:
        dist.destroy_process_group(one)
    found.append(group_over(other) is first)
    if context.rank == 0:
        dist.destroy_process_group(one)
    later = group_over(third)
    return [*found, later is first, later is group_over(other)]


def test_groups_share_while_the_first_ones_process_group_is_there() -> None:
    """Given groups of the same ranks and name, then they share symmetric memory until the process group that it was
    made for is destroyed on any rank; then a later one gets its own on all ranks, which is shared again."""
    assert run_ranks(_over_time, 2) == [[True, False, False, False, True]] * 2
