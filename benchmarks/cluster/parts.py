"""What a run consists of: each part a command with a record and a limit of its own, and what must be in the record."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.e2e import shapes
from benchmarks.e2e.configurations import CONFIGURATIONS, NATIVE
from benchmarks.e2e.requests import Sizes
from sglang_fl.comm.tools.bench_operations import OPERATIONS
from sglang_fl.comm.tools.checks import CHECKS

# An end-to-end run is told to end so long before its limit, so that it stops its servers itself.
END_S = 20.0
LEAST_E2E_S = 1.0
FAULTS = ("silu_and_mul", "all_reduce", "all_gather")


@dataclass(frozen=True)
class Machine:
    """Where everything runs, and on how much.

    Attributes:
        ranks: one an accelerator, or processes on a CPU; even, two at least.
        out: folder of records and logs.
        shape: of the model.
        starts, repeats: of servers, and samples of each row in a start.
        commit: where it is known better than from here.
    """

    is_on_gpu: bool
    ranks: int
    out: Path
    shape: str
    starts: int = 3
    repeats: int = 5
    commit: str = ""

    @property
    def device(self) -> str:
        """As in the options of the tools."""
        return "cuda" if self.is_on_gpu else "cpu"

    @property
    def backends(self) -> tuple[str, str]:
        """FlagCX and what it is compared to."""
        return ("flagcx", "nccl") if self.is_on_gpu else ("flagcx", "torch")


@dataclass(frozen=True)
class Part:
    """One command; it writes ``FILE.json`` into the folder of records.

    Attributes:
        name: as in the table.
        command: without the place of the record and without a limit.
        limit_s: after which it is ended.
        expected: patterns, as of file names, of rows that must be there; without such a row it was not run.
        absent: what of it cannot be run here, with the reason.
        is_e2e: takes its limit as an option, and ends by itself.
        last: arguments behind all others.
        cannot: why nothing of it can be run here; empty where it can.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    expected: tuple[str, ...] = ()
    absent: Mapping[str, str] = field(default_factory=dict)
    is_e2e: bool = False
    last: tuple[str, ...] = ()
    cannot: str = ""

    @property
    def file(self) -> str:
        """Its name as a file's, without an ending."""
        return "".join(letter if letter.isalnum() else "-" for letter in self.name)

    def arguments(self, out: Path, limit_s: float) -> list[str]:
        """The whole command, with ``limit_s`` for it."""
        found = [*self.command, f"--json={out / self.file}.json"]
        if self.is_e2e:
            found += [f"--out={out / self.file}", f"--limit-s={max(LEAST_E2E_S, limit_s - END_S):g}"]
        return [*found, *self.last]


def parts(machine: Machine) -> Iterator[Part]:
    """All of them in their order, those that cannot be run here too."""
    for backend in machine.backends:
        yield _selftest(machine, backend)
    yield _operations(machine)
    yield _routes(machine)
    half = machine.ranks // 2
    yield _e2e(machine, f"e2e tp={machine.ranks}", machine.shape, machine.ranks)
    yield _e2e(machine, f"e2e tp={half} pp=2", machine.shape, half, _STAGES)
    yield _dp_attention(machine)


def dp_attention_shape(shape: str) -> str:
    """The shape itself, or the one of its size whose model SGLang serves with DP attention; empty: there is none."""
    return shape if shapes.has_dp_attention(shape) else _WITH_DP_ATTENTION.get(shape, "")


# SGLang 0.5.11 does not split the attention of Qwen2 over less than all ranks.
_WITH_DP_ATTENTION = {"qwen2.5-14b": "qwen3-14b", "tiny-8": "tiny-qwen3-8"}
_NO_GRAPHS = "a CPU has no graphs"
_STAGES = "--pp=2"


def _torchrun(machine: Machine, module: str, *arguments: str) -> tuple[str, ...]:
    start = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={machine.ranks}")
    return (sys.executable, *start, "-m", module, f"--device={machine.device}", *arguments)


def _selftest(machine: Machine, backend: str) -> Part:
    # Two cores make all combinations at eight ranks in no reasonable time.
    quick = () if machine.is_on_gpu else ("--quick",)
    names = tuple(f"{check.name} over {backend}" for check in CHECKS)
    absent = {} if machine.is_on_gpu else {"captured calls": _NO_GRAPHS, "all combinations": "only --quick on a CPU"}
    command = _torchrun(machine, "sglang_fl.comm.selftest", f"--backend={backend}", *quick)
    return Part(f"selftest {backend}", command, 420.0, names, absent)


