"""The flagos operators beside sgl_kernel's on a GPU: time on the device inside a graph, and on the host a call.

``python -m benchmarks operators_gpu``, or ``python -m benchmarks.bench_operators_gpu [FILE]``, which writes the samples
to FILE as JSON. It needs torch, triton, flag_gems and sgl_kernel, and neither SGLang nor this project's native part.

sgl_kernel's rotary embedding computes in bfloat16 with a bfloat16 cache, which is less exact than the contract of the
operator asks for and less to read: it stands here for its time alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch
from rich.console import Console

from benchmarks import record
from benchmarks.figures import Bar, Figure, Kind, alternate, show
from sglang_fl.dispatch.backends.flaggems import register_ops as flaggems
from sglang_fl.dispatch.backends.vendor.cuda import register_ops as cuda
from sglang_fl.dispatch.backends.vendor.cuda.kernels import kernels
from sglang_fl.dispatch.registry import OpRegistry
from sglang_fl.testing.operator_cases import Call
from sglang_fl.testing.operator_sizes import QWEN_0_5B, QWEN_14B, Large

KIND = Kind.OPS
NEEDS_GPU = True

TOKENS = (1, 64, 4096)
MODELS = (QWEN_0_5B, QWEN_14B)
DTYPE = torch.bfloat16
CALLS_IN_GRAPH = 50
HOST_CALLS = 200
ROUNDS = 21
REFERENCE = "sgl_kernel"
GPU_BAR = Bar.ratio_at_most(1.05, or_more_by=0.2)
HOST_BAR = Bar.at_most(20)

Launch = Callable[[], object]


def run() -> list[Figure]:
    """GPU time a call for every operator, number of tokens and model; host time a call at one token."""
    figures = []
    for row, tokens, model in product(ROWS, TOKENS, MODELS):
        subjects = _subjects(row, Large(tokens, DTYPE, model))
        name = f"{row.name}, {tokens} token{'s' * (tokens > 1)}, hidden {model.hidden}"
        graphs = {subject: _graph_sampler(launch) for subject, launch in subjects.items()}
        figures.append(_figure(f"gpu {name}", alternate(graphs, ROUNDS), GPU_BAR))
        if tokens == 1:
            hosts = {subject: partial(_host_us, launch) for subject, launch in subjects.items()}
            figures.append(_figure(f"host {name}", alternate(hosts, ROUNDS), HOST_BAR))
    return figures


@dataclass(frozen=True)
class Row:
    """One operator: its name in the table, in the registry, how its inputs are made, and sgl_kernel's call."""

    name: str
    operator: str
    make: Callable[[Large, torch.device], Call]
    reference: Callable[[Call], Launch]


def _implementation(module: object, operator: str) -> Callable[..., object]:
    registry = OpRegistry()
    module.register_builtins(registry)  # type: ignore[attr-defined]
    (impl,) = registry.implementations(operator)
    if not impl.is_available():
        raise RuntimeError(f"{impl.impl_id} {operator} cannot be measured here: {impl.availability().reason}")
    return impl.fn


def _bound(function: Callable[..., object], call: Call) -> Launch:
    return partial(function, call.obj, *call.args, **call.kwargs)


def _of_vendor(operator: str) -> Callable[[Call], Launch]:
    return lambda call: _bound(_implementation(cuda, operator), call)


def _vendors_rotary(call: Call) -> Launch:
    query, key, _, _, positions = call.args
    cache = call.obj.cos_sin_cache.to(query.dtype)
    return partial(kernels.rotary_embedding, positions, query, key, query.shape[-1], cache, True)


ROWS = (
    Row("silu_and_mul", "silu_and_mul", Large.activation, _of_vendor("silu_and_mul")),
    Row("rms_norm", "rms_norm", Large.norm, _of_vendor("rms_norm")),
    Row("add_rms_norm", "rms_norm", Large.norm_with_residual, _of_vendor("rms_norm")),
    Row("rotary", "rotary_embedding", Large.rotary, _vendors_rotary),
)


def _subjects(row: Row, sizes: Large) -> dict[str, Launch]:
    device = torch.device("cuda")
    return {
        flaggems.IMPL_ID: _bound(_implementation(flaggems, row.operator), row.make(sizes, device)),
        REFERENCE: row.reference(row.make(sizes, device)),
    }


def _graph_sampler(launch: Launch) -> Callable[[], float]:
    for _ in range(3):
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS_IN_GRAPH):
            launch()
    return partial(_graph_us, graph)


def _graph_us(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / CALLS_IN_GRAPH


def _host_us(launch: Launch) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter_ns()
    for _ in range(HOST_CALLS):
        launch()
    spent_ns = time.perf_counter_ns() - begin
    torch.cuda.synchronize()
    return spent_ns / 1e3 / HOST_CALLS


def _figure(name: str, samples: dict[str, list[float]], bar: Bar) -> Figure:
    return Figure(name, "us", samples[flaggems.IMPL_ID], samples[REFERENCE], REFERENCE, bar)


def main() -> None:
    """Show the table, and write the samples to the file that the command line names."""
    figures = run()
    show("operators on a GPU", figures, Console(width=160))
    if len(sys.argv) > 1:
        command = "python -m benchmarks.bench_operators_gpu"
        record.write(record.record(KIND, figures, command, NEEDS_GPU), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
