"""Operators on a GPU: time on the device inside a graph, and on the host, of each implementation.

``python -m benchmarks.bench_operators_gpu [FILE]`` shows the table and writes the samples to FILE as JSON. It needs
torch, triton, flag_gems and sgl_kernel, and neither SGLang nor this project's native part.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from benchmarks import record
from benchmarks.figures import Figure, Kind, alternate, show
from sglang_fl.dispatch.backends.flaggems import register_ops as flaggems
from sglang_fl.dispatch.backends.reference import register_ops as reference
from sglang_fl.dispatch.backends.vendor.cuda import register_ops as cuda
from sglang_fl.dispatch.registry import OpRegistry
from sglang_fl.dispatch.rules import refusal_of_call
from sglang_fl.dispatch.types import OpImpl
from sglang_fl.testing.operator_cases import Call
from sglang_fl.testing.operator_sizes import LARGE, Large

KIND = Kind.OPS
NEEDS_GPU = True

TOKENS = (1, 64, 4096)
DTYPE = torch.bfloat16
CALLS_IN_GRAPH = 20
HOST_CALLS = 200
ROUNDS = 15
# Stands beside each: SGLang's own kernels where they do the operator.
REFERENCE = "vendor.nvidia"


def run() -> list[Figure]:
    """GPU time a call at every number of tokens, host time a call at one token."""
    figures: list[Figure] = []
    for op_name in LARGE:
        for tokens in TOKENS:
            usable = {impl.impl_id: call for impl, call in _usable(op_name, tokens)}
            graphs = {impl_id: _graph_sampler(call) for impl_id, call in usable.items()}
            figures += _figures(f"{op_name}, {tokens} tokens: GPU", alternate(graphs, ROUNDS))
            if tokens == 1:
                hosts = {impl_id: partial(_host_us, call) for impl_id, call in usable.items()}
                figures += _figures(f"{op_name}: host", alternate(hosts, ROUNDS))
    return figures


def _usable(op_name: str, tokens: int) -> Iterator[tuple[OpImpl, Callable[[], object]]]:
    registry = OpRegistry()
    for backend in (flaggems, cuda, reference):
        backend.register_builtins(registry)
    for impl in registry.implementations(op_name):
        call = LARGE[op_name](Large(tokens, DTYPE), torch.device("cuda"))
        refusal = impl.availability().reason or refusal_of_call(impl, (call.obj, *call.args), call.kwargs)
        if refusal:
            sys.stdout.write(f"{op_name}: not {impl.impl_id}: {refusal}\n")
        else:
            yield impl, _bound(impl, call)


def _bound(impl: OpImpl, call: Call) -> Callable[[], object]:
    return partial(impl.fn, call.obj, *call.args, **call.kwargs)


def _graph_sampler(call: Callable[[], object]) -> Callable[[], float]:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS_IN_GRAPH):
            call()
    return partial(_graph_us, graph)


def _graph_us(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / CALLS_IN_GRAPH


def _host_us(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter_ns()
    for _ in range(HOST_CALLS):
        call()
    spent_ns = time.perf_counter_ns() - begin
    torch.cuda.synchronize()
    return spent_ns / 1e3 / HOST_CALLS


def _figures(name: str, samples: dict[str, list[float]]) -> list[Figure]:
    beside = samples.get(REFERENCE, [])
    return [
        Figure(f"{name}, {impl_id}", "us", own, *((beside, REFERENCE) if beside and impl_id != REFERENCE else ()))
        for impl_id, own in samples.items()
    ]


def main() -> None:
    """Show the table, and write the samples to the file that the command line names."""
    figures = run()
    show("operators on a GPU", figures, Console(width=160))
    if len(sys.argv) > 1:
        command = "python -m benchmarks.bench_operators_gpu"
        record.write(record.record(KIND, figures, command, NEEDS_GPU), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
