"""A call that does not complete: who is named, what the others are told, what is refused; every end is bounded."""

from __future__ import annotations

import json
import multiprocessing.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sglang_fl.comm.backends.flagcx import FlagCXCommunicator
from sglang_fl.comm.communicator import CommunicatorFL
from sglang_fl.comm.dumps import PATTERN
from sglang_fl.comm.errors import AgreementError, CollectiveTimeout, CommError, PeerLost
from sglang_fl.comm.exchange import PROCESSES
from sglang_fl.comm.monitor import MONITOR
from sglang_fl.comm.processes import State
from sglang_fl.comm.types import Capabilities, Operation, Transport
from sglang_fl.testing.ranks import RankContext, RanksFailed, run_ranks

LIMIT_S = 2.0
ALLOWANCE_S = 2.0
_END_LIMIT_S = 5.0 + ALLOWANCE_S
ROOT = Path(__file__).parents[2]


def _group(context: RankContext, ranks: list[int] | None = None, **limits: float) -> CommunicatorFL:
    group = dist.new_group(ranks, backend="gloo")
    return CommunicatorFL(
        cpu_group=group,
        device_group=group,
        device="cpu",
        ranks=ranks or range(context.world_size),
        name="tp:0",
        **{"timeout_s": 20.0, "operation_timeout_s": LIMIT_S, **limits},
    )


def _failure(call: object, *arguments: object) -> tuple[CommError, float]:
    """What a call raises, and after how many seconds."""
    start_s = time.monotonic()
    with pytest.raises(CommError) as raised:
        call(*arguments)  # type: ignore[operator]
    return raised.value, time.monotonic() - start_s


# --- who is named ---


def _skips(context: RankContext) -> tuple[str, str]:
    group, store = _group(context), context.store("done")
    for _ in range(3):
        group.all_reduce(torch.ones(5))
    if context.rank == 1:
        store.wait(["failed"])
        time.sleep(3.0)  # this rank makes no call, and is told all the same
        error, _ = _failure(group.all_reduce, torch.ones(8))
        return type(error).__name__, str(error)
    error, took_s = _failure(group.all_reduce, torch.ones(4, 2))
    store.set("failed", "1")
    assert LIMIT_S <= took_s < LIMIT_S + ALLOWANCE_S
    time.sleep(4.0)
    return type(error).__name__, str(error)


def test_a_rank_that_skips_a_call_is_named_and_told(backend: dict[str, str], tmp_path: Path) -> None:
    """Given two ranks of which one does something else, when the other reduces, then it gets a CollectiveTimeout that
    names group, call, shape, place, limit and the rank with its last call; that rank is told, refuses its next call
    with the same reason, and both leave a dump."""
    env = {**backend, "SGLANG_FL_COMM_DUMP_DIR": str(tmp_path / "dumps")}
    (kind, text), (told_kind, told) = run_ranks(_skips, 2, env=env)
    assert kind == told_kind == "CollectiveTimeout"
    number = int(re.findall(r"call number (\d+), all_reduce float32\[8\] of shape \[4, 2\]", text)[0])
    assert re.search(r"group tp:0 (torch|flagcx), global rank 0 of \[0, 1\]: call number ", text)
    assert "test_failures.py" in text and f"did not complete within {LIMIT_S:g} s: " in text
    missing = r"global rank 1 \(process \d+ on .*\) is alive and has not entered the call: "
    assert re.search(rf"{missing}its last call of this group is number {number - 1}", text), text
    assert f"call number {number}, all_reduce float32[8]" in told and "(found by global rank 0)" in told, told
    ranks = {json.loads(path.read_text())["rank"] for path in (tmp_path / "dumps").glob(PATTERN)}
    assert ranks == {0, 1}


