"""A group that has failed on one rank ends on all: with who is at fault, in whatever call of it the others wait."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from sglang_fl.comm.communicator import CommunicatorFL
from sglang_fl.comm.errors import CommError
from sglang_fl.testing.ranks import RankContext, RanksFailed, run_ranks
from tests.distributed.groups import communicator_of_all

LIMIT_S = 2.0
ENDLESS_S = 600.0  # longer than a test may run
SIZE = torch.Size([3])
Group = CommunicatorFL


def _failure(call: Callable[[], object]) -> str:
    with pytest.raises(CommError) as raised:
        call()
    return f"{type(raised.value).__name__}: {raised.value}"


def _env(backend: Mapping[str, str], folder: Path) -> dict[str, str]:
    return {**backend, "SGLANG_FL_COMM_DUMP_DIR": str(folder / "dumps")}


# --- who is at fault ---


def _dies(context: RankContext) -> str:
    """Rank 2 is killed; rank 0, which waits for what it sends, finds it; rank 1 comes to another call of the group."""
    group, store = communicator_of_all(context, 30.0, ENDLESS_S), context.store("dies")
    if context.rank == 2:
        group.send(torch.ones(3), 0)
        store.wait(["received"])
        os.kill(os.getpid(), signal.SIGKILL)
    if context.rank == 0:
        group.recv(SIZE, torch.float32, 2)
        store.set("received", "")
        error = _failure(lambda: group.recv(SIZE, torch.float32, 2))
        store.set("failed", "")
        store.wait(["1"])
        return error
    store.wait(["failed"])
    error = _failure(lambda: group.all_reduce(torch.ones(8)))
    store.set("1", "")
    return error


def test_who_comes_later_is_told_which_rank_is_gone(backend: Mapping[str, str], tmp_path: Path) -> None:
    """Given a rank that was killed, and another one whose receive failed for it, then a third, which comes to the
    group's next collective, gets PeerLost with the name of the killed one, and not of the one that refuses."""
    first, second, _ = run_ranks(_dies, 3, env=_env(backend, tmp_path), expect_killed=[2])
    assert re.match(r"PeerLost: group tp:0 \w+ 2>0, .* recv .*: global rank 2 \(process \d+ on \S+\) was killed", first)
    lost = r"PeerLost: group tp:0 \w+, global rank 1 .* all_reduce float32\[8\] of shape \[8\] .* cannot complete: "
    assert re.match(rf"{lost}global rank 2 \(process \d+ on \S+\) was killed", second), second
    assert "refuses" not in second


# --- in whatever call the others wait ---


def _never_used(context: RankContext) -> str:
    """Rank 0 is left alone in a collective, up to its limit; rank 1 waits in the first receive from it."""
    limit_s = LIMIT_S if context.rank == 0 else ENDLESS_S
    group, store = communicator_of_all(context, ENDLESS_S, limit_s), context.store("used")
    if context.rank == 0:
        error = _failure(lambda: group.all_reduce(torch.ones(8)))
    else:
        error = _failure(lambda: group.recv(SIZE, torch.float32, 0))
    store.set(str(context.rank), "")
    store.wait(["0", "1"])
    return error


def test_a_first_transfer_with_a_rank_that_refuses_ends(hostcx: Path, tmp_path: Path) -> None:
    """Given rank 0 in which a collective failed, then rank 1, which has no limit and waits for the first transfer that
    there ever was between them, ends with the name of that collective."""
    flagcx = {"SGLANG_FL_DIST_BACKEND": "flagcx", "FLAGCX_PATH": str(hostcx)}
    first, second = run_ranks(_never_used, 2, env=_env(flagcx, tmp_path))
    failed = r"group tp:0 flagcx, global rank 0 of \[0, 1\]: call number \d, all_reduce float32\[8\]"
    assert re.match(rf"CollectiveTimeout: {failed}", first), first
    assert re.match(rf"CollectiveTimeout: group tp:0 flagcx 0>1 first transfer, .* refuses every .*: {failed}", second)


def _later_refusal(context: RankContext) -> str:
    """Rank 0 refuses first, after more collectives than rank 1; rank 2 waits in one that only rank 1 will not make."""
    limit_s = LIMIT_S if context.rank == 0 else ENDLESS_S
    group, store = communicator_of_all(context, ENDLESS_S, limit_s), context.store("later")
    # Each direction between ranks 0 and 1 is there before.
    if context.rank == 0:
        group.send(torch.ones(3), 1)
        group.recv(SIZE, torch.float32, 1)
        for _ in range(3):
            group.gather(torch.ones(2), dst=2)  # its root alone waits
        error = _failure(lambda: group.recv(SIZE, torch.float32, 1))
        store.set("0", "")
    elif context.rank == 1:
        group.recv(SIZE, torch.float32, 0)
        group.send(torch.ones(3), 0)
        store.wait(["0"])
        error = _failure(lambda: group.recv(SIZE, torch.float32, 0))
    else:
        error = _failure(lambda: group.gather(torch.ones(2), dst=2))
    store.set(f"end {context.rank}", "")
    store.wait([f"end {rank}" for rank in range(3)])
    return error


