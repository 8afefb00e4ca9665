"""CommunicatorFL.all_reduce of 1 KiB on hostcx and one rank: cost on the host, against C and against a ctypes wrapper.

What is measured is what a group of several ranks runs: a group of one rank returns before it reaches a library, as
SGLang's does. So the communicator is made for a group that says it has two ranks, on a FlagCX communicator of one;
the library then has nothing to move and nobody to wait for, and what is left is the way there. That every call of
every subject arrived in the library is asserted by the library's own count.

The ctypes wrapper is a reference, written for this file after the description of the public one: a table of functions
with declared types, a check of each result, a chain of comparisons for the dtype, the stream found by ``str(device)``,
the reduction out of place into a new tensor, and a copy back.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import util
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cffi import FFI

from benchmarks.bench_binding import ROOT, HostCX, hostcx
from benchmarks.figures import Bar, Figure, Kind, alternate
from sglang_fl.comm.agreement import ITEM, agree
from sglang_fl.comm.backends.flagcx import DataType, FlagCXOperation, ReduceOp
from sglang_fl.comm.backends.flagcx.transport import FlagCXTransport
from sglang_fl.comm.communicator import CommunicatorFL, group_context
from sglang_fl.comm.discovery import discover_backends
from sglang_fl.comm.route_table import ANY_SIZE, Finder, Table
from sglang_fl.comm.types import GroupContext, Transport
from sglang_fl.config import load_settings
from sglang_fl.selection import Policy
from sglang_fl.testing.ranks import RankContext, run_ranks

KIND = Kind.COMM
NEEDS_GPU = False

ELEMENTS = 256  # float32: 1 KiB
CALLS = 10_000
ROUNDS = 41
LIMIT_S = 300.0
LARGEST_DIFFERENCE_US = 1.5
LARGEST_ROUTE_LOOK_UP_US = 0.15
SMALLEST_RATIO_OF_CTYPES = 4.0

DECLARATIONS = (
    "double loop_us(uintptr_t, uintptr_t comm, uintptr_t stream, uintptr_t data, size_t count, size_t calls);"
)
SOURCE = """
#include <stdint.h>
#include <time.h>

typedef int (*all_reduce_function)(const void *, void *, size_t, int, int, void *, void *);

double loop_us(uintptr_t all_reduce, uintptr_t comm, uintptr_t stream, uintptr_t data, size_t count, size_t calls) {
  struct timespec before, after;
  int codes = 0;
  clock_gettime(CLOCK_MONOTONIC, &before);
  for (size_t i = 0; i < calls; i++)
    codes |= ((all_reduce_function)all_reduce)((void *)data, (void *)data, count, 7, 0, (void *)comm, (void *)stream);
  clock_gettime(CLOCK_MONOTONIC, &after);
  if (codes != 0) return -1.0;
  return ((after.tv_sec - before.tv_sec) * 1e6 + (after.tv_nsec - before.tv_nsec) / 1e3) / calls;
}
"""


class SaysTwoRanks(GroupContext):
    """A group of one rank whose communicator takes the way of a group of several."""

    @property
    def world_size(self) -> int:
        """Not the number of ranks."""
        return 2


class CtypesLibrary:
    """The reference's lower half: functions with declared types, and a check of each result."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        self._functions: dict[str, Any] = {}
        parameters: list[Any] = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
        function = library.flagcxAllReduce
        function.restype = ctypes.c_int
        function.argtypes = [*parameters, ctypes.c_void_p, ctypes.c_void_p]
        self._functions["flagcxAllReduce"] = function

    def check(self, result: int) -> None:
        """Raise for what is not success."""
        if result != 0:
            raise RuntimeError(f"result {result}")

    def all_reduce(self, send: Any, receive: Any, count: int, dtype: int, op: int, comm: Any, stream: Any) -> None:
        """One call."""
        self.check(self._functions["flagcxAllReduce"](send, receive, count, dtype, op, comm, stream))


def dtype_number(dtype: torch.dtype) -> int:  # noqa: PLR0911 - the chain is what is being measured
    """FlagCX's number, by one comparison after the other."""
    if dtype == torch.int8:
        return 0
    if dtype == torch.uint8:
        return 1
    if dtype == torch.int32:
        return 2
    if dtype == torch.int64:
        return 4
    if dtype == torch.float16:
        return 6
    if dtype == torch.float32:
        return 7
    if dtype == torch.float64:
        return 8
    if dtype == torch.bfloat16:
        return 9
    raise ValueError(f"{dtype}")


