"""From creation to the process's end: who is missing, barrier, destroy, deletion, exit, groups used in turn."""

from __future__ import annotations

import gc
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sglang_fl.comm.agreement import agree
from sglang_fl.comm.backends.flagcx import FlagCXCommunicator
from sglang_fl.comm.backends.flagcx.transport import FlagCXBackend
from sglang_fl.comm.backends.torch_dist import TorchBackend
from sglang_fl.comm.communicator import CommunicatorFL, group_context
from sglang_fl.comm.discovery import discover_backends
from sglang_fl.comm.errors import AgreementError, CommError
from sglang_fl.comm.monitor import MONITOR
from sglang_fl.comm.policy import communicator_policy
from sglang_fl.comm.types import GroupContext, Transport
from sglang_fl.config import load_settings
from sglang_fl.devices import detect_platform
from sglang_fl.selection import Kind
from sglang_fl.testing.ranks import FailureKind, RankContext, RanksFailed, run_ranks
from tests.distributed.groups import call_everything, communicator_of_all, group_of, world

MIB = 2**20
ENDLESS_S = 20.0


# --- creation ---


def _absent(context: RankContext, absent: int, ends: bool) -> str:
    group = dist.new_group([0, 1], backend="gloo")
    store = context.store("done")
    if context.rank == absent:
        if not ends:
            store.wait(["done"])
        return ""
    start = time.monotonic()
    with pytest.raises(AgreementError) as raised:
        CommunicatorFL(cpu_group=group, device_group=group, device="cpu", ranks=[0, 1], name="tp:0", timeout_s=1.0)
    assert time.monotonic() - start < ENDLESS_S
    store.set("done", "1")
    return str(raised.value)


@pytest.mark.parametrize(("absent", "ends"), [(1, False), (1, True), (0, False)])
def test_a_rank_that_never_arrives_is_named(absent: int, ends: bool) -> None:
    """Case 26. Given a peer without the plugin, or gone, be it the group's first rank or its last, when a rank makes a
    communicator, then an error after the limit names group, stage, this rank and the peer."""
    here = 1 - absent
    text = run_ranks(_absent, 2, absent, ends)[here]
    assert f"group tp:0, global rank {here} of [0, 1]: global rank(s) [{absent}] did not reach 'announce candi" in text
    assert "within 1 s" in text


def _die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _dies_in_creation(context: RankContext, owner: type, method: str) -> str:
    if context.rank == 2:
        setattr(owner, method, _die)
    with pytest.raises(AgreementError) as raised:
        communicator_of_all(context, timeout_s=3.0)
    return str(raised.value)


@pytest.mark.parametrize(
    ("owner", "method"), [(FlagCXBackend, "create"), (FlagCXBackend, "probe"), (FlagCXCommunicator, "create")]
)
def test_a_rank_that_dies_in_creation_is_named(owner: type, method: str, hostcx: Path) -> None:
    """Case 26. Given a rank that is killed while it probes, creates or joins, when the others make the communicator,
    then each gets an error that names group, stage and that rank, and none hangs."""
    texts = run_ranks(
        _dies_in_creation, 3, owner, method, env={"FLAGCX_PATH": str(hostcx)}, expect_killed=[2], timeout_s=40.0
    )
    for rank, text in enumerate(texts[:2]):
        assert f"group tp:0, global rank {rank} of [0, 1, 2]: global rank(s) [2] did not reach '" in text


class _OwnError(Exception):
    """Of no kind that is foreseen."""


class _FailingBackend(TorchBackend):
    """A chip's backend that cannot be created."""

    def __init__(self, error: BaseException) -> None:
        super().__init__("torch", Kind.REFERENCE)
        self._error = error

    def create(self, context: GroupContext) -> Transport:
        """Raise the error."""
        raise self._error