def _two_groups(context: RankContext) -> tuple[str, str]:
    """Rank 2 is killed; rank 0 shares no group with it, rank 1 both."""
    groups = [dist.new_group(ranks, backend="gloo") for ranks in ([0, 1], [1, 2])]
    mine = {}
    for name, ranks, group in (("a:0", [0, 1], groups[0]), ("b:0", [1, 2], groups[1])):
        if context.rank in ranks:
            mine[name] = CommunicatorFL(
                cpu_group=group, device_group=group, device="cpu", ranks=ranks, name=name, operation_timeout_s=8.0
            )
    for group in mine.values():
        group.all_reduce(torch.ones(1))
    if context.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if context.rank == 1:
        error, took_s = _failure(mine["b:0"].all_reduce, torch.ones(2))
        assert took_s < 4.0
        assert mine["a:0"].all_reduce(torch.ones(1)).item() == 2.0
        return type(error).__name__, str(error)
    assert mine["a:0"].all_reduce(torch.ones(1)).item() == 2.0
    return "", ""


def test_a_group_without_the_lost_rank_goes_on(backend: dict[str, str]) -> None:
    """Given groups [0, 1] and [1, 2], when rank 2 is killed, then rank 1 gets a PeerLost in the one that it shares with
    it, and the other group still reduces."""
    results = run_ranks(_two_groups, 3, env=backend, expect_killed=[2])
    kind, text = results[1]
    assert kind == "PeerLost"
    assert re.search(r"group b:0 .* global rank 2 \(process \d+ on .*\) was killed or crashed", text), text


def _same_name(context: RankContext) -> str:
    """Two groups of one name; a call of the first fails, and one of the other takes long after that."""
    first, second = (dist.new_group(ranks, backend="gloo") for ranks in ([0, 1], [2, 3]))
    own, ranks = (first, [0, 1]) if context.rank < 2 else (second, [2, 3])
    group = CommunicatorFL(
        cpu_group=own, device_group=own, device="cpu", ranks=ranks, name="tp:0", operation_timeout_s=LIMIT_S
    )
    group.all_reduce(torch.ones(1))
    store = context.store("failed")
    if context.rank == 0:
        error, _ = _failure(group.all_reduce, torch.ones(4))
        store.set("failed", "1")
        store.get("done")
        return str(error)
    if context.rank == 1:
        store.get("done")
        return ""
    store.get("failed")
    for _ in range(2):
        if context.rank == 3:
            time.sleep(1.0)  # looked into on rank 2, and within the limit
        group.all_reduce(torch.ones(4))
    store.set("done", "1")
    return "goes on"


def test_a_group_of_the_same_name_and_other_ranks_goes_on(backend: dict[str, str]) -> None:
    """Given two groups of one name, as SGLang's TP groups are, when a call of one of them fails, then the other group's
    slow calls complete."""
    failed, _, *healthy = run_ranks(_same_name, 4, env=backend)
    assert "global rank 0 of [0, 1]" in failed and "did not complete within" in failed
    assert healthy == ["goes on"] * 2


def _on_the_cpu_group(context: RankContext, method: str) -> list[str]:
    group, store = _group(context), context.store("done")
    call = {"barrier": group.barrier, "broadcast_object_list": lambda: group.broadcast_object_list([1], src=1)}[method]
    call()
    if context.rank == 1:
        store.wait(["done"])
        return []
    error, took_s = _failure(call)
    assert took_s < LIMIT_S + ALLOWANCE_S
    store.set("done", "1")
    return [type(error).__name__, str(error)]


@pytest.mark.parametrize("method", ["barrier", "broadcast_object_list"])
def test_what_travels_on_the_cpu_group_is_bounded(method: str, backend: dict[str, str]) -> None:
    """Given a rank that does not come, when another one waits at the barrier or for its objects, then it gets a
    CollectiveTimeout that names the call and that rank."""
    kind, text = run_ranks(_on_the_cpu_group, 2, method, env=backend)[0]
    assert kind == "CollectiveTimeout" and "group tp:0 CPU group" in text and f"number 2, {method}" in text, text
    assert "global rank 1 (process " in text, text


def _send_to_a_killed_rank(context: RankContext) -> list[str]:
    group = _group(context)
    if context.rank == 1:
        assert group.recv(torch.Size([3]), torch.float32).tolist() == [1.0] * 3
        os.kill(os.getpid(), signal.SIGKILL)
    group.send(torch.ones(3), dst=1)
    time.sleep(1.0)
    deadline_s = time.monotonic() + LIMIT_S + ALLOWANCE_S
    with pytest.raises(PeerLost) as raised:
        while time.monotonic() < deadline_s:
            group.send(torch.ones(8 * 2**20), dst=1)
            time.sleep(0.1)
    start_s = time.monotonic()
    group.destroy()
    assert time.monotonic() - start_s < _END_LIMIT_S
    return [str(raised.value)]