class CtypesCommunicator:
    """The reference's upper half: what a call does with tensors, dtypes and streams."""

    def __init__(self, path: str, comm: int, stream: int, device: torch.device) -> None:
        self._library = CtypesLibrary(path)
        self._comm = ctypes.c_void_p(comm)
        self._streams = {str(device): ctypes.c_void_p(stream)}
        self.device = device
        self.disabled = False

    def all_reduce(self, tensor: torch.Tensor, output: torch.Tensor | None = None) -> torch.Tensor | None:
        """Sum into ``output``, a new tensor if left out."""
        if self.disabled:
            return None
        if tensor.device != self.device:
            raise ValueError(f"the communicator works on {self.device}, the tensor is on {tensor.device}")
        if output is None:
            output = torch.empty_like(tensor)
        stream = self._streams[str(tensor.device)]
        self._library.all_reduce(
            ctypes.c_void_p(tensor.data_ptr()),
            ctypes.c_void_p(output.data_ptr()),
            tensor.numel(),
            dtype_number(tensor.dtype),
            0,
            self._comm,
            stream,
        )
        return output

    def all_reduce_in_place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Out of place, and back."""
        output = self.all_reduce(tensor)
        if output is not None:
            tensor.copy_(output)
        return tensor


def build_loop(folder: Path) -> Path:
    """Compile the C loop; the extension's path."""
    ffi = FFI()
    ffi.cdef(DECLARATIONS)
    ffi.set_source("communicator_loop", SOURCE, extra_compile_args=["-std=gnu11", "-O2"], py_limited_api=True)
    return Path(ffi.compile(tmpdir=str(folder)))


