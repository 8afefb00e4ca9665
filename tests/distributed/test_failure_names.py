"""Every rank that is missing from a call is named with what became of it, and every call that fails by its name."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sglang_fl.comm import dump_calls
from sglang_fl.comm.communicator import CommunicatorFL
from sglang_fl.comm.difference import Kind, compare
from sglang_fl.comm.dump_files import choose_dumps
from sglang_fl.comm.errors import CommError
from sglang_fl.comm.monitor import monitor
from sglang_fl.testing.ranks import RankContext, run_ranks
from tests.distributed.groups import communicator_of_all

LIMIT_S = 2.0
ENDLESS_S = 600.0  # longer than a test may run
TORCH = {"SGLANG_FL_DIST_BACKEND": "torch", "FLAGCX_PATH": ""}
_PROCESS = r"\(process \d+ on [^)]+\)"


def _group(context: RankContext) -> CommunicatorFL:
    return communicator_of_all(context, 30.0, LIMIT_S)


def _failure(call: Callable[[], object]) -> str:
    with pytest.raises(CommError) as raised:
        call()
    return f"{type(raised.value).__name__}: {raised.value}"


# --- several ranks are missing ---


def _first_stopped(context: RankContext) -> tuple[CommunicatorFL, Any]:
    """A group of all ranks, of which rank 1 is then stopped, and a store with their processes' numbers."""
    group, store = _group(context), context.store("ranks")
    group.all_reduce(torch.ones(5))
    store.set(str(context.rank), str(os.getpid()))
    store.wait([str(rank) for rank in range(context.world_size)])
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return group, store


def _reduced(context: RankContext, group: CommunicatorFL, store: Any) -> str:
    """The error of ranks 0 and 3; the stopped rank ends with theirs."""
    error = _failure(lambda: group.all_reduce(torch.ones(4, 2)))
    store.set(f"failed {context.rank}", "")
    store.wait(["failed 0", "failed 3"])
    if context.rank == 0:
        os.kill(int(store.get("1")), signal.SIGKILL)
    return error


def _one_stopped_one_killed(context: RankContext) -> str:
    group, store = _first_stopped(context)
    if context.rank == 2:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1.0)
    return _reduced(context, group, store)


def test_one_rank_stopped_and_one_killed_are_both_named(backend: Mapping[str, str], tmp_path: Path) -> None:
    """Given four ranks of which one is stopped and another killed, when the others reduce, then each of them names
    both, with what became of each."""
    env = {**backend, "SGLANG_FL_COMM_DUMP_DIR": str(tmp_path / "dumps")}
    results = run_ranks(_one_stopped_one_killed, 4, env=env, expect_killed=[1, 2])
    for rank in (0, 3):
        text = results[rank]
        assert text.startswith("PeerLost: ") and re.search(r"call number \d+, all_reduce float32\[8\]", text), text
        assert re.search(rf"global rank 2 {_PROCESS} was killed or crashed", text), text
        assert re.search(rf"global rank 1 {_PROCESS} is stopped \(SIGSTOP, a debugger\)", text), text
        assert "global rank(s) [1, 2] first" in text


def _one_stopped_one_elsewhere(context: RankContext) -> str:
    group, store = _first_stopped(context)
    if context.rank == 2:
        store.wait(["failed 0"])
        return ""
    time.sleep(0.2)
    return _reduced(context, group, store)


def test_one_rank_stopped_and_one_elsewhere_are_both_named(backend: Mapping[str, str], tmp_path: Path) -> None:
    """Given four ranks of which one is stopped and another does something else, when the limit of the others' call has
    passed, then both are named, and the advice is to look at the stopped one."""
    env = {**backend, "SGLANG_FL_COMM_DUMP_DIR": str(tmp_path / "dumps")}
    results = run_ranks(_one_stopped_one_elsewhere, 4, env=env, expect_killed=[1])
    for rank in (0, 3):
        text = results[rank]
        assert text.startswith("CollectiveTimeout: "), text
        assert re.search(rf"global rank 1 {_PROCESS} is stopped \(SIGSTOP, a debugger\)", text), text
        assert re.search(rf"global rank 2 {_PROCESS} is alive and has not entered the call", text), text
        assert "global rank(s) [1] first" in text


# --- what a living rank did instead ---