def _made_again(context: RankContext, kind: type[BaseException]) -> tuple[str, float, list[str]]:
    """Rank 1 cannot create the group the first time; both make it again."""
    settings, ranks = load_settings(platform=detect_platform()), list(range(context.world_size))
    group = dist.new_group(ranks, backend="gloo")
    described = group_context(group, group, "cpu", ranks, "tp:0", settings, timeout_s=ENDLESS_S)
    backends = dict(discover_backends().backends)
    if context.rank == 1:
        backends["torch"] = _FailingBackend(kind("planted"))
    with pytest.raises((AgreementError, kind)) as raised:
        agree(described, backends, communicator_policy(settings))
    again = communicator_of_all(context, ENDLESS_S)
    total = float(again.all_reduce(torch.ones(1)).item())
    keys = {entry.key for entry in MONITOR.watched() if entry.recorder in again.recorders()}
    return f"{raised.type.__name__}: {raised.value}", total, sorted(keys)


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError, _OwnError, KeyboardInterrupt])
def test_a_group_can_be_made_again(kind: type[BaseException]) -> None:
    """Given a creation that one rank has left with an error, then the other rank hears of it at once, not at its limit;
    made again, the group works, and the ranks' monitors call each of its recorders the same."""
    results = run_ranks(_made_again, 2, kind, env={"SGLANG_FL_DIST_BACKEND": "torch"})
    (heard, *_), (own, *_) = results
    assert "global rank 1" in heard and f"{kind.__name__}: planted" in heard
    assert "planted" in own and "given up waiting" not in own
    assert [total for _, total, _ in results] == [2.0, 2.0]
    assert results[0][2] == results[1][2] != []


def _outside(context: RankContext) -> None:
    group = dist.new_group([0, 1], backend="gloo")
    if context.rank == 2:
        with pytest.raises(CommError, match=r"group tp:0: global rank 2 is not among its ranks \[0, 1\]"):
            CommunicatorFL(cpu_group=group, device_group=group, device="cpu", ranks=[0, 1], name="tp:0")
    dist.barrier()  # a rank that ends takes the connections of a group that its peer is still making along


def test_a_rank_outside_the_group() -> None:
    """Given a rank that is not in the group, when it makes the group's communicator, then it gets an error at once."""
    run_ranks(_outside, 3)


# --- use ---


def _barrier(context: RankContext) -> None:
    communicator, store = world(context), context.store("late")
    if context.rank == 1:
        time.sleep(0.3)
        store.set("late", "1")
    communicator.barrier()
    assert store.check(["late"])


def test_barrier_waits_for_all(backend: dict[str, str]) -> None:
    """Given a late rank, when all call barrier, then none returns before it has come."""
    run_ranks(_barrier, 3, env=backend)


def _in_turn(context: RankContext) -> None:
    layouts = {"tp": ([0, 1], [2, 3]), "pp": ([0, 2], [1, 3]), "dp": ([0, 1, 2, 3],)}
    mine = {
        name: next(found for found in [group_of(ranks, context) for ranks in groups] if found is not None)
        for name, groups in layouts.items()
    }
    for step in range(60):
        count = 1 << (step % 17)
        for number, communicator in enumerate(mine.values()):
            value = step * 3 + number
            reduced = communicator.all_reduce(torch.full((count + number,), float(value)))
            assert bool((reduced == value * communicator.world_size).all())
    for communicator in mine.values():
        call_everything(communicator)
        assert communicator.status()["calls"]["all_reduce"] == 61
        communicator.destroy()


def test_communicators_share_no_state(backend: dict[str, str]) -> None:
    """Case 28. Given TP, PP and DP communicators in one process, when they are used in turn with different sizes,
    then each has its own values and its own counts."""
    run_ranks(_in_turn, 4, env=backend)


def _bounded(context: RankContext) -> None:
    communicator, limit = world(context), 2 * MIB
    communicator._sends.limit_bytes = limit
    if context.rank == 0:
        for number in range(12):
            communicator.send(torch.full((MIB,), number, dtype=torch.uint8), dst=1)
            assert communicator.status()["send_bytes_held"] <= limit
        communicator.send(torch.full((3 * MIB,), 99, dtype=torch.uint8), dst=1)  # larger than the limit: goes alone
        communicator.destroy()
        return
    time.sleep(0.3)  # let the sends run into the limit
    for number in range(12):
        assert bool((communicator.recv(torch.Size([MIB]), torch.uint8) == number).all())
    assert bool((communicator.recv(torch.Size([3 * MIB]), torch.uint8) == 99).all())


