"""Recorder and monitor: what a call costs with them, against a process that has SGLANG_FL_COMM_RECORD=0, in one run.

Two processes make the same group and measure in turns: the one records its calls, notes each caller's place and is
watched by the monitor's thread, the other does none of it. As in bench_communicator, a communicator of one rank takes
the way of several, so that the library has nothing to move and the difference is what recording costs. Each call comes
from a frame of its own, as a layer's does: a caller whose frame stays would cost less than a model.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from benchmarks.bench_binding import hostcx
from benchmarks.bench_communicator import join, look_beneath
from benchmarks.figures import Bar, Figure, Kind, alternate
from sglang_fl.comm.backends.flagcx.transport import FlagCXTransport
from sglang_fl.comm.communicator import CommunicatorFL
from sglang_fl.comm.places import CallSite
from sglang_fl.comm.recorded import RecordedTransport
from sglang_fl.comm.types import Capabilities, GroupContext, Operation, Transport, Work
from sglang_fl.testing.ranks import RankContext, run_ranks

KIND = Kind.COMM
NEEDS_GPU = False

ELEMENTS = 256  # float32: 1 KiB
CALLS = 2_000  # well under a scheduler's time slice
ROUNDS = 151
LIMIT_S = 300.0
LARGEST_DIFFERENCE_NS = 200.0
ON, OFF = 0, 1
PLANTED = "walks"  # must miss the bar

Sample = Callable[[], float]


class NoTransport(Transport):
    """Does nothing at all."""

    def __init__(self) -> None:
        self.name = "nothing"
        self.capabilities = Capabilities(frozenset(Operation), frozenset(), frozenset(), frozenset({"cpu"}))

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Nothing."""

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """Nothing."""

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """Nothing."""

    def reduce(self, tensor: torch.Tensor, dst: int) -> None:
        """Nothing."""

    def broadcast(self, tensor: torch.Tensor, src: int) -> Work | None:
        """Nothing."""
        return None

    def gather(self, output: torch.Tensor | None, tensor: torch.Tensor, dst: int) -> None:
        """Nothing."""

    def send(self, tensor: torch.Tensor, dst: int) -> Work:
        """Not called here."""
        raise NotImplementedError

    def recv(self, tensor: torch.Tensor, src: int) -> Work:
        """Not called here."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing."""


