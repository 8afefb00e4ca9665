"""How SGLang's schedulers hand requests to each other, recorded and watched: SGLang's own functions on real ranks."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from sglang.srt.distributed.device_communicators.shm_broadcast import MessageQueue
from sglang.srt.utils.common import broadcast_pyobj, point_to_point_pyobj

from sglang_fl.comm.errors import PeerLost
from sglang_fl.comm.monitor import EXIT_CODE, MONITOR
from sglang_fl.sglang_hooks import shared_memory
from sglang_fl.sglang_hooks.registration import misfits
from sglang_fl.sglang_hooks.requests import Requests
from sglang_fl.testing.ranks import FailureKind, RankContext, RanksFailed, run_ranks
from tests.distributed.groups import communicator_of_all

LIMIT_S = 2.0
REQUESTS = [{"text": "hello"}, 7]


class Exchange:
    """SGLang's two functions as they are with the hooks."""

    def __init__(self) -> None:
        self.requests = Requests(lambda: LIMIT_S)
        self._broadcast, self._transfer = self.requests.hooks()

    def broadcast(self, data: list[Any], rank: int, group: Any, src: int) -> Any:
        """As the scheduler calls it."""
        return self._broadcast.function(broadcast_pyobj, data, rank, group, src=src)

    def transfer(self, data: list[Any], rank: int, group: Any, src: int, dst: int, async_send: bool) -> Any:
        """As the scheduler of a pipeline calls it."""
        return self._transfer.function(point_to_point_pyobj, data, rank, group, src, dst, async_send=async_send)

    def operations(self) -> dict[str, list[str]]:
        """What is recorded, by recorder."""
        return {one.name: [call.operation for call in one.calls()] for one in self.requests.recorders()}


def exchange_all(context: RankContext) -> dict[str, list[str]]:
    """Requests, none, and transfers with and without waiting."""
    exchange, rank = Exchange(), context.rank
    group = dist.new_group(list(range(context.world_size)), backend="gloo")
    assert exchange.broadcast(REQUESTS if rank == 1 else [], rank, group, src=1) == REQUESTS
    assert exchange.broadcast([], rank, group, src=0) == []
    alone = [dist.new_group([one], backend="gloo") for one in range(context.world_size)]
    assert exchange.broadcast(REQUESTS, rank, alone[rank], src=rank) == REQUESTS
    for async_send in (False, True):
        received = exchange.transfer(REQUESTS if rank == 0 else [], rank, group, 0, 1, async_send)
        if rank == 0:
            assert len(received) == (2 if async_send else 0)
            for work in received:
                work.work.wait()
        else:
            assert received == (REQUESTS if rank == 1 else [])
    return exchange.operations()


def test_exchanges_give_what_they_gave_and_are_recorded() -> None:
    """Given three ranks, then SGLang's results are unchanged, and each rank's record has what it took part in."""
    broadcasts = {"requests of [0, 1, 2]": ["broadcast of requests"] * 2}
    first, second, third = run_ranks(exchange_all, 3)
    assert first == {**broadcasts, "requests 0>1": ["send"] * 2}
    assert second == {**broadcasts, "requests 0>1": ["recv"] * 2}
    assert third == broadcasts


def lose(context: RankContext, number: int) -> str:
    """Rank 1 gets a signal between two exchanges; what the others are told. In a server there is a group before."""
    exchange, rank = Exchange(), context.rank
    communicator = communicator_of_all(context)
    context.directory.chmod(0o700)
    MONITOR.dump_folder = context.directory
    group = dist.new_group(list(range(context.world_size)), backend="gloo")
    exchange.broadcast([], rank, group, src=1)
    start_s = time.monotonic()
    if rank == 1:
        os.kill(os.getpid(), number)
    with pytest.raises(PeerLost) as raised:
        exchange.broadcast([], rank, group, src=1)
    assert time.monotonic() - start_s < LIMIT_S + 2
    communicator.destroy()
    return str(raised.value)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_scheduler_that_was_killed_is_named(world_size: int) -> None:
    """Given the source of the requests killed, then each other rank raises an error that names it, in time."""
    texts = run_ranks(lose, world_size, signal.SIGKILL, expect_killed=[1])
    for rank in (rank for rank in range(world_size) if rank != 1):
        assert re.search(r"global rank 1 \(process \d+ on \S+\) (was killed|has ended)", texts[rank]), texts[rank]
        assert f"group requests of {list(range(world_size))}" in texts[rank]


def test_a_wait_for_a_stopped_scheduler_ends_the_process(capfd: pytest.CaptureFixture[str]) -> None:
    """Given the source stopped, then the other rank, inside gloo's call, ends with code 71 and says who is stopped."""
    start_s = time.monotonic()
    with pytest.raises(RanksFailed) as raised:
        run_ranks(lose, 2, signal.SIGSTOP, timeout_s=30)
    # The launcher gives the stopped one five seconds after the first has failed.
    assert time.monotonic() - start_s < LIMIT_S + 2 + 5 + 5
    ended = next(failure for failure in raised.value.failures if failure.rank == 0)
    assert ended.kind is FailureKind.EXITED and f"exited with code {EXIT_CODE} " in ended.text
    said = capfd.readouterr().err
    assert re.search(r"did not complete within 2 s: global rank 1 \(process \d+ on \S+\) is stopped", said), said


def queue(context: RankContext) -> tuple[str, list[Any]]:
    """SGLang's message queue among the ranks, its name removed as soon as all are ready."""
    (hook,) = shared_memory.hooks()
    group = dist.new_group(list(range(context.world_size)), backend="gloo")
    made = MessageQueue.create_from_process_group(group, 1 << 16, 4)
    name = made.buffer.shared_memory.name
    hook.function(None, made)
    dist.barrier(group=group)
    assert not Path("/dev/shm", name).exists()
    received = [made.broadcast_object(data if context.rank == 0 else None) for data in ("one", {"two": 2})]
    dist.barrier(group=group)
    del made
    return name, received


def test_a_message_queue_works_without_a_name_in_dev_shm() -> None:
    """Given SGLang's message queue, when its name is removed, then objects still arrive, and nothing is left."""
    results = run_ranks(queue, 3)
    assert {name for name, _ in results} == {results[0][0]}
    assert all(received == ["one", {"two": 2}] for _, received in results)


def test_the_hooks_fit_sglang() -> None:
    """Given the installed SGLang, then the hooked functions exist and take what the hooks take."""
    assert misfits([*Requests(lambda: 1.0).hooks(), *shared_memory.hooks()]) == []
    assert "sglang" in sys.modules
