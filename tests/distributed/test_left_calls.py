"""A call over gloo that one rank has left fails on all: none gets what that has written into its tensor since."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sglang_fl.comm.backends.torch_dist.waiting import Waiting
from sglang_fl.comm.communicator import CommunicatorFL
from sglang_fl.comm.errors import CommError
from sglang_fl.testing.ranks import RankContext, run_ranks
from tests.distributed.groups import communicator_of_all

LIMIT_S = 2.0
ENDLESS_S = 600.0
TORCH = {"SGLANG_FL_DIST_BACKEND": "torch", "FLAGCX_PATH": ""}
LATE, WORLD_SIZE = 0, 3
_PROCESS = r"\(process \d+ on [^)]+\)"
_WRITTEN = -5.0  # into a tensor after its call's error

Call = Callable[[CommunicatorFL, torch.Tensor], Any]
CALLS: dict[str, Call] = {
    "all_reduce": lambda group, tensor: group.all_reduce(tensor),
    "broadcast": lambda group, tensor: group.broadcast(tensor, src=1),
    "gather": lambda group, tensor: group.gather(tensor, dst=LATE),
    "all_gather": lambda group, tensor: group.all_gather(tensor),
    "reduce_scatter": lambda group, tensor: group.reduce_scatter(torch.empty(1), [tensor[:1], tensor[1:2], tensor[2:]]),
}

# Who cannot come to the end of a call without the late rank; others may, with what they are to have.
WAITING = {name: (1,) if name == "broadcast" else (1, 2) for name in CALLS}


class _Interrupted(BaseException):
    """What a signal's handler raises."""


def _interrupt(_number: int, _frame: object) -> None:
    raise _Interrupted


def _interrupt_soon() -> None:
    signal.signal(signal.SIGALRM, _interrupt)
    signal.setitimer(signal.ITIMER_REAL, 1.0)


def _error_of(call: Callable[[], object]) -> str:
    try:
        found = call()
    except (CommError, _Interrupted) as error:
        return f"{type(error).__name__}: {error}"
    return f"no error, and the value {found!r}"


def _one_comes_late(context: RankContext, name: str, by: str) -> tuple[str, list[float]]:
    """Two ranks leave a call, at its limit or one by a signal, and use their tensors again; then the third comes.

    Returns:
        what the call ended with, and what is in the tensor at the end.
    """
    group = communicator_of_all(context, operation_timeout_s=LIMIT_S if by == "limit" else ENDLESS_S)
    store = context.store("left")
    group.all_reduce(torch.ones(1))
    tensor = torch.full((3,), float(10**context.rank))
    if context.rank == LATE:
        # The store's own words do, so that nothing that the monitors tell is waited for.
        store.wait([f"left {rank}" for rank in range(1, WORLD_SIZE)])
        text = _error_of(lambda: CALLS[name](group, tensor))
        store.set("late", "")
        return text, tensor.tolist()
    if by == "signal" and context.rank == 1:
        _interrupt_soon()
    text = _error_of(lambda: CALLS[name](group, tensor))
    tensor.fill_(_WRITTEN)
    store.set(f"left {context.rank}", "")
    store.wait(["late"])
    return text, tensor.tolist()


@pytest.mark.parametrize("by", ["limit", "signal"])
@pytest.mark.parametrize("name", CALLS)
def test_who_comes_after_others_have_left_the_call_fails_as_well(name: str, by: str, tmp_path: Path) -> None:
    """Given two ranks of which one leaves a call, at its limit or by what a signal's handler raises, and that use their
    tensors again, when the third makes the call, then it gets an error and no value, and their tensors stay so."""
    env = {**TORCH, "SGLANG_FL_COMM_DUMP_DIR": str(tmp_path / "dumps")}
    results = run_ranks(_one_comes_late, WORLD_SIZE, name, by, env=env)
    kind = {"limit": "CollectiveTimeout", "signal": "PeerLost"}[by]
    for rank in (LATE, *WAITING[name]):
        text, values = results[rank]
        named = rf"{kind}: group tp:0 torch, global rank {rank} of \[0, 1, 2\]: "
        assert re.match("_Interrupted: " if (by, rank) == ("signal", 1) else named, text), results
        assert rank == LATE or values == [_WRITTEN] * 3
    if by == "signal":
        assert re.search(
            rf"global rank 1 {_PROCESS} has left the call, which was under way: _Interrupted", results[LATE][0]
        )


def _waits_for_a_send(context: RankContext, end: str) -> str:
    group, store = communicator_of_all(context, operation_timeout_s=ENDLESS_S), context.store("end")
    group.all_reduce(torch.ones(1))
    if context.rank == 1:
        text = _error_of(lambda: group.recv(torch.Size([3]), torch.float32, 0))
        store.set("ended", "")
        return text
    _interrupt_soon()
    text = _error_of(lambda: group.all_reduce(torch.ones(4)))
    if end == "destroyed":
        group.destroy()
    store.wait(["ended"])
    return text


@pytest.mark.parametrize("end", ["kept", "destroyed"])
def test_a_receive_ends_once_its_sender_refuses_the_group(end: str, tmp_path: Path) -> None:
    """Given a rank that waits in a receive without a limit, when its sender has left another call of the group, keeps
    the group or destroys it and lives on, then the receive ends with that rank's name."""
    env = {**TORCH, "SGLANG_FL_COMM_DUMP_DIR": str(tmp_path / "dumps")}
    sender, receiver = run_ranks(_waits_for_a_send, 2, end, env=env)
    assert sender.startswith("_Interrupted")
    assert re.match(r"PeerLost: group tp:0 torch 0>1, .* recv float32\[3\] rank 0 ", receiver), receiver
    assert re.search(r"global rank 0 \(.*\) has left the call, which was under way: _Interrupted", receiver), receiver


def _another_group_goes_on(context: RankContext) -> list[float]:
    failing = communicator_of_all(context, operation_timeout_s=LIMIT_S)
    other = communicator_of_all(context, operation_timeout_s=ENDLESS_S)
    store = context.store("failed")
    if context.rank == 0:
        assert _error_of(lambda: failing.all_reduce(torch.ones(2))).startswith("CollectiveTimeout")
        store.set("failed", "")
    store.wait(["failed"])
    values: list[float] = other.all_reduce(torch.ones(3)).tolist()
    return values


def test_the_end_of_one_groups_connections_is_no_other_groups(tmp_path: Path) -> None:
    """Given two groups of the same ranks, when a call of the one fails, then the other one still reduces."""
    env = {**TORCH, "SGLANG_FL_COMM_DUMP_DIR": str(tmp_path / "dumps")}
    assert run_ranks(_another_group_goes_on, 2, env=env) == [[2.0] * 3] * 2


def _interrupted_after_its_end(context: RankContext) -> None:
    group = dist.new_group([0])
    waiting = Waiting(LIMIT_S, group)
    dist.destroy_process_group(group)
    waiting.interrupt()


def test_a_group_that_torch_has_ended_is_left_alone() -> None:
    """Given a group that torch.distributed has destroyed, when a call of it is to end, then that raises nothing."""
    run_ranks(_interrupted_after_its_end, 1, env=TORCH)