def _operations(machine: Machine) -> Part:
    both = f"--backends={','.join(machine.backends)}"
    # Eight processes on two cores make a call of gloo in 20 ms: few calls there.
    on_gpu, on_cpu = "-b 1K -e 64M -f 16 --graph", "-b 1K -e 64K -f 8 -n 5 -w 1 -c 2"
    sizes = (on_gpu if machine.is_on_gpu else on_cpu).split()
    command = _torchrun(machine, "sglang_fl.comm.bench", "--op", "all", both, *sizes, "-d", "bfloat16")
    absent = {} if machine.is_on_gpu else {"captured calls": _NO_GRAPHS}
    return Part("operations", command, 420.0, tuple(_operation_rows(machine)), absent)


def _operation_rows(machine: Machine) -> Iterator[str]:
    """Each operation on each backend, eager and, where that can be, captured."""
    for name, operation in OPERATIONS.items():
        modes = ("eager", "graph") if machine.is_on_gpu and operation.can_be_captured else ("eager",)
        yield from (f"{name} * B *, {backend}, {mode}, *" for backend in machine.backends for mode in modes)


def _routes(machine: Machine) -> Part:
    command = (sys.executable, "-m", "benchmarks", "comm_gpu")
    expected = (
        "graph all_reduce flagcx, *",
        "graph all_reduce fastest, ordinary, *",
        "graph all_reduce fastest, registered, *",
        "host all_reduce flagcx / c loop, *",
        "host all_reduce flagcx / torch, *",
        "each alone: graph all_reduce *",
        "each alone: eager all_reduce *",
    )
    reason = "" if machine.is_on_gpu else "it compares routes between GPUs, eager and captured"
    return Part("routes", command, 600.0, expected, cannot=reason)


def _e2e(machine: Machine, name: str, shape: str, tp: int, *more: str) -> Part:
    # Mode fastest has routes of its own on GPUs only; without them it does as mode all.
    compared = ("fastest", "flagcx") if machine.is_on_gpu else ("flagcx",)
    starts = f"--starts={machine.starts}", f"--repeats={machine.repeats}"
    command = (
        *(sys.executable, "-m", "benchmarks.e2e", f"--shape={shape}", f"--device={machine.device}", f"--tp={tp}"),
        *(*more, f"--configurations={','.join((NATIVE, *compared))}", "--controls", *starts),
        *([f"--commit={machine.commit}"] if machine.commit else []),
    )
    # float32: on a CPU nothing else is to be seen than whether tokens are right, and bfloat16 leaves ties.
    floats = () if machine.is_on_gpu else ("--", "--dtype=float32")
    absent = {} if machine.is_on_gpu else {"fastest": "mode fastest has routes of its own on GPUs only"}
    if _STAGES in more and not machine.is_on_gpu:
        absent["transfers between stages over FlagCX"] = "SGLang sends them over gloo on a CPU"
    if machine.starts == 1:
        absent["server ready"] = "the first round finds no warm caches: --starts 2 at least"
    return Part(name, command, 1500.0, tuple(_rows(machine, compared, tp)), absent, True, floats)


def _rows(machine: Machine, compared: tuple[str, ...], tp: int) -> Iterator[str]:
    sizes = Sizes(0) if machine.is_on_gpu else Sizes.for_cpu(0)
    for name in compared:
        assert CONFIGURATIONS[name].bar is not None
        yield from (f"decode {name}, batch {batch}" for batch in sizes.batches)
        yield f"prefill {name}, {sizes.prefill_tokens} tokens"
        yield f"tokens equal {name}, *"
        if machine.starts > 1:
            yield f"server ready with the plugin, warm, {name}"
    yield "control: no fault is on, *"
    yield from (f"control: a fault in {fault} (*" for fault in (FAULTS if tp > 1 else FAULTS[:1]))


def _dp_attention(machine: Machine) -> Part:
    shape = dp_attention_shape(machine.shape)
    name = f"e2e tp={machine.ranks} DP attention"
    reason = f"SGLang has none for {shapes.architecture(machine.shape)} of {machine.shape}"
    if not shape:
        return Part(name, (), 0.0, cannot=reason)
    if shape != machine.shape:
        name += f", {shape}"
    return _e2e(machine, name, shape, machine.ranks, "--dp-attention")
