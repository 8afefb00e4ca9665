"""all_reduce on GPUs: every route side by side, in graphs and on the host, and what mode fastest makes of them.

``python -m benchmarks comm_gpu`` starts a rank for each GPU of this machine, two at least, with FLAGCX_PATH. Times in
graphs are of one bf16 call in a CUDA graph of many, by the device's own events; eager times, of one in a row of as many
until all are done; times on the host, of the thread that enqueues 1 KiB. In every round each subject is measured once,
in turns, and the slowest rank counts. Best is the route with the smallest median, of those that take a call of that
size and memory; a row is held against its samples.

"fastest" has the routes of the platform, or of SGLANG_FL_COMM_ROUTES, with SGLang's custom all_reduce as ``native``.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator, Mapping

import torch

from benchmarks.bench_communicator import build_loop
from benchmarks.comm.measure import C_LOOP, REGISTERED, Measured, Plan, measure, slowest
from benchmarks.comm.routes import BARE, FASTEST, FLAGCX, TORCH
from benchmarks.figures import Bar, Figure, Kind
from benchmarks.record import ROOT
from sglang_fl.comm.backends.vendor.cuda.symmetric_group import NO_MULTICAST
from sglang_fl.testing.ranks import run_ranks

KIND = Kind.COMM
NEEDS_GPU = True
NOTES: list[str] = []  # of the last run, for its record

KIB, MIB = 2**10, 2**20
SIZES = tuple(size * KIB for size in (1, 4, 10, 64, 128, 320, 512)) + tuple(2**power * MIB for power in range(7))
CALLS = {0: 50, 4 * MIB: 20, 32 * MIB: 8}
HOST_CALLS = 400
ROUNDS = 15
LIMIT_S = 540.0

BARE_BAR = Bar.ratio_at_most(1.02)
BEST_BAR = Bar.ratio_at_most(1.03)
C_BAR = Bar.ratio_at_most(1.15)
TORCH_BAR = Bar.ratio_at_most(0.5)
# NVLink multicast is left alone, by NCCL, by torch's symmetric memory and by NVSHMEM.
_WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", NO_MULTICAST: "1", "NVSHMEM_DISABLE_NVLS": "1"}
# SGLang's own look at whether GPUs reach each other's memory needs a world group of its own.
_TRUST_THE_DRIVER = {"SGLANG_SKIP_P2P_CHECK": "1"}


def run() -> list[Figure]:
    """Measure with a rank for each GPU.

    Raises:
        RuntimeError: fewer than two GPUs, or no FLAGCX_PATH.
    """
    gpus = torch.cuda.device_count()
    if gpus < 2 or not os.environ.get("FLAGCX_PATH"):
        raise RuntimeError(
            f"comm_gpu compares routes between GPUs over FlagCX: it needs two GPUs or more, torch sees {gpus}, and "
            f"FLAGCX_PATH, which is {os.environ.get('FLAGCX_PATH') or 'not set'}"
        )
    plan = Plan("cuda", SIZES, CALLS, HOST_CALLS, ROUNDS, build_loop(ROOT / "build" / "benchmarks"))
    environment = {
        **_WITHOUT_MULTICAST,
        **_TRUST_THE_DRIVER,
        "SGLANG_FL_COMM_MODE": "fastest",
        "SGLANG_FL_DIST_BACKEND": "flagcx",
    }
    found = slowest(run_ranks(measure, gpus, plan, env=environment, start_method="spawn", gloo=True, timeout_s=LIMIT_S))
    NOTES[:] = [*found.words, *(f"{name} is absent: {reason}" for name, reason in found.absent.items())]
    for words in NOTES:
        print(words, file=sys.stderr)
    return list(figures(found))


def figures(found: Measured) -> Iterator[Figure]:
    """The rows with bars, by subject and size, then each route alone."""
    for size, samples in found.graph.items():
        yield Figure(
            f"graph all_reduce flagcx, {in_words(size)}",
            "us",
            samples[FLAGCX],
            samples[BARE],
            "the same calls of a bare flagcxAllReduce",
            BARE_BAR,
        )
    for reference, text, bar in (
        (C_LOOP, "a C loop over flagcxAllReduce", C_BAR),
        (TORCH, "torch.distributed.all_reduce", TORCH_BAR),
    ):
        name = {C_LOOP: "c loop", TORCH: "torch"}[reference]
        yield Figure(
            f"host all_reduce flagcx / {name}, 1 KiB", "us", found.host[FLAGCX], found.host[reference], text, bar
        )
    for memory in ("ordinary", "registered"):
        for size, samples in found.graph.items():
            subject = FASTEST if memory == "ordinary" else FASTEST + REGISTERED
            best = best_of(samples, only_ordinary=memory == "ordinary")
            yield Figure(
                f"graph all_reduce fastest, {memory}, {in_words(size)}",
                "us",
                samples[subject],
                samples[best],
                f"the best, {best}",
                BEST_BAR,
            )
    for mode, of_mode in (("graph", found.graph), ("eager", found.eager)):
        for size, samples in of_mode.items():
            for name in samples:
                yield Figure(f"each alone: {mode} all_reduce {name}, {in_words(size)}", "us", samples[name])
    for name, of_host in found.host.items():
        yield Figure(f"each alone: host all_reduce {name}, 1 KiB", "us", of_host)


def best_of(samples: Mapping[str, list[float]], only_ordinary: bool) -> str:
    """The route with the smallest median, mode fastest itself left out; of all memory, or of ordinary alone."""
    candidates = [
        name
        for name in samples
        if not name.startswith(FASTEST) and not (only_ordinary and name.endswith(REGISTERED)) and name != BARE
    ]
    return min(candidates, key=lambda name: statistics.median(samples[name]))


def in_words(size: int) -> str:
    """``64 KiB`` or ``2 MiB``."""
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"
