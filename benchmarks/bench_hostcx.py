"""hostcx between two processes: all_reduce against gloo in the same run, memory beside the message, cost of waiting."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.bench_binding import hostcx
from benchmarks.figures import Bar, Figure, Kind, alternate
from sglang_fl.comm.backends.flagcx import DataType, FlagCXCommunicator, FlagCXLibrary, ReduceOp
from sglang_fl.testing.ranks import RankContext, run_ranks

KIND = Kind.COMM
NEEDS_GPU = False

WORLD_SIZE = 2
LIMIT_S = 600.0
MIB = 2**20
LARGE_BYTES, LARGE_CALLS = 16 * MIB, 5
SMALL_BYTES, SMALL_CALLS = 4 * 2**10, 300
ROUNDS = 31
HUGE_BYTES = 1024 * MIB
MEMORY_ROUNDS = 3
LARGEST_EXTRA_MIB = 64.0
WAIT_S, WAIT_ROUNDS, LARGEST_WAIT_CPU_MS = 2.0, 3, 50.0


@dataclass(frozen=True)
class Rank:
    """One rank with a communicator of hostcx and the default gloo group."""

    context: RankContext
    library: FlagCXLibrary
    communicator: FlagCXCommunicator

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum float32 in place."""
        address = tensor.data_ptr()
        self.communicator.all_reduce(address, address, tensor.numel(), DataType.FLOAT32, ReduceOp.SUM)


def join(context: RankContext, name: str) -> Rank:
    """Open the library and meet the other rank."""
    library = FlagCXLibrary.open()
    store = context.store(name)
    if context.rank == 0:
        store.set(name, library.unique_id().hex())
    unique_id = bytes.fromhex(store.get(name).decode())
    communicator = FlagCXCommunicator.create(library, unique_id, WORLD_SIZE, context.rank, timeout_s=60)
    return Rank(context, library, communicator)


def timed_us(call: Callable[[torch.Tensor], object], tensor: torch.Tensor, calls: int) -> float:
    """Mean time of a call, both ranks starting together; the first result is checked."""
    tensor.fill_(dist.get_rank() + 1.0)
    call(tensor)
    if not bool((tensor == WORLD_SIZE * (WORLD_SIZE + 1) / 2).all()):
        raise RuntimeError(f"wrong sum: {tensor[:4].tolist()}")
    tensor.zero_()
    dist.barrier()
    before = time.perf_counter_ns()
    for _ in range(calls):
        call(tensor)
    return (time.perf_counter_ns() - before) / calls / 1000


def measure_times(context: RankContext) -> dict[str, dict[str, list[float]]]:
    """Times of both libraries in turns, for a large and a small tensor."""
    rank = join(context, "times")
    samples = {}
    for name, size, calls in (("large", LARGE_BYTES, LARGE_CALLS), ("small", SMALL_BYTES, SMALL_CALLS)):
        tensor = torch.empty(size // 4)
        subjects = {
            "hostcx": lambda tensor=tensor, calls=calls: timed_us(rank.all_reduce, tensor, calls),
            "gloo": lambda tensor=tensor, calls=calls: timed_us(dist.all_reduce, tensor, calls),
        }
        samples[name] = alternate(subjects, ROUNDS)
    rank.communicator.close()
    return samples


def resident_mib(field: str) -> float:
    """VmRSS or VmHWM of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


def shared_memory_mib() -> float:
    """What all files in /dev/shm occupy."""
    there = os.statvfs("/dev/shm")
    return (there.f_blocks - there.f_bfree) * there.f_frsize / MIB


def measure_extra_memory(context: RankContext) -> list[tuple[float, float]]:
    """Growth in MiB of this process's peak and of /dev/shm, by a communicator and one huge all_reduce on it."""
    tensor = torch.ones(HUGE_BYTES // 4)
    samples = []
    for number in range(MEMORY_ROUNDS):
        tensor.fill_(1.0)
        dist.barrier()
        shared = shared_memory_mib()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew, proc(5)
        before = resident_mib("VmRSS")
        rank = join(context, f"memory-{number}")
        rank.all_reduce(tensor)
        samples.append((resident_mib("VmHWM") - before, shared_memory_mib() - shared))
        if float(tensor[-1]) != WORLD_SIZE:
            raise RuntimeError(f"wrong sum: {float(tensor[-1])}")
        rank.communicator.close()
    return samples


def measure_waiting(context: RankContext) -> list[float]:
    """Processor time in ms of rank 0 while it waits for rank 1, all its threads together."""
    rank = join(context, "waiting")
    tensor = torch.ones(1024)
    rank.all_reduce(tensor)
    samples = []
    for _ in range(WAIT_ROUNDS):
        rank.communicator.barrier()
        if context.rank == 1:
            time.sleep(WAIT_S)
        wall, cpu = time.monotonic(), time.process_time()
        rank.all_reduce(tensor)
        cpu, wall = time.process_time() - cpu, time.monotonic() - wall
        if context.rank == 0 and wall < WAIT_S * 0.9:
            raise RuntimeError(f"rank 0 waited {wall:.3f} s only, the cost of {WAIT_S} s was to be measured")
        samples.append(cpu * 1000)
    rank.communicator.close()
    return samples


def slower(ranks: list[list[float]]) -> list[float]:
    """Of each round, the time of the slower rank."""
    return [max(samples) for samples in zip(*ranks, strict=True)]


def run() -> list[Figure]:
    """Measure times, memory and waiting, each in a fresh pair of processes."""
    env = {"FLAGCX_PATH": str(hostcx()), "HOSTCX_QUIET": "1"}
    times = run_ranks(measure_times, WORLD_SIZE, timeout_s=LIMIT_S, env=env)
    memory = run_ranks(measure_extra_memory, WORLD_SIZE, timeout_s=LIMIT_S, env=env)
    waiting = run_ranks(measure_waiting, WORLD_SIZE, timeout_s=LIMIT_S, gloo=False, env=env)

    def pair(name: str, size: str) -> Figure:
        return Figure(
            f"all_reduce of {size} float32, 2 ranks",
            "us",
            slower([rank[name]["hostcx"] for rank in times]),
            slower([rank[name]["gloo"] for rank in times]),
            "torch.distributed on gloo",
            Bar.ratio_at_most(1.0),
        )

    extra = [
        sum(own for own, _ in rounds) + max(shared for _, shared in rounds) for rounds in zip(*memory, strict=True)
    ]
    return [
        pair("large", "16 MiB"),
        pair("small", "4 KiB"),
        Figure(
            "memory beside 1 GiB in all_reduce, both ranks and /dev/shm",
            "MiB",
            extra,
            bar=Bar.at_most(LARGEST_EXTRA_MIB),
        ),
        Figure("processor time of a rank that waits 2 s", "ms", waiting[0], bar=Bar.at_most(LARGEST_WAIT_CPU_MS)),
    ]
