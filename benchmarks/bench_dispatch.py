"""Dispatch: what it adds to a call of a bound operator, and what importing and registering everything costs.

The operator's implementations do nothing, so that what is left is the way to them. They are called as a bridge calls
them, with a layer, an input and a residual. BENCH_DISPATCH_FAULT=call, growth or import plants a fault that the bars
must catch: a selection in each call, a walk over everything that is registered in each call, a slow registration.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from enum import Enum
from functools import partial
from itertools import repeat
from typing import Any

import torch

from benchmarks.figures import Bar, Figure, Kind, alternate
from benchmarks.record import ROOT
from sglang_fl.dispatch import (
    BackendImplKind,
    OpImpl,
    OpManager,
    OpRegistry,
    SelectionPolicy,
    call_op,
    set_manager,
)

KIND = Kind.OPS
NEEDS_GPU = False

OPERATOR = "rms_norm"
FEW, MANY = 10, 200
CALLS = 4_000  # well under a scheduler's time slice, so that most samples are not interrupted
ROUNDS = 101
IMPORT_ROUNDS = 7
IMPORT_LIMIT_S = 300.0  # against a hang
LARGEST_DIFFERENCE_NS = 150.0
LARGEST_GROWTH_NS = 25.0
LARGEST_IMPORT_MS = 150.0
FAULT_VARIABLE = "BENCH_DISPATCH_FAULT"
FAULT_SLEEP_S = 0.4

SGLANG = "import torch, sglang.srt.managers.scheduler"
# What a scheduler has done before its plugins load, then our part.
PROCESS = """
import json, sys, time
base, sleep_s = sys.argv[1], float(sys.argv[2])
start = time.perf_counter()
exec(base)
before = time.perf_counter()
from sglang_fl.dispatch import get_manager
time.sleep(sleep_s)
manager = get_manager()
after = time.perf_counter()
print(json.dumps({
    "without": (before - start) * 1e3, "with": (after - start) * 1e3,
    "implementations": len(manager.registry.all_implementations()), "broken": [str(each) for each in manager.broken],
}))
"""


class Fault(str, Enum):
    """What is planted."""

    NONE = ""
    CALL = "call"
    GROWTH = "growth"
    IMPORT = "import"


def implementation(obj: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Nothing but a call."""
    return x


def manager_of(registered: int, policy: SelectionPolicy | None = None) -> OpManager:
    """A manager with so many implementations of the operator, all of which can be used; FlagOS' comes first."""
    registry = OpRegistry()
    first = OpImpl(OPERATOR, "flagos", BackendImplKind.DEFAULT, implementation, priority=150)
    others = [
        OpImpl(OPERATOR, f"vendor.chip{number}", BackendImplKind.VENDOR, implementation, f"chip{number}", 100)
        for number in range(registered - 1)
    ]
    registry.register_many([first, *others])
    return OpManager(registry, policy or SelectionPolicy())


def bound(manager: OpManager, fault: Fault) -> Callable[..., Any]:
    """What a bridge calls."""
    function = manager.bind(OPERATOR, object(), dtype=torch.bfloat16).fn

    def selecting(*args: Any) -> Any:
        manager.select(OPERATOR)
        return function(*args)

    def walking(*args: Any) -> Any:
        for impl in manager.registry.implementations(OPERATOR):
            impl.is_available()
        return function(*args)

    return {Fault.CALL: selecting, Fault.GROWTH: walking}.get(fault, function)


def loop_ns(function: Callable[..., Any], calls: int) -> float:
    """Time of one call with ready arguments from a Python loop, the loop included."""
    layer, x, residual = object(), torch.ones(1), torch.ones(1)
    if function(layer, x, residual) is not x:
        raise RuntimeError("the call did not reach the implementation")
    gc.disable()  # one collection of all that torch has made takes longer than the whole loop
    try:
        before = time.perf_counter_ns()
        for _ in repeat(None, calls):
            function(layer, x, residual)
        return (time.perf_counter_ns() - before) / calls
    finally:
        gc.enable()


