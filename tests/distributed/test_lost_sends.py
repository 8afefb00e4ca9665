"""Sends that nobody receives: which groups refuse them, what is told of those that were lost, and what stays behind."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sglang_fl.comm.errors import CommError
from sglang_fl.testing.ranks import RankContext, run_ranks
from tests.distributed.groups import communicator_of_all

LIMIT_S = 2.0


def _failure(call: object, *arguments: object) -> str:
    with pytest.raises((CommError, TypeError)) as raised:
        call(*arguments)  # type: ignore[operator]
    return f"{type(raised.value).__name__}: {raised.value}"


def _refuses(context: RankContext, is_destroyed: bool) -> list[str]:
    group, store = communicator_of_all(context, operation_timeout_s=LIMIT_S), context.store("done")
    group.all_reduce(torch.ones(5))
    if context.rank == 1:
        store.wait(["done"])
        return []
    if is_destroyed:
        group.destroy()
    else:
        _failure(group.all_reduce, torch.ones(4))
    big = torch.ones(40 * 2**20)  # two of them have no room together
    texts = [
        _failure(group.send, big, 1),
        _failure(group.send, big, 1),
        _failure(group.isend, torch.ones(3), 1),
        _failure(group.recv, torch.Size([3]), torch.float32, 1),
        _failure(group.send_tensor_dict, {"a": torch.ones(3)}, 1),
        _failure(group.recv_tensor_dict, 1),
    ]
    assert group.status()["send_bytes_held"] == 0
    store.set("done", "")
    return texts


@pytest.mark.parametrize("is_destroyed", [True, False], ids=["destroyed", "failed"])
def test_a_group_that_is_over_refuses_transfers(is_destroyed: bool, backend: dict[str, str], tmp_path: Path) -> None:
    """Given a group that was destroyed, or whose all_reduce has timed out, when tensors or dictionaries are sent or
    received, then each call says so, and nothing is held."""
    env = {**backend, "SGLANG_FL_COMM_DUMP_DIR": str(tmp_path / "dumps")}
    named = r"group tp:0 \w+, global rank 0 of \[0, 1\]: call number \d+, all_reduce float32\[4\] "
    failed = rf"CollectiveTimeout: {named}.*global rank 1 \(process .*"
    wanted = "CommError: group tp:0 is destroyed; make a new one" if is_destroyed else failed
    for text in run_ranks(_refuses, 2, is_destroyed, env=env)[0]:
        assert re.fullmatch(wanted, text), text


def _cannot_begin(context: RankContext) -> None:
    group = communicator_of_all(context, operation_timeout_s=600.0)
    if context.rank == 0:
        negated = torch.ones(20 * 2**20, dtype=torch.complex64).conj().imag
        group._sends.limit_bytes = 100 * 2**20  # room for one of them
        for _ in range(3):
            with pytest.raises(TypeError, match="cannot be sent"):
                group.send_object_part(negated, 1)
        assert group.status()["send_bytes_held"] == 0
        group.send(torch.ones(3), 1)
    else:
        assert group.recv(torch.Size([3]), torch.float32, 0).tolist() == [1.0] * 3
    group.destroy()


def test_a_send_that_raises_keeps_no_room(backend: dict[str, str]) -> None:
    """Given tensors that cannot be sent, more than there is room for, when a rank sends them, then each raises at once,
    and what is sent next arrives."""
    run_ranks(_cannot_begin, 2, env=backend)


def _lost(context: RankContext, is_connected: bool, is_destroyed: bool) -> None:
    group, store = communicator_of_all(context, operation_timeout_s=20.0), context.store("sent")
    if is_connected:
        if context.rank == 0:
            group.recv(torch.Size([1]), torch.float32, 1)
        else:
            group.send(torch.ones(1), 0)
    if context.rank == 0:
        store.wait(["sent"])
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(4):
        group.send(torch.ones(5 * 2**20), 0)
    store.set("sent", "")
    if is_destroyed:
        group.destroy()
        group.destroy()


@pytest.mark.parametrize("is_destroyed", [True, False], ids=["destroyed", "exit"])
@pytest.mark.parametrize("is_connected", [True, False], ids=["connected", "first"])
def test_every_lost_send_is_told(
    is_connected: bool, is_destroyed: bool, backend: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    """Given four sends, the first of their pair or not, to a rank that is killed before it receives, when the sender
    destroys the group, or ends without that, then one line tells of all four and names that rank."""
    run_ranks(_lost, 2, is_connected, is_destroyed, env=backend, start_method="spawn", expect_killed=[0])
    lines = [line for line in capfd.readouterr().err.splitlines() if "that no rank received" in line]
    how = "destroyed" if is_destroyed else "the process ends"
    assert len(lines) == 1, lines
    assert re.search(rf"group tp:0: {how} with 4 send\(s\) that no rank received: 4 to global rank 0", lines[0]), lines


def _dropped(context: RankContext) -> None:
    group, store = communicator_of_all(context, operation_timeout_s=30.0), context.store("sent")
    value = {"a": torch.full((2**18,), 3.0), "b": "text"}
    if context.rank == 0:
        group.isend(torch.full((2**18,), 2.0), 1)
        group.send_tensor_dict(value, 1, async_send=True)
        gc.collect()
        assert group.status()["send_bytes_held"] >= 2**21
        store.set("sent", "")
        group.destroy()
        return
    store.wait(["sent"])
    assert group.recv(torch.Size([2**18]), torch.float32, 0).eq(2.0).all()
    found = group.recv_tensor_dict(0)
    assert found is not None and found["b"] == "text" and found["a"].eq(3.0).all()


def test_a_send_whose_work_was_dropped_arrives(backend: dict[str, str]) -> None:
    """Given a tensor and a dictionary that a rank sends asynchronously, and whose works it drops at once, when it then
    destroys the group and the other rank receives late, then both arrive."""
    run_ranks(_dropped, 2, env=backend, start_method="spawn")


def _kept(context: RankContext) -> None:
    dist.init_process_group("gloo", init_method=context.init_method, rank=context.rank, world_size=2)
    group, store = communicator_of_all(context, operation_timeout_s=30.0), context.store("sent")
    if context.rank == 0:
        # A name of the module lives until Python has nothing left that could wait.
        globals()["kept"] = group.isend(torch.full((2**18,), 2.0), 1)
        store.set("sent", "")
        return
    store.wait(["sent"])
    time.sleep(0.5)
    assert group.recv(torch.Size([2**18]), torch.float32, 0).eq(2.0).all()


def test_a_send_whose_work_is_kept_to_the_end_of_the_process_arrives() -> None:
    """Given a send whose work a rank keeps and does not wait for, when the rank ends, then it ends once the other one
    has received. Over torch: FlagCX's own thread has carried it before."""
    env = {"SGLANG_FL_DIST_BACKEND": "torch", "FLAGCX_PATH": ""}
    run_ranks(_kept, 2, env=env, gloo=False, start_method="spawn")


