"""Times as nccl-tests takes them: warm up, start together, no waiting between calls, the slowest rank counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
import torch.distributed as dist

from sglang_fl.comm.tools.bench_operations import Operation, Prepared
from sglang_fl.comm.tools.launch import Launch


class Mode(str, Enum):
    """How calls reach the device."""

    EAGER = "eager"
    GRAPH = "graph"


@dataclass(frozen=True)
class Result:
    """One operation, size, backend, mode and form.

    Attributes:
        operation, backend, mode, in_place: what was timed.
        count: elements, of each rank's share where there are shares.
        size_bytes, dtype, world_size: of the whole operation.
        samples_us: one time a cycle, of the slowest rank.
        wrong: wrong elements of all ranks.
    """

    operation: Operation
    backend: str
    mode: Mode
    in_place: bool
    count: int
    size_bytes: int
    dtype: str
    world_size: int
    samples_us: tuple[float, ...]
    wrong: int

    @property
    def time_us(self) -> float:
        """The median of the cycles."""
        return statistics.median(self.samples_us)

    @property
    def algorithm_gb_s(self) -> float:
        """Size over time, 1e9 bytes a second."""
        return self.size_bytes / self.time_us / 1e3

    @property
    def bus_gb_s(self) -> float:
        """What a rank's link carried at least, 1e9 bytes a second."""
        return self.algorithm_gb_s * self.operation.factor(self.world_size)


@dataclass(frozen=True)
class Counts:
    """How often: calls before the clock starts, and under it."""

    warm_up: int
    timed: int


def sampler(launch: Launch, prepared: Prepared, mode: Mode, counts: Counts) -> Callable[[], float]:
    """A function that measures once and returns us a call; all ranks must make it, and call it."""
    prepared.fill()
    for _ in range(counts.warm_up):
        prepared.call()
    launch.synchronize()
    if mode is Mode.EAGER:
        return lambda: _timed(launch, prepared.call, counts.timed, counts.timed)
    graph = _captured(launch, prepared.call, counts.timed)
    return lambda: _timed(launch, graph.replay, 1, counts.timed)


def count_wrong(launch: Launch, prepared: Prepared, mode: Mode) -> int:
    """Fill, call once, compare; wrong elements of all ranks. All ranks must call it."""
    graph = _captured(launch, prepared.call, 1) if mode is Mode.GRAPH else None
    call = prepared.call if graph is None else graph.replay
    prepared.fill()
    launch.synchronize()
    call()
    launch.synchronize()
    wrong = torch.tensor([prepared.wrong()])
    dist.all_reduce(wrong, group=launch.context.cpu_group)
    return int(wrong.item())


def _timed(launch: Launch, call: Callable[[], object], repeats: int, calls: int) -> float:
    dist.barrier(group=launch.context.cpu_group)
    call()  # brings the ranks closer together than gloo's barrier does
    launch.synchronize()
    start = time.perf_counter_ns()
    for _ in range(repeats):
        call()
    launch.synchronize()
    elapsed = torch.tensor([time.perf_counter_ns() - start])
    dist.all_reduce(elapsed, dist.ReduceOp.MAX, group=launch.context.cpu_group)
    return int(elapsed.item()) / calls / 1e3


def _captured(launch: Launch, call: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    launch.synchronize()
    return graph
