"""GPU time of one call inside a CUDA graph and host time of one call, PyTorch's and FlagGems' in turn."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

# Its classes are not typed.
_cuda: Any = torch.cuda
Run = Callable[[], Any]
Context = Callable[[], AbstractContextManager[None]]
Side = tuple[Run, Context]
# One capture holds as many calls, so that the start of a replay does not count.
_CALLS_IN_GRAPH = 50
_WARM_UP_CALLS = 3
_HOST_CALLS, _HOST_ROUNDS = 20, 5
_LEAST_PAIRS, _MOST_PAIRS = 9, 41
_SECONDS_FOR_PAIRS = 0.15


@dataclass(frozen=True)
class Times:
    """Microseconds a call; ``ratio`` is the median of FlagGems' over PyTorch's, pair by pair.

    how: ``graph``, or ``eager`` where PyTorch's own call cannot be captured: between events, host time included; or
        ``empty`` where the result has no elements and nothing runs.
    spread: a quarter of the pairs have a ratio below, a quarter above these two.
    """

    how: str
    torch_us: float
    gems_us: float
    ratio: float
    spread: tuple[float, float]
    pairs: int
    torch_host_us: float
    gems_host_us: float


NOT_TIMED = "not timed"
UNTIMED = Times(NOT_TIMED, math.nan, math.nan, math.nan, (math.nan, math.nan), 0, math.nan, math.nan)
NOTHING_RUNS = Times("empty", 0.0, 0.0, 1.0, (1.0, 1.0), 0, 0.0, 0.0)


class CaptureError(RuntimeError):
    """FlagGems' call cannot be captured in a CUDA graph where PyTorch's can."""


def measure(call: Run, replaced: Context) -> Times:
    """Time ``call`` as it is and inside ``replaced()``, under which the same call reaches FlagGems.

    Raises:
        CaptureError: see there.
    """
    host = _host_times(call, replaced)
    own = _capture(call)
    if own is None:
        run = _eager(call)
        return _pairs("eager", (run, nullcontext), (run, replaced), host)
    with replaced():
        other = _capture(call)
    if other is None:
        raise CaptureError("cannot be captured in a CUDA graph; PyTorch's own can")
    return _pairs("graph", (own.replay, nullcontext), (other.replay, nullcontext), host)


def _capture(call: Run) -> torch.cuda.CUDAGraph | None:
    graph = torch.cuda.CUDAGraph()
    stream = _cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP_CALLS):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph):
            for _ in range(_CALLS_IN_GRAPH):
                call()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph


def _eager(call: Run) -> Run:
    def run() -> None:
        for _ in range(_CALLS_IN_GRAPH):
            call()

    return run


def _pairs(how: str, own: Side, other: Side, host: tuple[float, float]) -> Times:
    for side in (own, other):
        _time_us(side)
    once = _time_us(own) + _time_us(other)
    pairs = min(_MOST_PAIRS, max(_LEAST_PAIRS, int(_SECONDS_FOR_PAIRS * 1e6 / max(once, 1.0))))
    taken: list[tuple[float, float]] = []
    for place in range(pairs):
        # Each goes first as often as second.
        if place % 2:
            later, sooner = _time_us(other), _time_us(own)
            taken.append((sooner, later))
        else:
            taken.append((_time_us(own), _time_us(other)))
    ratios = sorted(second / first for first, second in taken)
    quarter = len(ratios) // 4
    return Times(
        how,
        statistics.median(first for first, _ in taken) / _CALLS_IN_GRAPH,
        statistics.median(second for _, second in taken) / _CALLS_IN_GRAPH,
        statistics.median(ratios),
        (ratios[quarter], ratios[-1 - quarter]),
        pairs,
        *host,
    )


def _time_us(side: Side) -> float:
    run, context = side
    with context():
        start, end = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def _host_times(call: Run, replaced: Context) -> tuple[float, float]:
    own, other = [], []
    for _ in range(_HOST_ROUNDS):
        own.append(_host_us(call))
        with replaced():
            other.append(_host_us(call))
    return statistics.median(own), statistics.median(other)


def _host_us(call: Run) -> float:
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(_HOST_CALLS):
        call()
    taken = time.perf_counter() - start
    torch.cuda.synchronize()
    return taken / _HOST_CALLS * 1e6