def test_sends_to_a_lost_rank_end_with_its_name(backend: dict[str, str]) -> None:
    """Given sends that return at once, when the receiver is killed, then a later send raises PeerLost with its name,
    and destroy does not wait for what nobody will receive."""
    (text,) = run_ranks(_send_to_a_killed_rank, 2, env=backend, expect_killed=[1])[0]
    assert re.search(r"group tp:0 .* 0>1, .*call number \d+, send .*global rank 1 \(process \d+ on ", text), text


# --- what is refused, and what is off ---


def _every_call(group: CommunicatorFL) -> dict[str, Callable[[], object]]:
    """Each public method that would call a peer, on tensors of the group's device."""
    size, vector = group.world_size, torch.ones(2)
    return {
        "all_reduce": lambda: group.all_reduce(vector),
        "all_reduce_new": lambda: group.all_reduce_new(vector),
        "quant_all_reduce": lambda: group.quant_all_reduce(vector),
        "reduce_scatter": lambda: group.reduce_scatter(vector, [vector] * size),
        "reduce_scatter_tensor": lambda: group.reduce_scatter_tensor(torch.ones(1), torch.ones(size)),
        "reduce_scatterv": lambda: group.reduce_scatterv(torch.ones(size)),
        "all_gather": lambda: group.all_gather(vector),
        "all_gather_into_tensor": lambda: group.all_gather_into_tensor(torch.ones(2 * size), vector),
        "all_gatherv": lambda: group.all_gatherv(vector),
        "gather": lambda: group.gather(vector),
        "broadcast": lambda: group.broadcast(vector),
        "broadcast_object_list": lambda: group.broadcast_object_list([1]),
        "broadcast_tensor_dict": lambda: group.broadcast_tensor_dict({"a": vector}),
        "send": lambda: group.send(vector),
        "recv": lambda: group.recv(torch.Size([2]), torch.float32),
        "isend": lambda: group.isend(vector, 1 - group.rank_in_group),
        "send_tensor_dict": lambda: group.send_tensor_dict({"a": vector}),
        "recv_tensor_dict": group.recv_tensor_dict,
        "barrier": group.barrier,
    }


def _refused(context: RankContext, first: str) -> dict[str, str]:
    """What each call raises after rank 1 was killed or came to no call of the group any more."""
    group, store = _group(context), context.store("done")
    group.all_reduce(torch.ones(1))
    group.barrier()
    if context.rank == 1 and first == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if context.rank == 1:
        store.get("done")
        return {}
    calls = _every_call(group)
    if first == "destroyed":
        group.destroy()
    else:
        _failure(calls["all_reduce" if first == "killed" else first])
    errors = {name: _failure(call)[0] for name, call in calls.items()}
    store.set("done", "1")
    return {name: f"{type(error).__name__}: {error}" for name, error in errors.items()}


@pytest.mark.parametrize("first", ["killed", "all_reduce", "barrier", "recv"])
def test_a_group_that_has_failed_refuses_every_call(first: str, backend: dict[str, str]) -> None:
    """Given a group whose rank was lost or did not come to a call, when any method is called, then it raises that one
    call's error."""
    errors, *_ = run_ranks(_refused, 2, first, env=backend, expect_killed=[1] if first == "killed" else [])
    kind, called = ("PeerLost", "all_reduce") if first == "killed" else ("CollectiveTimeout", first)
    named = re.compile(rf"{kind}: group tp:0 .*: call number \d+, {called} .*global rank 1 ")
    assert [name for name, text in errors.items() if not named.match(text)] == [], errors


def test_a_group_that_is_destroyed_refuses_every_call(backend: dict[str, str]) -> None:
    """Given a group that is destroyed, when any method is called, then it says so."""
    errors, _ = run_ranks(_refused, 2, "destroyed", env=backend)
    assert set(errors.values()) == {"CommError: group tp:0 is destroyed; make a new one"}


