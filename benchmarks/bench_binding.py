"""The binding alone: one all_reduce of one rank and length zero on hostcx, from Python and from C."""

from __future__ import annotations

import ctypes
import subprocess
import time
from collections.abc import Callable
from importlib import util
from itertools import repeat
from pathlib import Path
from typing import Any

from cffi import FFI

from benchmarks.figures import Bar, Figure, Kind, alternate
from sglang_fl.comm.backends.flagcx import DataType, FlagCXCommunicator, FlagCXLibrary, FlagCXOperation, ReduceOp

KIND = Kind.COMM
NEEDS_GPU = False

ROOT = Path(__file__).resolve().parent.parent
CALLS = 4_000  # well under a scheduler's time slice, so that most samples are not interrupted
ROUNDS = 151
LARGEST_RATIO = 2.0
LARGEST_DIFFERENCE_NS = 300.0

# cffi's own floor: the same seven parameters and result, no work. And the loop that C would write.
DECLARATIONS = """
int32_t empty(void *communicator, uintptr_t send, uintptr_t receive, size_t count, int32_t dtype, int32_t op,
              uintptr_t stream);
double loop_ns(uintptr_t all_reduce, uintptr_t comm, uintptr_t stream, size_t calls);
"""
SOURCE = """
#include <stdint.h>
#include <time.h>

int32_t empty(void *communicator, uintptr_t send, uintptr_t receive, size_t count, int32_t dtype, int32_t op,
              uintptr_t stream) {
  return 0;
}

typedef int (*all_reduce_function)(const void *, void *, size_t, int, int, void *, void *);

double loop_ns(uintptr_t all_reduce, uintptr_t comm, uintptr_t stream, size_t calls) {
  struct timespec before, after;
  int codes = 0;
  clock_gettime(CLOCK_MONOTONIC, &before);
  for (size_t i = 0; i < calls; i++)
    codes |= ((all_reduce_function)all_reduce)(NULL, NULL, 0, 7, 0, (void *)comm, (void *)stream);
  clock_gettime(CLOCK_MONOTONIC, &after);
  if (codes != 0) return -1.0;
  return ((after.tv_sec - before.tv_sec) * 1e9 + (after.tv_nsec - before.tv_nsec)) / calls;
}
"""


def build_floor() -> Any:
    """The extension with the empty function, built as ours is: API mode, same optimisation."""
    ffi = FFI()
    ffi.cdef(DECLARATIONS)
    ffi.set_source("binding_floor", SOURCE, extra_compile_args=["-std=gnu11", "-O2"], py_limited_api=True)
    path = Path(ffi.compile(tmpdir=str(ROOT / "build" / "benchmarks")))
    spec = util.spec_from_file_location("binding_floor", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no extension")
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def hostcx() -> Path:
    """hostcx of this checkout, built now if it is not there."""
    done = subprocess.run(["make", "-s", "hostcx"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"make hostcx failed:\n{done.stdout}{done.stderr}")
    return Path(done.stdout.strip().splitlines()[-1])


def python_loop_ns(function: Callable[..., object], arguments: tuple[object, ...]) -> float:
    """Time of one call with ready arguments from a Python loop, the loop included."""
    first, second, third, fourth, fifth, sixth, seventh = arguments
    before = time.perf_counter_ns()
    for _ in repeat(None, CALLS):
        function(first, second, third, fourth, fifth, sixth, seventh)
    return (time.perf_counter_ns() - before) / CALLS


class HostCX:
    """The library as the benchmark's own eyes see it: past the binding, by ctypes."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self._library.hostcxCallCountOf.restype = ctypes.c_uint64
        self.all_reduce = ctypes.cast(self._library.flagcxAllReduce, ctypes.c_void_p).value

    def calls(self) -> int:
        """How often flagcxAllReduce was called in this process."""
        return int(self._library.hostcxCallCountOf(b"flagcxAllReduce"))


def run() -> list[Figure]:
    """Measure the binding, cffi's floor and the C loop in turns; assert that every call arrived."""
    floor = build_floor()
    library = FlagCXLibrary.open(hostcx())
    seen = HostCX(library.path)
    communicator = FlagCXCommunicator.create(library, library.unique_id(), 1, 0, timeout_s=60)
    all_reduce = library.function(FlagCXOperation.ALL_REDUCE)
    arguments = (0, 0, 0, int(DataType.FLOAT32), int(ReduceOp.SUM), 0)
    boxed = library.native.ffi.new("uintptr_t *")
    library.native.lib.sglang_fl_flagcx_library_stream(communicator.handle, 0, boxed)
    comm = library.native.lib.sglang_fl_flagcx_library_communicator(communicator.handle)

    def counted(measure: Callable[[], float]) -> Callable[[], float]:
        def measured() -> float:
            before = seen.calls()
            sample = measure()
            arrived = seen.calls() - before
            if arrived != CALLS or sample < 0:
                raise RuntimeError(f"{arrived} of {CALLS} calls arrived at the library, or one failed")
            return sample

        return measured

    samples = alternate(
        {
            "binding": counted(lambda: python_loop_ns(all_reduce, (communicator.handle, *arguments))),
            "floor": lambda: python_loop_ns(floor.lib.empty, (floor.ffi.NULL, *arguments)),
            "c": counted(lambda: floor.lib.loop_ns(seen.all_reduce, comm, boxed[0], CALLS)),
            "method": counted(lambda: method_loop_ns(communicator, arguments)),
        },
        ROUNDS,
    )
    communicator.close()
    library.close()
    return [
        Figure(
            "all_reduce from Python, against cffi's floor",
            "ns",
            samples["binding"],
            samples["floor"],
            "an empty C function of the same arguments",
            Bar.ratio_at_most(LARGEST_RATIO),
        ),
        Figure(
            "all_reduce from Python, against C",
            "ns",
            samples["binding"],
            samples["c"],
            "the same loop in C, straight into hostcx",
            Bar.difference_at_most(LARGEST_DIFFERENCE_NS),
        ),
        Figure(
            "FlagCXCommunicator.all_reduce",
            "ns",
            samples["method"],
            samples["binding"],
            "the bare C function, from Python",
        ),
    ]


def method_loop_ns(communicator: FlagCXCommunicator, arguments: tuple[int, ...]) -> float:
    """As python_loop_ns, through the method."""
    method = communicator.all_reduce
    send, receive, count, dtype, op, stream = arguments
    before = time.perf_counter_ns()
    for _ in repeat(None, CALLS):
        method(send, receive, count, dtype, op, stream)
    return (time.perf_counter_ns() - before) / CALLS
