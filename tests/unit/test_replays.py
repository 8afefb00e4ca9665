"""Replays of captured graphs are recorded calls. The graph is a stand-in; tests/gpu has CUDA's."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sglang_fl.comm.captures import CAPTURES
from sglang_fl.comm.dumps import dump_calls, include
from sglang_fl.comm.errors import CommError
from sglang_fl.comm.recorder import Recorder
from sglang_fl.comm.replays import GraphReplays, methods
from sglang_fl.comm.ring import CallRing
from sglang_fl.sglang_hooks.graphs import hooks
from sglang_fl.sglang_hooks.registration import misfits


class StandInGraph:
    """Takes the place of ``torch.cuda.CUDAGraph``, which a machine without a GPU cannot make."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.fault: Exception | None = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """Notes it."""
        self._do(f"begin {pool} {capture_error_mode}")

    def capture_end(self) -> None:
        """Notes it."""
        self._do("end")

    def replay(self) -> None:
        """Notes it."""
        self._do("replay")

    def _do(self, what: str) -> None:
        if self.fault is not None:
            raise self.fault
        self.done.append(what)


class Owner:
    """A group with one recorder, whose transport calls as it is told."""

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        self.ring = CallRing(name, ranks, torch.device("cpu"))
        include(self)

    def recorders(self) -> tuple[Recorder, ...]:
        """Of the group."""
        return (self.ring,)

    def call(self, count: int = 8) -> None:
        """An all_reduce."""
        self.ring.leave(self.ring.enter("all_reduce", torch.float32, count, captured=True))


@pytest.fixture
def replays(tmp_path: Path) -> Iterator[GraphReplays]:
    """As a process has them once torch.distributed is there."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield GraphReplays(lambda: 60.0)
    dist.destroy_process_group()


class Hooked:
    """A stand-in graph whose methods are hooked."""

    def __init__(self, replays: GraphReplays) -> None:
        self.graph = StandInGraph()
        self._hooks = methods(replays)

    def capture(self, *calls: Callable[[], None]) -> StandInGraph:
        """Capture what ``calls`` do."""
        self._hooks["capture_begin"](StandInGraph.capture_begin, self.graph, pool=5)
        try:
            for call in calls:
                call()
        finally:
            self._hooks["capture_end"](StandInGraph.capture_end, self.graph)
        return self.graph

    def replay(self) -> None:
        """Replay it."""
        self._hooks["replay"](StandInGraph.replay, self.graph)


def test_each_replay_is_one_call_that_names_the_calls_it_stands_for(replays: GraphReplays, tmp_path: Path) -> None:
    """Given three eager calls and two graphs of two and one calls, when they are replayed, then each replay is a
    recorded call of the group's ranks with graph and range, in the dump as well."""
    tp = Owner("tp:0 flagcx", (0, 1))
    for _ in range(3):
        tp.call()
    first, second = Hooked(replays), Hooked(replays)
    first.capture(tp.call, tp.call)
    second.capture(tp.call)
    for hooked in (first, second, first):
        hooked.replay()
    assert first.graph.done == ["begin 5 global", "end", "replay", "replay"]
    (ring,) = replays.recorders()
    assert (ring.name, ring.ranks) == ("tp:0 flagcx graphs", (0, 1))
    one, two = "replay of graph 1, calls 4 to 5", "replay of graph 2, calls 6 to 6"
    assert [(call.operation, call.count) for call in ring.calls()] == [(one, 2), (two, 1), (one, 2)]
    assert all(call.time_out_s is not None for call in ring.calls())
    tmp_path.chmod(0o700)
    recorders = json.loads(dump_calls("test", tmp_path).read_text())["recorders"]
    assert "tp:0 flagcx graphs" in [record["name"] for record in recorders]