def load_loop(path: Path) -> Any:
    """The compiled loop's functions."""
    spec = util.spec_from_file_location("communicator_loop", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no extension")
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.lib


def python_loop_us(function: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> float:
    """Time of one call from a Python loop, the loop included."""
    before = time.perf_counter_ns()
    for _ in repeat(None, CALLS):
        function(tensor)
    return (time.perf_counter_ns() - before) / CALLS / 1000


def look_up_loop_us(types: dict[torch.dtype, int], tensor: torch.Tensor) -> float:
    """Address, count and dtype of a tensor as the C function takes them."""
    before = time.perf_counter_ns()
    for _ in repeat(None, CALLS):
        tensor.data_ptr()
        types[tensor.dtype]
        tensor.numel()
    return (time.perf_counter_ns() - before) / CALLS / 1000


def route_loop_us(communicator: CommunicatorFL, tensor: torch.Tensor) -> float:
    """Choosing a call's transport and taking its bound operation, as every method does; the loop included."""
    before = time.perf_counter_ns()
    for _ in repeat(None, CALLS):
        (communicator._host if tensor.is_cpu else communicator._device).all_reduce  # noqa: B018 - taking it is the point
    return (time.perf_counter_ns() - before) / CALLS / 1000


def size_loop_us(find: Finder, tensor: torch.Tensor) -> float:
    """Looking up the route of a tensor's dtype and size, under mode fastest; the loop included."""
    before = time.perf_counter_ns()
    for _ in repeat(None, CALLS):
        find(tensor)
    return (time.perf_counter_ns() - before) / CALLS / 1000


def routes_by_size(transport: Transport) -> Finder:
    """The look-up of a table with one limit, in front of which a 1 KiB tensor lies."""
    entries = dict.fromkeys(transport.capabilities.reducible, ((4096, transport), (ANY_SIZE, transport)))
    return Table(transport, entries, entries).finder(lambda: False)


@dataclass(frozen=True)
class Beneath:
    """The library under the communicator: raw handles, its count of calls, and its path."""

    comm: int
    stream: int
    seen: HostCX
    path: str


def join() -> tuple[CommunicatorFL, FlagCXTransport]:
    """A communicator that takes the way of several ranks, on a FlagCX communicator of this one."""
    group = dist.new_group([0], backend="gloo")
    one = group_context(group, group, torch.device("cpu"), [0], "benchmark", load_settings(), timeout_s=60)
    policy = Policy(per_item={ITEM: ("flagcx",)}, strict=True)
    agreed = agree(one, discover_backends().backends, policy)
    transport = agreed.transport
    if not isinstance(transport, FlagCXTransport):
        raise TypeError(f"hostcx offers every operation, and yet the transport is {transport!r}")
    context = SaysTwoRanks(**{field.name: getattr(one, field.name) for field in fields(one)})
    return CommunicatorFL.from_agreed(context, agreed), transport


def look_beneath(transport: FlagCXTransport) -> Beneath:
    """Past the binding."""
    handle, library = transport.communicator.handle, transport.communicator.library
    boxed = library.native.ffi.new("uintptr_t *")
    library.native.lib.sglang_fl_flagcx_library_stream(handle, 0, boxed)
    comm = library.native.lib.sglang_fl_flagcx_library_communicator(handle)
    return Beneath(int(comm), int(boxed[0]), HostCX(library.path), library.path)


def measure(context: RankContext, loop_path: Path) -> dict[str, list[float]]:
    """Samples in us of every subject, in turns."""
    loop = load_loop(loop_path)
    communicator, transport = join()
    beneath = look_beneath(transport)
    tensor = torch.ones(ELEMENTS)
    address, dtype, op = tensor.data_ptr(), int(DataType.FLOAT32), int(ReduceOp.SUM)
    function = transport.communicator.library.function(FlagCXOperation.ALL_REDUCE)
    handle = transport.communicator.handle
    wrapper = CtypesCommunicator(beneath.path, beneath.comm, beneath.stream, tensor.device)
    in_place = tensor.clone()
    find = routes_by_size(transport)

    def counted(sample: Callable[[], float]) -> Callable[[], float]:
        def measured() -> float:
            before = beneath.seen.calls()
            result = sample()
            arrived = beneath.seen.calls() - before
            if arrived != CALLS or result < 0:
                raise RuntimeError(f"{arrived} of {CALLS} calls arrived at the library, or one failed")
            return result

        return measured

    def timed(call: Callable[[torch.Tensor], object]) -> Callable[[], float]:
        return counted(lambda: python_loop_us(call, tensor))

    c_arguments = (beneath.seen.all_reduce, beneath.comm, beneath.stream, address, ELEMENTS, CALLS)
    types = {torch.float32: dtype}
    samples = alternate(
        {
            "method": timed(communicator.all_reduce),
            "transport": timed(transport.all_reduce),
            "function": timed(lambda _: function(handle, address, address, ELEMENTS, dtype, op, 0)),
            "route": lambda: route_loop_us(communicator, tensor),
            "size": lambda: size_loop_us(find, tensor),
            "look up": lambda: look_up_loop_us(types, tensor),
            "c": counted(lambda: float(loop.loop_us(*c_arguments))),
            "ctypes": timed(wrapper.all_reduce_in_place),
            "ctypes in place": timed(lambda given: wrapper.all_reduce(given, in_place)),
        },
        ROUNDS,
    )
    if not torch.equal(tensor, torch.ones(ELEMENTS)):
        raise RuntimeError(f"one rank's sum is its own tensor; this is {tensor[:4].tolist()}")
    communicator.destroy()
    return samples


def run() -> list[Figure]:
    """Measure in a process of its own."""
    loop_path = build_loop(ROOT / "build" / "benchmarks")
    env = {"FLAGCX_PATH": str(hostcx()), "HOSTCX_QUIET": "1"}
    (samples,) = run_ranks(measure, 1, loop_path, timeout_s=LIMIT_S, env=env)

    def figure(name: str, subject: str, reference: str = "", text: str = "", bar: Bar | None = None) -> Figure:
        return Figure(name, "us", samples[subject], samples[reference] if reference else (), text, bar)

    method = "CommunicatorFL.all_reduce of 1 KiB"
    return [
        figure(
            f"{method}, against C",
            "method",
            "c",
            "the same calls from a C loop, straight into hostcx",
            Bar.difference_at_most(LARGEST_DIFFERENCE_US),
        ),
        figure(
            f"{method}, against ctypes",
            "method",
            "ctypes",
            "a ctypes wrapper in the manner of the public one",
            Bar.ratio_at_most(1 / SMALLEST_RATIO_OF_CTYPES),
        ),
        figure("looking a call's route up", "route", bar=Bar.at_most(LARGEST_ROUTE_LOOK_UP_US)),
        figure("looking a call's route by size up, mode fastest", "size", bar=Bar.at_most(LARGEST_ROUTE_LOOK_UP_US)),
        figure(f"{method}, against its transport", "method", "transport", "FlagCXTransport.all_reduce alone"),
        figure("FlagCXTransport.all_reduce", "transport", "function", "the bare C function from Python, in a lambda"),
        figure("a tensor's address, count and dtype, for the C function", "look up"),
        figure("the ctypes wrapper without its new tensor and copy", "ctypes in place", "ctypes", "with them"),
    ]