def _unrecorded(context: RankContext) -> list[object]:
    group, store = _group(context), context.store("done")
    assert group.recorders() == ()
    group.all_reduce(torch.ones(1))
    if context.rank == 1:
        store.wait(["done"])
        return []
    error, took_s = _failure(group.all_reduce, torch.ones(1))
    store.set("done", "1")
    return [type(error).__name__, str(error), took_s]


def test_without_recording_torch_keeps_its_limit() -> None:
    """Given comm.record off, when a rank does not come, then torch's call ends at the limit with what torch says."""
    env = {"SGLANG_FL_DIST_BACKEND": "torch", "FLAGCX_PATH": "", "SGLANG_FL_COMM_RECORD": "0"}
    kind, text, took_s = run_ranks(_unrecorded, 2, env=env)[0]
    assert (kind, text) == ("CommError", f"torch.distributed: not done within {LIMIT_S:g} s")
    assert LIMIT_S <= took_s < LIMIT_S + ALLOWANCE_S


# --- creation ---


def _slow_steps(context: RankContext) -> list[object]:
    """Rank 1 is stopped in the library's part of the creation."""
    if context.rank == 1:
        original = FlagCXCommunicator.create

        def late(*arguments: object, **named: object) -> FlagCXCommunicator:
            time.sleep(8.0)
            return original(*arguments, **named)  # type: ignore[arg-type]

        setattr(FlagCXCommunicator, "create", late)  # noqa: B010 - a method is replaced
    start_s = time.monotonic()
    with pytest.raises(AgreementError) as raised:
        _group(context, timeout_s=3.0)
    return [str(raised.value), time.monotonic() - start_s]


def test_the_limit_of_creation_is_for_all_its_steps(hostcx: Path) -> None:
    """Given a rank that is late in the library's step, when a group is made, then the other rank has an error that
    names it and the limit that was set, within that limit and two seconds, not within the limit of each step."""
    env = {"SGLANG_FL_DIST_BACKEND": "flagcx", "FLAGCX_PATH": str(hostcx)}
    text, took_s = run_ranks(_slow_steps, 2, env=env)[0]
    limit = r"within 3 s for all steps, of which this one had 0\.\d s left"
    assert re.search(rf"global rank\(s\) \[1\] did not reach 'create flagcx' {limit}", text), text
    assert took_s < 3.0 + ALLOWANCE_S


# --- end ---


def _destroy_beside_a_stopped_rank(context: RankContext) -> float:
    group, store = _group(context), context.store("done")
    group.all_reduce(torch.ones(1))
    if context.rank == 1:
        store.set("pid", str(os.getpid()))
        store.wait(["done"])
        group.destroy()
        return 0.0
    pid = int(store.get("pid"))
    os.kill(pid, signal.SIGSTOP)
    start_s = time.monotonic()
    group.destroy()
    group.destroy()
    took_s = time.monotonic() - start_s
    os.kill(pid, signal.SIGCONT)
    store.set("done", "1")
    return took_s


def test_destroy_beside_a_stopped_rank_is_bounded(backend: dict[str, str]) -> None:
    """Given a peer that is stopped, when a group is destroyed, twice, then it takes about five seconds at most."""
    assert run_ranks(_destroy_beside_a_stopped_rank, 2, env=backend)[0] < _END_LIMIT_S


class _StuckTransport(Transport):
    """A library whose destroy waits for ever; no real one here can be made to."""

    name = "stuck"
    capabilities = Capabilities(frozenset(Operation), frozenset(), frozenset(), frozenset({"cpu"}))

    def _nothing(self, *_: object) -> None:
        """Carries nothing."""

    all_reduce = all_gather = reduce_scatter = reduce = broadcast = gather = send = recv = _nothing  # type: ignore[assignment]

    def close(self) -> None:
        time.sleep(60)


def _stuck_destroy(context: RankContext) -> float:
    group = _group(context)
    group._device = _StuckTransport()
    start_s = time.monotonic()
    group.destroy()
    return time.monotonic() - start_s