def _waits_twice(context: RankContext) -> None:
    group = communicator_of_all(context, operation_timeout_s=600.0)
    if context.rank == 0:
        work = group.isend(torch.ones(5), 1).work
        assert work is not None
        waits = [threading.Thread(target=work.wait) for _ in range(3)]
        for each in waits:
            each.start()
        work.wait()
        for each in waits:
            each.join(20)
            assert not each.is_alive()
    else:
        assert group.recv(torch.Size([5]), torch.float32, 0).tolist() == [1.0] * 5
    assert group.all_reduce(torch.ones(2)).tolist() == [2.0] * 2


def test_a_work_may_be_waited_for_more_than_once(backend: dict[str, str]) -> None:
    """Given a send, when several threads wait for its work, then all of them return, and the group goes on."""
    run_ranks(_waits_twice, 2, env=backend)


def _dropped_and_lost(context: RankContext) -> None:
    group, store = communicator_of_all(context, operation_timeout_s=20.0), context.store("sent")
    if context.rank == 0:
        store.wait(["sent"])
        os.kill(os.getpid(), signal.SIGKILL)
    group.isend(torch.ones(5 * 2**20), 0)
    store.set("sent", "")


def test_a_dropped_send_that_is_lost_is_told(backend: dict[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    """Given a send whose work was dropped, to a rank that is killed, when the sender ends, then a line tells of it."""
    run_ranks(_dropped_and_lost, 2, env=backend, start_method="spawn", expect_killed=[0])
    lines = [line for line in capfd.readouterr().err.splitlines() if "that no rank received" in line]
    assert len(lines) == 1 and "1 send(s) that no rank received: 1 to global rank 0" in lines[0], lines


def _threads(context: RankContext) -> None:
    other = 1 - context.rank
    for _ in range(3):
        group = communicator_of_all(context, operation_timeout_s=600.0)
        group.send(torch.ones(3), other)
        group.recv(torch.Size([3]), torch.float32, other)
        dist.barrier()
        group.destroy()
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith(("sglang_fl-sends", "sglang_fl-peer"))]


def test_a_destroyed_group_leaves_no_thread(backend: dict[str, str]) -> None:
    """Given groups that sent and were destroyed, then none of their threads is left."""
    run_ranks(_threads, 2, env=backend)


# --- FlagCX's first transfer of a pair, before there is a communicator that records ---


def _first_alone(context: RankContext, limits: dict[str, float]) -> list[str]:
    group, store = communicator_of_all(context, **limits), context.store("done")
    if context.rank == 1:
        store.wait(["done"])
        return []
    work = group.isend(torch.ones(3, 4), 1).work
    assert work is not None
    texts = [_failure(work.wait), _failure(group.send, torch.ones(5), 1)]
    texts.append(_failure(group.recv, torch.Size([2]), torch.float32, 1))
    store.set("done", "")
    return texts


@pytest.mark.parametrize("limits", [(LIMIT_S, 600.0), (600.0, LIMIT_S)], ids=["operation", "creation"])
def test_a_first_send_ends_with_its_name_at_the_smaller_limit(
    limits: tuple[float, float], hostcx: Path, tmp_path: Path
) -> None:
    """Given two ranks that never transferred, when one sends and the other does nothing, then the send and what comes
    after it end at the operation's limit, or the creation's if that is smaller, with call, shape, peer and dump."""
    dumps = tmp_path / "dumps"
    env = {"SGLANG_FL_DIST_BACKEND": "flagcx", "FLAGCX_PATH": str(hostcx), "SGLANG_FL_COMM_DUMP_DIR": str(dumps)}
    given = dict(zip(("operation_timeout_s", "timeout_s"), limits, strict=True))
    first, *others = run_ranks(_first_alone, 2, given, env=env)[0]
    named = r"CollectiveTimeout: group tp:0 flagcx 0>1 first transfer, global rank 0 of \[0, 1\]: call number 1, send "
    late = (
        rf"did not complete within {LIMIT_S:g} s: global rank 1 \(process .* has not entered the call: .*The calls of "
    )
    assert re.match(rf"{named}float32\[12\] rank 1 of shape \[3, 4\] called at .* {late}", first), first
    for text in others:
        assert re.match(rf"{named}float32\[12\] rank 1 called at .* {late}", text), text
    assert list(dumps.glob("*rank0*.json"))


def _first_to_a_killed_rank(context: RankContext) -> list[str]:
    group = communicator_of_all(context, operation_timeout_s=600.0)
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return [_failure(group.recv, torch.Size([3]), torch.float32, 1)]


def test_a_first_transfer_with_a_killed_rank_names_it(hostcx: Path, tmp_path: Path) -> None:
    """Given two ranks that never transferred, when one is killed, then the other's receive raises PeerLost with it."""
    dumps = str(tmp_path / "dumps")
    env = {"SGLANG_FL_DIST_BACKEND": "flagcx", "FLAGCX_PATH": str(hostcx), "SGLANG_FL_COMM_DUMP_DIR": dumps}
    (text,) = run_ranks(_first_to_a_killed_rank, 2, env=env, expect_killed=[1])[0]
    named = (
        r"PeerLost: group tp:0 flagcx 1>0 first transfer, global rank 0 of \[1, 0\]: call number 1, recv float32\[3\]"
    )
    assert re.match(rf"{named} rank 1 of shape \[3\] .* global rank 1 \(process ", text), text


def _unrecorded(context: RankContext) -> str:
    group, store = communicator_of_all(context, operation_timeout_s=LIMIT_S), context.store("done")
    if context.rank == 1:
        store.wait(["done"])
        return ""
    text = _failure(group.recv, torch.Size([3]), torch.float32, 1)
    store.set("done", "")
    return text


def test_an_unrecorded_first_transfer_names_both_ranks(hostcx: Path) -> None:
    """Given a group that is not recorded, when a peer never comes to the first transfer, then it ends at the limit with
    the names of group and ranks."""
    env = {"SGLANG_FL_DIST_BACKEND": "flagcx", "FLAGCX_PATH": str(hostcx), "SGLANG_FL_COMM_RECORD": "0"}
    text = run_ranks(_unrecorded, 2, env=env)[0]
    assert text.startswith("CollectiveTimeout: group tp:0, flagcx: no transfer between global ranks 0 and 1: "), text


def _made_pairs_are_recorded_once(context: RankContext) -> list[str]:
    group, other = communicator_of_all(context, operation_timeout_s=LIMIT_S), 1 - context.rank
    group.send(torch.ones(3), other)
    group.recv(torch.Size([3]), torch.float32, other)
    dist.barrier()
    return [recorder.name for recorder in group.recorders()]


def test_a_pair_that_was_made_leaves_no_first_transfer(hostcx: Path) -> None:
    """Given ranks that both sent first, each another direction, then both have the same recorders: of the group, and of
    each direction."""
    env = {"SGLANG_FL_DIST_BACKEND": "flagcx", "FLAGCX_PATH": str(hostcx)}
    for names in run_ranks(_made_pairs_are_recorded_once, 2, env=env):
        assert [name for name in names if ">" in name] == ["tp:0 flagcx 0>1", "tp:0 flagcx 1>0"], names