def test_the_refusal_of_each_rank_counts(hostcx: Path, tmp_path: Path) -> None:
    """Given two ranks that refuse, then one that waits in a call that the first of them has made and the second will
    not make ends as well."""
    flagcx = {"SGLANG_FL_DIST_BACKEND": "flagcx", "FLAGCX_PATH": str(hostcx)}
    for error in run_ranks(_later_refusal, 3, env=_env(flagcx, tmp_path)):
        assert re.match("CollectiveTimeout: group tp:0 flagcx", error), error


# --- no refusal at all ---


def _waited_for_late(context: RankContext) -> list[float]:
    """Rank 1 receives at once what rank 0 sends and waits for long after the limit."""
    group, store = communicator_of_all(context, 30.0, LIMIT_S), context.store("late")
    if context.rank == 0:
        works = group.send_tensor_dict({"a": torch.ones(5)}, 1, async_send=True)
        store.wait(["received"])
        time.sleep(LIMIT_S + 1.5)
        for pending in works or []:
            if pending.work is not None:
                pending.work.wait()
    else:
        assert group.recv_tensor_dict(0) is not None
        store.set("received", "")
    reduced: list[float] = group.all_reduce(torch.ones(2)).tolist() if context.rank == 0 else [2.0, 2.0]
    if context.rank == 1:
        time.sleep(LIMIT_S + 1.5)  # not in the collective meanwhile: that would be late
        reduced = group.all_reduce(torch.ones(2)).tolist()
    return reduced


def test_a_send_may_be_waited_for_after_the_limit(backend: Mapping[str, str], tmp_path: Path) -> None:
    """Given a send that was received at once, when its work is waited for after the limit, then the group goes on."""
    assert run_ranks(_waited_for_late, 2, env=_env(backend, tmp_path)) == [[2.0, 2.0]] * 2


_HOLDS = """
import builtins, sys, types
builtins.early = sys.modules["early"] = types.ModuleType("early")  # the interpreter clears it after what comes later

import torch
from sglang_fl.comm.ring import CallRing

class Work:
    def wait(self):
        pass

ring = CallRing("pp:0", (0, 1), torch.device("cpu"))
kept = ring.watch(ring.enter("send"), Work(), ())
early.kept = kept, sys.modules["sglang_fl.comm.ring"]
"""


def test_a_work_that_is_held_at_the_end_says_nothing() -> None:
    """Given a work that lives until the interpreter takes its modules down, then nothing is written about it."""
    done = subprocess.run([sys.executable, "-c", _HOLDS], capture_output=True, text=True, timeout=120, check=True)
    assert "Exception ignored" not in done.stderr, done.stderr


# --- who left a call ---


def _leaves(context: RankContext) -> str:
    """Rank 1 leaves a call of one group by its own error and ends; rank 2 waits for it in another group."""
    import torch.distributed as dist

    groups = {}
    for name, ranks in (("g1", [0, 1]), ("g0", [1, 2])):
        made = dist.new_group(ranks, backend="gloo")
        if context.rank in ranks:
            groups[name] = CommunicatorFL(
                cpu_group=made, device_group=made, device="cpu", ranks=ranks, name=name, operation_timeout_s=ENDLESS_S
            )
            groups[name].all_reduce(torch.ones(2))
    dist.barrier()
    store = context.store("leaves")
    if context.rank == 1:

        def raises(*_: object) -> None:
            raise ValueError("planted")

        signal.signal(signal.SIGALRM, raises)
        signal.setitimer(signal.ITIMER_REAL, 0.7)
        groups["g1"].all_reduce(torch.ones(2))
    if context.rank == 2:
        error = _failure(lambda: groups["g0"].all_reduce(torch.ones(2)))
        store.set("2", "")
        return error
    store.wait(["2"])
    return ""


def test_who_left_a_call_by_itself_did_not_follow_anybody(tmp_path: Path) -> None:
    """Given a rank that ended for an error of its own, then it is not said to have ended for what it found out."""
    torch_only = {"SGLANG_FL_DIST_BACKEND": "torch", "FLAGCX_PATH": ""}
    with pytest.raises(RanksFailed, match="ValueError: planted") as raised:
        run_ranks(_leaves, 3, env=_env(torch_only, tmp_path))
    assert [failure.rank for failure in raised.value.failures] == [1]
    error = raised.value.results[2]
    assert re.match(r"PeerLost: .*global rank 1 \(process \d+ on \S+\) ended by itself; its log may hold", error), error