def test_a_library_that_does_not_end_is_abandoned() -> None:
    """Given a library whose destroy does not return, when the group is destroyed, then it is abandoned after about five
    seconds, and the process ends."""
    took = run_ranks(_stuck_destroy, 2, env={"SGLANG_FL_DIST_BACKEND": "torch", "FLAGCX_PATH": ""})
    assert all(4.5 < took_s < 15.0 for took_s in took), took


_ENDS = """
import time, torch, torch.distributed as dist
from sglang_fl.comm import CommunicatorFL
store = dist.TCPStore("127.0.0.1", {port}, is_master={rank} == 0)
dist.init_process_group("gloo", store=store, rank={rank}, world_size=2)
world = dist.group.WORLD
group = CommunicatorFL(cpu_group=world, device_group=world, device="cpu", ranks=[0, 1], name="tp:0")
group.all_reduce(torch.ones(1))
dist.barrier()
print(time.time(), flush=True)
"""


def test_a_clean_end_is_quick_and_quiet(backend: dict[str, str]) -> None:
    """Given programs that end without destroying anything, when the interpreters exit, then no thread of the monitor
    delays them, the codes are 0, and nothing is written."""
    probe = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = probe.port
    del probe
    environment = {**os.environ, **backend, "HOSTCX_QUIET": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", _ENDS.format(port=port, rank=rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for program in programs:
        output, errors = program.communicate(timeout=90)
        assert program.returncode == 0, errors
        assert "sglang_fl" not in errors and "Traceback" not in errors, errors
        assert time.time() - float(output) < 10.0


def test_nothing_is_watched_before_there_is_a_group() -> None:
    """Given this process, which has no group, when the monitor is asked, then it watches nothing and has no thread."""
    assert MONITOR.watched() == []


def _told_kinds(context: RankContext) -> str:
    group = _group(context)
    group.all_reduce(torch.ones(1))
    if context.rank == 1:
        raise KeyError("planted")
    error, _ = _failure(group.all_reduce, torch.ones(1))
    assert isinstance(error, CollectiveTimeout | PeerLost)
    return str(error)


def test_an_exception_is_told_from_a_kill(backend: dict[str, str]) -> None:
    """Given a rank that raises, when the other one calls, then the error says that the rank ended by itself."""
    from sglang_fl.testing.ranks import RanksFailed

    with pytest.raises(RanksFailed) as raised:
        run_ranks(_told_kinds, 2, env=backend)
    assert [failure.rank for failure in raised.value.failures] == [1]
    assert "ended by itself; its log may hold an error" in raised.value.results[0]


# --- a rank that ended after its part ---


def _does_its_part(context: RankContext, ends: str) -> tuple[object, str]:
    """Rank 2 gathers to rank 0 and ends, long before rank 1 comes; then the others reduce without it."""
    group = _group(context, operation_timeout_s=40.0)
    group.all_reduce(torch.ones(1))
    if context.rank == 1:
        while PROCESSES[2].state() is not State.GONE:
            time.sleep(0.05)
        time.sleep(4.5)  # longer than a call goes on after a rank that is missing from it
    gathered = group.gather(torch.tensor([float(context.rank)]), dst=0)
    if context.rank == 2 and ends == "destroys":
        group.destroy()
        return None, ""
    if context.rank == 2:
        multiprocessing.util._exit_function()  # the end in good order, of a process that had no time to destroy
        os.kill(os.getpid(), signal.SIGKILL)
    error, _ = _failure(group.all_reduce, torch.ones(1))
    store = context.store("failed")
    store.set(str(context.rank), "")
    store.wait(["0", "1"])
    return gathered if gathered is None else gathered.tolist(), f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("ends", ["destroys", "exits"])
def test_a_rank_that_ended_after_its_part_is_not_missing(ends: str) -> None:
    """Given a rank that has done its part of a gather and has ended, when another one is late, then the gather
    completes; from the next call it is missing."""
    killed = [2] if ends == "exits" else []
    env = {"SGLANG_FL_DIST_BACKEND": "torch"}
    results = run_ranks(_does_its_part, 3, ends, env=env, expect_killed=killed)
    (gathered, first), (_, second) = results[:2]
    assert gathered == [0.0, 1.0, 2.0]
    for text in (first, second):
        assert re.match(r"PeerLost: group tp:0 torch, .*: call number 3, all_reduce .*: global rank 2 ", text), text


# --- what an enemy found ---


def _destroy_under_way(context: RankContext) -> tuple[str, float]:
    communicator = _group(context)
    communicator.all_reduce(torch.ones(4))
    if context.rank == 1:
        time.sleep(3 * LIMIT_S)
        return "slept", 0.0
    threading.Timer(0.5, communicator.destroy).start()
    start_s = time.monotonic()
    with pytest.raises(CommError) as raised:
        communicator.all_reduce(torch.ones(4))
    return type(raised.value).__name__, time.monotonic() - start_s


def test_a_call_of_a_group_that_is_destroyed_meanwhile_ends_at_its_limit(
    backend: dict[str, str], tmp_path: Path
) -> None:
    """Given a call whose peer never comes, when another thread destroys the group, then the call ends in time."""
    env = {**backend, "SGLANG_FL_COMM_DUMP_DIR": str(tmp_path / "dumps")}
    (kind, took_s), _ = run_ranks(_destroy_under_way, 2, env=env)
    assert kind in ("CollectiveTimeout", "PeerLost", "CommError")
    assert took_s < LIMIT_S + ALLOWANCE_S


def _killed_at_once(context: RankContext, call: str) -> str:
    communicator = _group(context)
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CommError) as raised:
        {
            "barrier": communicator.barrier,
            "objects": lambda: communicator.broadcast_object_list([1], 1),
            "dict": lambda: communicator.broadcast_tensor_dict(None, 1),
        }[call]()
    return str(raised.value)