def _another_call(context: RankContext) -> str:
    group = _group(context)
    group.all_reduce(torch.ones(5))
    calls: list[Callable[[], object]] = [
        lambda: group.all_reduce(torch.ones(8)),
        lambda: group.broadcast(torch.ones(3), src=0),
    ]
    error = _failure(calls[context.rank])
    dist.barrier()  # of the default group: nobody ends before all have failed
    return error


def test_another_call_of_the_same_number_is_named(tmp_path: Path) -> None:
    """Given two ranks of which one reduces and the other waits for a broadcast, when the limit has passed, then the
    error of the one that finds it says which call the other one made in its place, not that all have entered it."""
    env = {**TORCH, "SGLANG_FL_COMM_DUMP_DIR": str(tmp_path / "dumps")}
    texts = run_ranks(_another_call, 2, env=env)
    calls = ("all_reduce float32[8]", "broadcast float32[3] rank 0")
    instead = "is alive and has made another call in its place: number 2, "
    missing = [rf"global rank {1 - rank} {_PROCESS} {instead}{re.escape(calls[1 - rank])}" for rank in range(2)]
    # Who comes second at its limit finds that the other one's call has failed.
    assert any(re.search(pattern, text) for pattern, text in zip(missing, texts, strict=True)), texts
    assert not any("all ranks have entered it" in text for text in texts)


def _gives_up(context: RankContext) -> str:
    group, store = _group(context), context.store("done")
    group.all_reduce(torch.ones(5))
    if context.rank == 1:
        group.destroy()
        store.wait(["done"])
        return ""
    error = _failure(lambda: group.all_reduce(torch.ones(8)))
    store.set("done", "")
    return error


def test_a_rank_that_gave_the_group_up_is_named(tmp_path: Path) -> None:
    """Given a rank that has destroyed its group, when another one reduces, then the error says so."""
    env = {**TORCH, "SGLANG_FL_COMM_DUMP_DIR": str(tmp_path / "dumps")}
    text = run_ranks(_gives_up, 2, env=env)[0]
    missing = rf"global rank 1 {_PROCESS} is alive and has given the group up: its last call of it was number 1"
    assert text.startswith("CollectiveTimeout: ") and re.search(missing, text), text


# --- a send that nobody receives ---


def _nobody_receives(context: RankContext) -> dict[str, str]:
    group, store = _group(context), context.store("sent")
    group.all_reduce(torch.ones(5))
    if context.rank == 1:
        store.wait(["failed"])
    errors = {}
    if context.rank == 0:
        errors["wait"] = _failure(group.isend(torch.ones(2**10, 2**10), 1).work.wait)
        errors["send"] = _failure(lambda: group.send(torch.ones(3), 1))
        store.set("failed", "")
    errors["all_reduce"] = _failure(lambda: group.all_reduce(torch.ones(5)))
    errors["barrier"] = _failure(group.barrier)
    store.set(str(context.rank), "")
    store.wait(["0", "1"])
    return errors


def test_what_follows_a_send_that_nobody_received_is_named(tmp_path: Path) -> None:
    """Given a send over gloo that nobody receives, when its limit has passed, then it fails with group, peer, number
    and shape, and so does every further call of this rank, a refused one not with its own shape as the send's; gloo has
    ended the group's connections with it, or the other rank is told, and its calls say what failed before."""
    env = {**TORCH, "SGLANG_FL_COMM_DUMP_DIR": str(tmp_path / "dumps")}
    sender, receiver = run_ranks(_nobody_receives, 2, env=env)
    sent = r"group tp:0 torch 0>1, global rank 0 of \[0, 1\]: call number 1, send float32\[1048576\] rank 1"
    late = rf"did not complete within {LIMIT_S:g} s: global rank 1 {_PROCESS} is alive and has not entered the call"
    assert re.match(rf"CollectiveTimeout: {sent} of shape \[1024, 1024\] called at .* {late}", sender["wait"]), sender
    for call in ("send", "all_reduce", "barrier"):
        assert re.match(rf"CollectiveTimeout: {sent} called at .* {late}", sender[call]), sender
    reduced = r"group tp:0 torch, global rank 1 of \[0, 1\]: call number 2, all_reduce float32\[5\]"
    if receiver["all_reduce"].startswith("CommError: "):  # gloo's error, and so is that of the next call
        failed = rf"CommError: {reduced} of shape \[5\] called at .* failed: .*; what failed before it is: {sent}"
        assert re.match(failed, receiver["all_reduce"]), receiver
        barrier = r"group tp:0 CPU group, global rank 1 of \[0, 1\]: call number 1, barrier"
        assert re.match(rf"\w+: {barrier}", receiver["barrier"]), receiver
    else:
        told = rf"called at .* cannot complete: global rank 0 {_PROCESS} is alive and refuses .* failed there: {sent}"
        assert re.match(rf"CollectiveTimeout: {reduced} of shape \[5\] {told}", receiver["all_reduce"]), receiver
        assert re.match(rf"CollectiveTimeout: {reduced} {told}", receiver["barrier"]), receiver