def loop_ns(layer: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> float:
    """Time of one of the two calls that ``layer`` makes, the loop included."""
    before = time.perf_counter_ns()
    for _ in repeat(None, CALLS // 2):
        layer(tensor)
    return (time.perf_counter_ns() - before) / CALLS


def layers(call: Callable[[torch.Tensor], object]) -> dict[str, Callable[[torch.Tensor], object]]:
    """Callers of a group, each twice: from one line, from two, from two at different depths, and a planted fault."""

    def same(tensor: torch.Tensor) -> None:
        for _ in (0, 1):
            call(tensor)

    def lines(tensor: torch.Tensor) -> None:
        call(tensor)
        call(tensor)

    def depths(tensor: torch.Tensor) -> None:
        call(tensor)
        on_the_way(tensor)

    def walks(tensor: torch.Tensor) -> None:
        for _ in (0, 1):
            CallSite().find()
            call(tensor)

    def on_the_way(tensor: torch.Tensor) -> None:
        call(tensor)

    # As SGLang's thin wrappers are: whoever calls it is the caller.
    on_the_way.__code__ = on_the_way.__code__.replace(co_filename=CallSite.find.__code__.co_filename)
    return {layer.__name__: layer for layer in (same, lines, depths, walks)}


def flagcx_samples(communicator: CommunicatorFL, transport: FlagCXTransport, is_recorded: bool) -> dict[str, Sample]:
    """What one process measures of its communicator; that each call arrived and was recorded is asserted."""
    beneath = look_beneath(transport)
    tensor = torch.ones(ELEMENTS)
    recorders = transport.recorders()
    if len(recorders) != is_recorded or is_recorded != _is_watched():
        raise RuntimeError(f"recording is {is_recorded}, recorders are {recorders}, a monitor runs: {_is_watched()}")

    def sample(layer: Callable[[torch.Tensor], object]) -> Sample:
        def measured() -> float:
            seen, entered = beneath.seen.calls(), sum(recorder.entered() for recorder in recorders)
            result = loop_ns(layer, tensor)
            arrived = beneath.seen.calls() - seen
            recorded = sum(recorder.entered() for recorder in recorders) - entered
            if arrived != CALLS or recorded != CALLS * is_recorded:
                raise RuntimeError(f"{arrived} of {CALLS} calls arrived at the library, {recorded} were recorded")
            places = {call.place for recorder in recorders for call in recorder.calls()}
            if not all(place.endswith(layer.__qualname__) for place in places):
                raise RuntimeError(f"calls of {layer.__qualname__} are recorded as from {places}")
            return result

        return measured

    return {name: sample(layer) for name, layer in layers(communicator.all_reduce).items()}


def _is_watched() -> bool:
    return any("monitor" in thread.name for thread in threading.enumerate())


def wrapper_samples(context: GroupContext) -> dict[str, Sample]:
    """The wrapper for transports that do not record themselves, around one that does nothing, and that one alone."""
    tensor = torch.ones(ELEMENTS)

    def sample(transport: Transport) -> Sample:
        same = layers(transport.all_reduce)["same"]
        return lambda: loop_ns(same, tensor)

    alone = NoTransport()
    return {"wrapped": sample(RecordedTransport(alone, context)), "alone": sample(alone)}


def answer(context: RankContext, end: Connection) -> None:
    """Make the group, and measure what is asked for until None is."""
    dist.init_process_group("gloo", store=context.store(f"own-{context.rank}"), rank=0, world_size=1)
    communicator, transport = join()
    subjects = flagcx_samples(communicator, transport, is_recorded=context.rank == ON)
    subjects |= wrapper_samples(communicator.context)
    while (name := end.recv()) is not None:
        end.send(subjects[name]())
    communicator.destroy()
    dist.destroy_process_group()


def ask(end: Connection, name: str) -> float:
    """One sample of another process, which has slept meanwhile, as the other one has before its own."""
    end.send(name)
    result: float = end.recv()
    return result


def measure(context: RankContext, pipes: Sequence[tuple[Connection, Connection]]) -> dict[str, list[float]]:
    """Rank 2 asks the others for their samples, in turns."""
    if context.rank in (ON, OFF):
        answer(context, pipes[context.rank][1])
        return {}
    on, off = (pipes[rank][0] for rank in (ON, OFF))
    names = ("same", "lines", "depths")
    subjects = {f"{name} on": partial(ask, on, name) for name in (*names, PLANTED, "wrapped", "alone")}
    subjects |= {f"{name} off": partial(ask, off, name) for name in names}
    samples = alternate(subjects, ROUNDS)
    for end in (on, off):
        end.send(None)
    return samples


def run() -> list[Figure]:
    """Measure in two processes; raise if the bar does not notice a recorder that walks the stack at every call."""
    env = {"FLAGCX_PATH": str(hostcx()), "HOSTCX_QUIET": "1", "SGLANG_FL_DIST_BACKEND": "flagcx"}
    records = {ON: "1", OFF: "0"}
    _, _, samples = run_ranks(
        measure,
        3,
        (multiprocessing.Pipe(), multiprocessing.Pipe()),
        timeout_s=LIMIT_S,
        gloo=False,
        env=lambda rank: {**env, "SGLANG_FL_COMM_RECORD": records.get(rank)},
    )

    def figure(name: str, on: str, off: str, reference: str, bar: Bar | None) -> Figure:
        return Figure(name, "ns", samples[on], samples[off], reference, bar)

    bar = Bar.difference_at_most(LARGEST_DIFFERENCE_NS)
    without = "the same in a process with SGLANG_FL_COMM_RECORD=0"
    method = "CommunicatorFL.all_reduce of 1 KiB on FlagCX, recorded and watched"
    planted = figure("planted: the stack is walked at every call", f"{PLANTED} on", "same off", without, bar)
    if planted.is_met:
        raise RuntimeError(f"walking the stack at every call costs {planted.compared} ns, which meets {bar}")
    return [
        figure(f"{method}, from one line", "same on", "same off", without, bar),
        figure(f"{method}, from two lines in turn", "lines on", "lines off", without, bar),
        figure(f"{method}, from two depths of the stack in turn", "depths on", "depths off", without, None),
        figure(
            "the wrapper around other transports, around one that does nothing",
            "wrapped on",
            "alone on",
            "that one alone",
            None,  # Python's own cost of a row: beside a call of gloo or NCCL through torch, some percent
        ),
        figure("the fault planted: the stack is walked at every call", f"{PLANTED} on", "same off", without, None),
    ]