def test_memory_held_for_sends_is_bounded(backend: dict[str, str]) -> None:
    """Given many sends that nobody has received, when their bytes reach the limit, then the next one waits, and what
    is held stays within it."""
    run_ranks(_bounded, 2, env=backend)


# --- end ---


def _destroy_twice(context: RankContext) -> None:
    first, second = (communicator_of_all(context) for _ in range(2))
    call_everything(first)
    first.destroy()
    first.destroy()
    with pytest.raises(CommError, match="group tp:0 is destroyed; make a new one"):
        first.all_reduce(torch.ones(1))
    call_everything(second)  # of the same ranks: it may share what is underneath
    second.destroy()
    second.destroy()
    third = communicator_of_all(context)
    call_everything(third)
    third.destroy()


def test_destroy_is_idempotent_and_local_to_its_communicator(backend: dict[str, str]) -> None:
    """Case 18. Given two communicators of the same ranks, when one is destroyed, twice, then it refuses every
    call, the other still works, and a third can be made."""
    run_ranks(_destroy_twice, 3, env=backend)


def _raises_on_one_rank(context: RankContext) -> str:
    communicator = world(context)
    call_everything(communicator)
    communicator.destroy()
    if context.rank == 1:
        raise KeyError("planted")
    return "done"


def _left_behind(context: RankContext) -> None:
    never_destroyed, dropped, other = world(context), world(context), communicator_of_all(context)
    call_everything(dropped)
    if context.rank == 0:
        del dropped
        gc.collect()
    CommunicatorFL.__new__(CommunicatorFL)
    with pytest.raises(CommError):
        CommunicatorFL(cpu_group=None, device_group=None, device="cpu", ranks=[5], name="half")  # type: ignore[arg-type]
    gc.collect()
    call_everything(other)
    call_everything(never_destroyed)
    dist.barrier()


def test_the_interpreter_ends_well(backend: dict[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    """Case 18. Given a communicator deleted on one rank only, some half built, some never destroyed, when fresh
    interpreters end, then they do so without a crash, a hang, or an exception that Python had to ignore."""
    run_ranks(_left_behind, 2, env={**backend, "HOSTCX_QUIET": "1"}, start_method="spawn")
    errors = capfd.readouterr().err
    assert "Exception ignored" not in errors and "Traceback" not in errors, errors


def test_an_error_on_one_rank_ends_that_rank_only(backend: dict[str, str]) -> None:
    """Case 18. Given ranks with communicators, when one raises, then it ends with its error within the launcher's five
    seconds, and the other with its result."""
    with pytest.raises(RanksFailed) as raised:
        run_ranks(_raises_on_one_rank, 2, env=backend, start_method="spawn")
    assert [(failure.rank, failure.kind) for failure in raised.value.failures] == [(1, FailureKind.RAISED)]
    assert raised.value.results[0] == "done"


def _alone(context: RankContext) -> None:
    communicator = world(context)
    tensor = torch.arange(6.0).view(2, 3)
    kept = tensor.clone()
    assert communicator.all_reduce(tensor) is tensor
    assert communicator.all_gather(tensor) is tensor
    assert communicator.gather(tensor) is tensor
    assert communicator.broadcast(tensor) is tensor
    outputs = [torch.zeros(2, 3)]
    communicator.all_gather(tensor, output_tensor_list=outputs)
    assert torch.equal(outputs[0], kept)
    assert torch.equal(communicator.all_gather_into_tensor(torch.zeros(6), tensor).view(2, 3), kept)
    assert torch.equal(communicator.all_gatherv(tensor, [2])[0], kept)
    assert torch.equal(communicator.reduce_scatter(torch.zeros(2, 3), [tensor]), kept)
    assert torch.equal(communicator.reduce_scatter_tensor(torch.zeros(6), tensor).view(2, 3), kept)
    assert torch.equal(communicator.reduce_scatterv(tensor), kept)
    assert communicator.broadcast_object_list([1, 2]) == [1, 2]
    with communicator.graph_capture():
        communicator.barrier()
    assert torch.equal(tensor, kept)
    communicator.destroy()
    communicator.destroy()


def test_a_group_of_one(backend: dict[str, str]) -> None:
    """Case 18. Given a group of one rank, when every operation is called, then each gives what it was given."""
    run_ranks(_alone, 1, env=backend)