def call_op_loop_ns(manager: OpManager, calls: int) -> float:
    """As :func:`loop_ns`, by name."""
    set_manager(manager)
    return loop_ns(partial(call_op, OPERATOR), calls)


def call_figures(fault: Fault = Fault.NONE, rounds: int = ROUNDS, calls: int = CALLS) -> list[Figure]:
    """A call through dispatch against a call of the implementation, in turns."""
    few, many = manager_of(FEW), manager_of(MANY)
    strict = manager_of(FEW, SelectionPolicy(strict=True))
    functions: dict[str, Callable[..., Any]] = {
        "direct": implementation,
        "alone": bound(manager_of(1), Fault.NONE),
        "few": bound(few, fault),
        "many": bound(many, fault),
        "strict": bound(strict, Fault.NONE),
        "partial": partial(implementation),
    }
    subjects = {name: partial(loop_ns, function, calls) for name, function in functions.items()}
    subjects |= {
        "call_op few": partial(call_op_loop_ns, few, calls),
        "call_op many": partial(call_op_loop_ns, many, calls),
    }
    samples = alternate(subjects, rounds)
    set_manager(None)

    def figure(
        name: str, subject: str, bar: Bar | None, reference: str = "direct", words: str = "direct call"
    ) -> Figure:
        return Figure(name, "ns", samples[subject], samples[reference], words, bar)

    added = Bar.difference_at_most(LARGEST_DIFFERENCE_NS)
    growth = Bar.difference_at_most(LARGEST_GROWTH_NS)
    return [
        figure("bound, nothing to fall back on", "alone", added),
        figure(f"bound, {FEW} registered", "few", added),
        figure(f"bound, {MANY} registered", "many", added),
        figure(f"bound, {MANY} registered against {FEW}", "many", growth, "few", f"{FEW} registered"),
        figure(f"bound in strict mode, {FEW} registered", "strict", added),
        figure(f"call_op, {FEW} registered", "call_op few", None, "partial", "direct call with one more argument"),
        figure(f"call_op, {MANY} registered", "call_op many", None, "call_op few", f"{FEW} registered"),
    ]


def import_figures(fault: Fault = Fault.NONE, rounds: int = IMPORT_ROUNDS, base: str = SGLANG) -> list[Figure]:
    """Import and registration of everything, in fresh processes, on top of ``base``; each process is its own pair."""
    sleep_s = FAULT_SLEEP_S if fault is Fault.IMPORT else 0.0
    pairs = [_import_once(base, sleep_s) for _ in range(rounds + 1)][1:]
    return [
        Figure(
            "import and registration of all backends",
            "ms",
            [pair["with"] for pair in pairs],
            [pair["without"] for pair in pairs],
            "torch and SGLang alone" if base == SGLANG else base,
            Bar.difference_at_most(LARGEST_IMPORT_MS),
        )
    ]


def _import_once(base: str, sleep_s: float) -> dict[str, float]:
    # Without plugins: SGLang's own imports would otherwise load a part of ours.
    environment = {**os.environ, "SGLANG_PLUGINS": "__none__", "SGLANG_USE_CPU_ENGINE": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", PROCESS, base, str(sleep_s)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=IMPORT_LIMIT_S, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"a process that imports {base} failed:\n{done.stdout}{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if found["broken"] or not found["implementations"]:
        raise RuntimeError(f"not everything was registered: {found}")
    return {"with": found["with"], "without": found["without"]}


# A further part, such as what the bridges add, is a function here that takes the planted fault.
PARTS: tuple[Callable[[Fault], list[Figure]], ...] = (call_figures, import_figures)


def run() -> list[Figure]:
    """Measure every part."""
    fault = Fault(os.environ.get(FAULT_VARIABLE, ""))
    return [figure for part in PARTS for figure in part(fault)]