@pytest.mark.parametrize("call", ["barrier", "objects", "dict"])
def test_a_peer_that_dies_right_after_creation_is_named(call: str, backend: dict[str, str], tmp_path: Path) -> None:
    """Given a rank that is killed as soon as the group is made, when the CPU side is called, then it is named."""
    env = {**backend, "SGLANG_FL_COMM_DUMP_DIR": str(tmp_path / "dumps")}
    with pytest.raises(RanksFailed) as raised:
        run_ranks(_killed_at_once, 2, call, env=env)
    text = str(raised.value.results[0])
    assert "group " in text and "call number 1" in text, text
    assert "global rank 1 (process " in text and "was killed or crashed" in text, text


def _two_threads(context: RankContext) -> list[list[float]]:
    """In another order on each rank, as threads come."""
    groups = [_group(context) for _ in range(2)]
    wrong: list[list[float]] = []

    def use(number: int) -> None:
        for turn in range(200):
            value = groups[number].all_reduce(torch.full((4,), float(10**number * (context.rank + 1) * (turn + 1))))
            if value.tolist() != [3.0 * 10**number * (turn + 1)] * 4:
                wrong.append(value.tolist())

    threads = [threading.Thread(target=use, args=(number,)) for number in (context.rank, 1 - context.rank)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def test_groups_of_the_same_ranks_in_threads_of_their_own_do_not_mix(backend: dict[str, str]) -> None:
    """Given two groups of the same ranks, when a thread uses each, then every value is of its own group."""
    assert run_ranks(_two_threads, 2, env=backend) == [[], []]


_SIGNALLED = """
import os, signal, sys, time
from sglang_fl.comm.communicator import dump_on_signal
from sglang_fl.comm.monitor import MONITOR
from pathlib import Path
MONITOR.dump_folder = Path(sys.argv[1]) / "dumps"
dump_on_signal()
os.kill(os.getpid(), signal.SIGUSR1)
until = time.monotonic() + 20
while not list(MONITOR.dump_folder.glob("*.json")) and time.monotonic() < until:
    time.sleep(0.05)
print(len(list(MONITOR.dump_folder.glob("*.json"))))
"""


def test_sigusr1_before_any_group_writes_the_stacks(tmp_path: Path) -> None:
    """Given a process that has no group yet, when it gets SIGUSR1, then it lives and writes a dump."""
    command = [sys.executable, "-c", _SIGNALLED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1"
