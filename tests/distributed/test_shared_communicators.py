"""Groups of the same ranks share one FlagCX communicator; the last group closes it."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from sglang_fl.comm.agreement import agree
from sglang_fl.comm.communicator import CommunicatorFL, group_context
from sglang_fl.comm.discovery import discover_backends
from sglang_fl.comm.policy import communicator_policy
from sglang_fl.config import load_settings
from sglang_fl.testing.ranks import RankContext, run_ranks


def _group(name: str, ranks: list[int], shares: bool = True) -> CommunicatorFL:
    group = dist.new_group(ranks, backend="gloo")
    settings = load_settings(platform="cpu")
    context = group_context(group, group, "cpu", ranks, name, settings, 60.0)
    context = type(context)(**{**vars(context), "shares_communicator": shares})
    agreed = agree(context, discover_backends().backends, communicator_policy(settings))
    return CommunicatorFL.from_agreed(context, agreed)


def _inner(communicator: CommunicatorFL) -> object:
    return communicator.agreed.transport.communicator  # type: ignore[union-attr]


def _body(context: RankContext) -> None:
    ranks = [0, 1]
    world, tp, apart = _group("world:0", ranks), _group("tp:0", ranks), _group("pdmux:0", ranks, shares=False)
    assert _inner(world) is _inner(tp)
    assert _inner(apart) is not _inner(tp)
    for round_ in range(1, 4):
        for communicator in (world, tp, apart):
            assert communicator.all_reduce(torch.full((round_,), 1.0)).tolist() == [2.0] * round_
    taken = [communicator.status()["extra_bytes"] for communicator in (world, tp, apart)]
    assert 0 <= taken[1] < taken[0] // 2 and 0 < taken[2] < 2**20, taken
    inner = _inner(world)
    world.destroy()
    world.destroy()
    assert tp.all_reduce(torch.ones(3)).tolist() == [2.0] * 3
    tp.destroy()
    assert not inner.is_open  # type: ignore[attr-defined]
    # Only one rank still has one: all make a new one together instead of waiting for each other.
    again = _group("tp:1", ranks)
    if context.rank == 0:
        again.destroy()
    last = _group("tp:2", ranks)
    assert last.all_reduce(torch.ones(1)).item() == 2.0
    dist.barrier()


def test_groups_of_the_same_ranks_share_a_communicator(hostcx: Path) -> None:
    """Given groups of the same ranks, when made, used and destroyed in turn, then one communicator
    serves them, and the group that made it reports the memory that it took."""
    run_ranks(_body, 2, env={"SGLANG_FL_DIST_BACKEND": "flagcx", "FLAGCX_PATH": str(hostcx)})