def _waits_for_who_refuses(context: RankContext) -> str:
    """Rank 0 receives what nobody sends, up to its limit; rank 1, which has none, waits in what rank 0 would call."""
    group, store = communicator_of_all(context, 30.0, LIMIT_S if context.rank == 0 else ENDLESS_S), context.store("end")
    size = torch.Size([3])
    if context.rank == 0:
        group.recv(size, torch.float32, 1)
        error = _failure(lambda: group.recv(size, torch.float32, 1))
    else:
        group.send(torch.ones(3), 0)
        error = _failure(lambda: group.all_reduce(torch.ones(8)))
    store.set(str(context.rank), "")
    store.wait(["0", "1"])
    return error


def test_who_waits_hears_that_another_refuses_its_calls(backend: Mapping[str, str], tmp_path: Path) -> None:
    """Given rank 0, whose receive nobody answers and which refuses what comes after it, then rank 1, which has no limit
    and waits in the group's next collective, ends too, and both name the receive."""
    env = {**backend, "SGLANG_FL_COMM_DUMP_DIR": str(tmp_path / "dumps")}
    receiver, waiter = run_ranks(_waits_for_who_refuses, 2, env=env)
    received = r"group tp:0 \w+ 1>0, global rank 0 of \[[01], [01]\]: call number \d, recv float32\[3\]"
    assert re.match(rf"CollectiveTimeout: {received}", receiver), receiver
    named = r"\w+: group tp:0 \w+, global rank 1 of \[0, 1\]: call number \d, all_reduce float32\[8\] of shape \[8\]"
    before = "(what failed before it is|refuses every further call of the group, since one of it failed there)"
    assert re.match(rf"{named}.* {before}: {received}", waiter), waiter


# --- a dump that comes late ---


def _answers_late(context: RankContext) -> None:
    group, store = _group(context), context.store("done")
    group.all_reduce(torch.ones(5))
    has_ended = threading.Event()
    if context.rank == 0:
        _failure(lambda: group.all_reduce(torch.ones(8)))
        store.set("failed", "")
        store.wait(["ended"])
        return
    answer = monitor.dump_calls

    def late(*arguments: Any, **named: Any) -> Path:
        store.set("asked", "")
        assert has_ended.wait(30)
        return answer(*arguments, **named)

    setattr(monitor, "dump_calls", late)  # noqa: B010 - what a loaded machine does
    store.wait(["failed"])
    dump_calls()
    store.wait(["asked"])
    group.destroy()
    dist.destroy_process_group()
    has_ended.set()
    folder = Path(os.environ["SGLANG_FL_COMM_DUMP_DIR"])
    until_s = time.monotonic() + 30
    while len(list(folder.glob(f"*-pid{os.getpid()}-*.json"))) < 2 and time.monotonic() < until_s:
        time.sleep(0.01)
    store.set("ended", "")


def test_a_dump_from_after_the_groups_end_hides_no_difference(tmp_path: Path) -> None:
    """Given a rank that has left a dump and gives everything up while its monitor answers another one that found it
    missing, when the dumps are compared, then its calls are those of the first, and the difference is found."""
    tmp_path.chmod(0o700)
    run_ranks(_answers_late, 2, env={**TORCH, "SGLANG_FL_COMM_DUMP_DIR": str(tmp_path)})
    chosen = choose_dumps([tmp_path])
    (difference,) = compare(chosen.dumps).differences
    assert (difference.kind, difference.number, difference.who) == (Kind.MISSING, 2, (1,)), (difference, chosen)
    (left_out,) = chosen.left_out
    assert re.search("there is a later one of rank 1, .*; from the earlier one is taken what that no longer", left_out)
