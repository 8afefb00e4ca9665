"""Replays of captured graphs as calls that are recorded and watched: what a graph holds is called by no one else."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sglang_fl.comm.captures import CAPTURES
from sglang_fl.comm.dumps import include, known_recorders
from sglang_fl.comm.limits import checked_limit
from sglang_fl.comm.marks import raw_stream_of
from sglang_fl.comm.monitor import MONITOR
from sglang_fl.comm.recorder import Recorder
from sglang_fl.comm.ring import CallRing

_REPLAY = "_sglang_fl_replay"
_CAPTURE = "_sglang_fl_capture"


@dataclass
class _Capture:
    """A capture under way: what keeps the monitor from the device, and each recorder's calls before it."""

    open: ExitStack
    entered: dict[Recorder, int]


@dataclass(frozen=True)
class _Replay:
    """What a graph's replay is recorded as."""

    ring: CallRing
    operation: str
    count: int
    stream: Callable[[], int]


@dataclass(eq=False)
class GraphReplays:
    """The graphs of this process that hold calls of groups.

    The replays of all graphs with calls of one recorder are recorded under its name and ranks: ``tp:0 flagcx graphs``.
    Where a graph has calls of several, the one with the most ranks counts. A rank replays its graphs in the same order
    as the others do, since it would hang otherwise, and has captured them in the same order.

    Attributes:
        limit_s: how long a replay may take, seconds.
    """

    key: ClassVar[str] = ""  # a replay that cannot complete ends the process
    limit_s: Callable[[], float]
    _rings: dict[tuple[str, tuple[int, ...]], CallRing] = field(default_factory=dict)
    _graphs: Counter[tuple[str, tuple[int, ...]]] = field(default_factory=Counter)

    def recorders(self) -> tuple[Recorder, ...]:
        """For the monitor and the dumps."""
        return tuple(self._rings.values())

    def operation_limit_s(self) -> float:
        """For the monitor."""
        return self.limit_s()

    def capture_begin(self, original: Callable[..., None], graph: Any, *arguments: Any, **named: Any) -> None:
        """Around ``torch.cuda.CUDAGraph.capture_begin``."""
        with ExitStack() as stack:
            stack.enter_context(CAPTURES.capture())
            original(graph, *arguments, **named)
            entered = {recorder: recorder.entered() for recorder in known_recorders()}
            setattr(graph, _CAPTURE, _Capture(stack.pop_all(), entered))

    def capture_end(self, original: Callable[..., None], graph: Any) -> None:
        """Around ``torch.cuda.CUDAGraph.capture_end``."""
        capture: _Capture | None = graph.__dict__.pop(_CAPTURE, None)
        if capture is None:
            original(graph)
            return
        with capture.open:
            original(graph)
        replay = self._replay_of(capture)
        if replay is not None:
            setattr(graph, _REPLAY, replay)

    def replay(self, original: Callable[..., None], graph: Any) -> None:
        """Around ``torch.cuda.CUDAGraph.replay``.

        Raises:
            CommError: the monitor has found that a call cannot complete, and no further one may be made.
        """
        found: _Replay | None = graph.__dict__.get(_REPLAY)
        if found is None:
            original(graph)
            return
        row = found.ring.enter(found.operation, None, found.count, None, found.stream())
        try:
            original(graph)
        except BaseException as error:
            told = found.ring.failed(row, error)
            if told is error:
                raise
            raise told from error
        found.ring.leave(row)

    def _replay_of(self, capture: _Capture) -> _Replay | None:
        ranges = {
            recorder: (before + 1, recorder.entered())
            for recorder, before in ((one, capture.entered.get(one, 0)) for one in known_recorders())
            if not isinstance(recorder, CallRing) or recorder not in self._rings.values()
        }
        held = [recorder for recorder, (first, last) in ranges.items() if last >= first]
        if not held:
            return None
        widest = min(held, key=lambda recorder: (-len(recorder.ranks), recorder.name))
        ring = self._ring(widest)
        key = (widest.name, widest.ranks)
        self._graphs[key] += 1
        first, last = ranges[widest]
        operation = f"replay of graph {self._graphs[key]}, calls {first} to {last}"
        return _Replay(ring, operation, last - first + 1, raw_stream_of(widest.device))

    def _ring(self, recorder: Recorder) -> CallRing:
        key = (recorder.name, recorder.ranks)
        if not self._rings:
            include(self)
            MONITOR.watch(self)
        if key not in self._rings:
            self._rings[key] = CallRing(f"{recorder.name} graphs", recorder.ranks, recorder.device)
            MONITOR.notice(self._rings[key], self.limit_s())
        return self._rings[key]


_watching: GraphReplays | None = None


def watch_graphs(limit_s: float = 600.0) -> GraphReplays:
    """Record and watch the replays of CUDA graphs that are captured from now on, in a script without SGLang.

    Replaces three methods of ``torch.cuda.CUDAGraph`` in this process; idempotent. A replay that is not done within
    ``limit_s`` seconds ends the process with code 71, as any call on a device.

    Raises:
        ValueError: the limit is no number of seconds from a millisecond to a year.
    """
    global _watching
    checked_limit("limit_s", limit_s)
    if _watching is None:
        import torch

        _watching = replays = GraphReplays(lambda: limit_s)
        for name, hook in methods(replays).items():
            setattr(torch.cuda.CUDAGraph, name, _around(getattr(torch.cuda.CUDAGraph, name), hook))
    return _watching


def methods(replays: GraphReplays) -> dict[str, Callable[..., None]]:
    """Method of ``torch.cuda.CUDAGraph`` to what goes around it: it is called with the method and its arguments."""
    return {"capture_begin": replays.capture_begin, "capture_end": replays.capture_end, "replay": replays.replay}


def _around(original: Callable[..., None], hook: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def method(graph: Any, *arguments: Any, **named: Any) -> None:
        hook(original, graph, *arguments, **named)

    return method
