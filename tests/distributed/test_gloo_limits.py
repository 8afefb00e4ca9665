"""No call over gloo waits beyond the group's limit, whatever torch's own work makes of the limit of a wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from sglang_fl.comm.communicator import CommunicatorFL
from sglang_fl.comm.errors import CommError
from sglang_fl.testing.ranks import RankContext, run_ranks
from tests.distributed.groups import communicator_of_all

OPERATION_LIMIT_S = 2.0
TEST_LIMIT_S = 40.0  # who stays away waits for the call's end: one that has no limit is still running then
ABSENT = 1
TORCH = {"SGLANG_FL_DIST_BACKEND": "torch", "FLAGCX_PATH": ""}

Call = Callable[[CommunicatorFL], object]


def _isend_and_wait(group: CommunicatorFL) -> None:
    work = group.isend(torch.ones(2**20), ABSENT).work
    assert work is not None
    work.wait()


# What the error calls it, and the call: all that a group waits for over gloo, through each function of torch's.
CALLS: Mapping[str, tuple[str, Call]] = {
    "all_reduce": ("all_reduce float32[4]", lambda group: group.all_reduce(torch.ones(4))),
    "all_gather_into_tensor": (
        "all_gather float32[4]",
        lambda group: group.all_gather_into_tensor(torch.empty(8), torch.ones(4)),
    ),
    "reduce_scatter_tensor": (
        "reduce_scatter float32[4]",
        lambda group: group.reduce_scatter_tensor(torch.empty(4), torch.ones(8)),
    ),
    "reduce_scatter of a list": (
        "reduce_scatter float32[4]",
        lambda group: group.reduce_scatter(torch.empty(4), [torch.ones(4)] * 2),
    ),
    "reduce_scatterv, even": ("reduce_scatter float32[4]", lambda group: group.reduce_scatterv(torch.ones(8))),
    "reduce": ("reduce float32[3]", lambda group: group.reduce_scatterv(torch.ones(3), sizes=[3, 0])),
    "broadcast": ("broadcast float32[4]", lambda group: group.broadcast(torch.ones(4), src=ABSENT)),
    "gather": ("gather float32[4]", lambda group: group.gather(torch.ones(4), dst=0)),
    "barrier": ("barrier", lambda group: group.barrier()),
    "broadcast_object_list": (
        "broadcast_object_list",
        lambda group: group.broadcast_object_list([None], src=ABSENT),
    ),
    "isend": ("send float32[1048576]", _isend_and_wait),
    "recv": ("recv float32[4]", lambda group: group.recv(torch.Size([4]), torch.float32, ABSENT)),
}


def _one_stays_away(context: RankContext, call: Call) -> str:
    group, store = communicator_of_all(context, operation_timeout_s=OPERATION_LIMIT_S), context.store("end")
    group.all_reduce(torch.ones(1))
    if context.rank == ABSENT:
        store.wait(["failed"])
        return ""
    with pytest.raises(CommError) as raised:
        call(group)
    store.set("failed", "")
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.parametrize("name", CALLS)
def test_a_call_ends_while_a_rank_stays_away(name: str, tmp_path: Path) -> None:
    """Given two ranks of which one makes no call before the other one's has failed, when that one calls, then it gets
    an error with the call and the missing rank."""
    named, call = CALLS[name]
    env = {**TORCH, "SGLANG_FL_COMM_DUMP_DIR": str(tmp_path / "dumps")}
    text = run_ranks(_one_stays_away, 2, call, env=env, timeout_s=TEST_LIMIT_S)[0]
    assert text.startswith("CollectiveTimeout: ") and f", {named} " in text, text
    assert f"global rank {ABSENT} (process " in text and "is alive and has not entered the call" in text, text
