"""The ranks of the benchmark: each route's time on the device and on the host, in turns, the slowest rank counting."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.bench_communicator import load_loop
from benchmarks.comm.routes import BARE, FASTEST, FLAGCX, TORCH, Call, Site, c_loop, open_site
from benchmarks.figures import alternate
from sglang_fl.comm.graph_mixing import prepare
from sglang_fl.config import load_settings
from sglang_fl.devices import detect_platform
from sglang_fl.testing.ranks import RankContext

C_LOOP = "c loop"
REGISTERED = ", registered"
_SMALL = 2**10


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        device_type: cuda, or cpu, where nothing can be captured and a loop of calls stands for a graph.
        sizes: of the all_reduce, bytes.
        calls: in a graph, by size: the calls of the largest size that is not above.
        host_calls: of 1 KiB, in a row.
        rounds: samples of each.
        c_loop: the compiled loop.
    """

    device_type: str
    sizes: tuple[int, ...]
    calls: Mapping[int, int]
    host_calls: int
    rounds: int
    c_loop: Path

    def calls_of(self, size: int) -> int:
        """Calls in one graph."""
        return self.calls[max(least for least in self.calls if least <= size)]


@dataclass
class Measured:
    """Of one rank, or of all: samples in us a call.

    Attributes:
        graph: by size and route; registered memory as ``NAME, registered``.
        eager: the same, of calls in a row until the last one is done.
        host: by route, of 1 KiB.
        absent: routes that could not be used, with the reason.
        words: what becomes of NCCL's order between graphs and other calls, and what mode fastest does.
    """

    graph: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    eager: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    host: dict[str, list[float]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()


def slowest(ranks: Sequence[Measured]) -> Measured:
    """In each round the rank that took longest."""

    def joined(samples: Sequence[Mapping[str, list[float]]]) -> dict[str, list[float]]:
        return {name: [max(each) for each in zip(*(one[name] for one in samples), strict=True)] for name in samples[0]}

    first = ranks[0]
    return Measured(
        graph={size: joined([rank.graph[size] for rank in ranks]) for size in first.graph},
        eager={size: joined([rank.eager[size] for rank in ranks]) for size in first.eager},
        host=joined([rank.host for rank in ranks]),
        absent=first.absent,
        words=first.words,
    )


def measure(ranks: RankContext, plan: Plan) -> Measured:
    """Everything, on one rank."""
    device = torch.device("cpu") if plan.device_type == "cpu" else torch.device("cuda", ranks.local_rank)
    # As in a server, before NCCL begins; the routes of SGLang alone run in the same process, with the same NCCL.
    mixing = prepare(load_settings(platform=detect_platform()), device.type, hosts=1)
    site = open_site(ranks, device)
    found = Measured(absent=site.absent, words=((mixing.line(),) if mixing else ()) + site.words)
    for size in plan.sizes:
        found.graph[size], found.eager[size] = _of_size(site, plan, size)
    found.host = _hosts(site, plan)
    dist.barrier()
    return found


def _of_size(site: Site, plan: Plan, size: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """In graphs and eagerly: every route that takes calls of ``size``, with ordinary memory and with registered."""
    count = size // 2
    assert site.registered is not None
    registered = site.registered(count).zero_()
    several: dict[str, Callable[[], None]] = {}
    for name, route in site.routes.items():
        if not route.takes(size):
            continue
        several[name] = partial(_call, route.call, torch.zeros_like(registered), plan.calls_of(size))
        if route.call_registered is not None:
            several[name + REGISTERED] = partial(_call, route.call_registered, registered, plan.calls_of(size))
    calls = plan.calls_of(size)
    graphs = {name: _graph_timer(site, calling, calls) for name, calling in several.items()}
    eager = {name: partial(_eager_us, site, calling, calls) for name, calling in several.items()}
    return alternate(graphs, plan.rounds), alternate(eager, plan.rounds)


def _call(call: Call, tensor: torch.Tensor, calls: int) -> None:
    for _ in repeat(None, calls):
        call(tensor)


def _graph_timer(site: Site, several: Callable[[], None], calls: int) -> Callable[[], float]:
    """Time of one call of ``several`` in a graph."""
    several()
    if site.context.device.type == "cpu":
        return partial(_eager_us, site, several, calls)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with site.capture(graph):
        several()
    return partial(_replay_us, site, graph, calls)


def _eager_us(site: Site, several: Callable[[], None], calls: int) -> float:
    """Of one call, until the last one is done."""
    _meet(site)
    several()  # brings the ranks closer together than gloo's barrier does
    _wait(site)
    before = time.perf_counter_ns()
    several()
    _wait(site)
    return (time.perf_counter_ns() - before) / calls / 1e3


def _replay_us(site: Site, graph: torch.cuda.CUDAGraph, calls: int) -> float:
    """Of one call in a replay. The replay before it brings the ranks together on the device."""
    start, end = (torch.Event(site.context.device, enable_timing=True) for _ in range(2))
    _meet(site)
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / calls


def _hosts(site: Site, plan: Plan) -> dict[str, list[float]]:
    """What a call of 1 KiB costs the thread that makes it."""
    tensor = torch.zeros(_SMALL // 2, dtype=torch.bfloat16, device=site.context.device)
    loop, beneath = load_loop(plan.c_loop), c_loop(site)
    # The loop's number of elements is of four bytes: the same KiB.
    arguments = (
        beneath.function, beneath.communicator, beneath.stream, tensor.data_ptr(), _SMALL // 4, plan.host_calls
    )  # fmt: skip

    def in_c() -> float:
        _meet(site)
        took_us = float(loop.loop_us(*arguments))
        if took_us < 0:
            raise RuntimeError("flagcxAllReduce failed")
        return took_us

    names = [name for name in (FLAGCX, BARE, TORCH, FASTEST) if name in site.routes]
    subjects: dict[str, Callable[[], float]] = {
        name: partial(_host_us, site, partial(site.routes[name].call, tensor), plan.host_calls) for name in names
    }
    return alternate({**subjects, C_LOOP: in_c}, plan.rounds)


def _host_us(site: Site, call: Callable[[], object], calls: int) -> float:
    _meet(site)
    before = time.perf_counter_ns()
    for _ in repeat(None, calls):
        call()
    return (time.perf_counter_ns() - before) / calls / 1e3


def _meet(site: Site) -> None:
    """All ranks, with nothing left on the device."""
    _wait(site)
    dist.barrier(group=site.context.cpu_group)


def _wait(site: Site) -> None:
    if site.context.device.type != "cpu":
        torch.cuda.synchronize()
