"""A c10d process group of two ranks that only those two make, whenever they first need it.

``dist.new_group(use_local_synchronization=True)`` would be the public way, but it names a group by how many groups the
process has: the two sides of a late pair disagree on that, and never meet. For the same reason nobody in a process with
such pairs can use it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from sglang_fl.comm.types import GroupContext

# torch's own watchdog ends the process at a work's limit and names no rank; the monitor comes first.
_LATER_S = 60.0


def make_pair_group(context: GroupContext, name: str) -> Any:
    """The group of ``context.ranks``, two, on the c10d backend of ``context.device_group``; both must call it.

    On NCCL this is local: the communicator comes with the first transfer. ``name`` is unique in the process and equal
    on both sides.

    Raises:
        RuntimeError: torch could not make it.
    """
    group, _ = c10d._new_process_group_helper(
        context.world_size,
        context.rank,
        list(context.ranks),
        dist.Backend(dist.get_backend(context.device_group)),
        c10d._get_default_store(),
        cast("Any", name),  # a type of its own in some versions of torch
        timeout=timedelta(seconds=max(context.timeout_s, context.operation_timeout_s) + _LATER_S),
    )
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(context.ranks)}
    return group


def end_pair_group(group: Any) -> None:
    """Give it up, unless all groups were given up before; waits for what is under way in it."""
    if group in c10d._world.pg_map:
        dist.destroy_process_group(group)