def test_a_graph_without_calls_is_left_alone(replays: GraphReplays) -> None:
    """Given a graph in which no group was called, then its replay is no recorded call."""
    owner = Owner("tp:0 flagcx", (0, 1))
    hooked = Hooked(replays)
    hooked.capture()
    hooked.replay()
    assert hooked.graph.done[-1] == "replay"
    assert replays.recorders() == () and owner.ring.entered() == 0


def test_of_several_groups_the_one_with_the_most_ranks_names_the_graph(replays: GraphReplays) -> None:
    """Given a graph with calls of two groups, then the larger one's ranks are those that must replay it together."""
    pair, all_ranks = Owner("attention_tp:0 flagcx", (0, 1)), Owner("tp:0 flagcx", (0, 1, 2, 3))
    hooked = Hooked(replays)
    hooked.capture(pair.call, all_ranks.call, pair.call)
    hooked.replay()
    (ring,) = replays.recorders()
    assert (ring.name, ring.ranks) == ("tp:0 flagcx graphs", (0, 1, 2, 3))


def test_a_replay_is_under_way_until_it_returns_and_refused_after_a_verdict(replays: GraphReplays) -> None:
    """Given a replay inside the library, then it is what the monitor sees; once refused, none reaches the library."""
    tp = Owner("tp:0 flagcx", (0, 1))
    hooked = Hooked(replays)
    hooked.capture(tp.call)
    seen: list[str] = []
    (ring,) = replays.recorders()
    under_way = ring.under_way

    def look(graph: StandInGraph) -> None:
        call = under_way()
        assert call is not None
        seen.append(call.operation)

    methods(replays)["replay"](look, hooked.graph)
    assert seen == ["replay of graph 1, calls 1 to 1"] and under_way() is None
    ring.refuse("rank 1 is gone")
    with pytest.raises(CommError, match="rank 1 is gone"):
        hooked.replay()
    assert "replay" not in hooked.graph.done


def test_an_error_of_a_replay_is_recorded_and_raised_unchanged(replays: GraphReplays) -> None:
    """Given a replay that raises, then the same error comes out, and the record has it."""
    tp = Owner("tp:0 flagcx", (0, 1))
    hooked = Hooked(replays)
    hooked.capture(tp.call).fault = ValueError("no memory")
    with pytest.raises(ValueError, match="no memory") as raised:
        hooked.replay()
    assert raised.value is hooked.graph.fault
    (ring,) = replays.recorders()
    assert ring.calls()[-1].error == "ValueError: no memory"


@pytest.mark.parametrize("fault_at", ["never", "begin", "inside", "end"])
def test_the_monitor_keeps_off_the_device_during_a_capture_however_it_ends(
    replays: GraphReplays, fault_at: str
) -> None:
    """Given a capture, then no device call is allowed inside, and again afterwards, also when it fails."""
    hooked = Hooked(replays)
    fault = RuntimeError("capture failed")

    def inside() -> None:
        with CAPTURES.device_call() as allowed:
            assert not allowed
        if fault_at == "inside":
            raise fault
        if fault_at == "end":
            hooked.graph.fault = fault

    if fault_at == "begin":
        hooked.graph.fault = fault
    if fault_at == "never":
        hooked.capture(inside)
    else:
        with pytest.raises(RuntimeError) as raised:
            hooked.capture(inside)
        assert raised.value is fault
    with CAPTURES.device_call() as allowed:
        assert allowed


def test_a_capture_waits_for_the_monitors_device_call(replays: GraphReplays) -> None:
    """Given a device call of the monitor under way, then a capture begins when it has ended."""
    hooked = Hooked(replays)
    order: list[str] = []
    with CAPTURES.device_call() as allowed:
        assert allowed
        thread = threading.Thread(target=lambda: hooked.capture(lambda: order.append("captured")))
        thread.start()
        time.sleep(0.05)
        order.append("device call")
    thread.join(10)
    assert order == ["device call", "captured"]


def test_the_hooks_fit_torch() -> None:
    """Given the installed torch, then the hooked methods exist and take what the hooks take."""
    assert misfits(hooks(GraphReplays(lambda: 60.0))) == []
