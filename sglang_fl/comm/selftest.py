"""Self-test of the communication layer: every operation over every backend, with data that depends on the rank.

Examples:
    python -m sglang_fl.comm.selftest --quick                               one process: whether it runs at all
    torchrun --standalone --nproc-per-node 2 -m sglang_fl.comm.selftest     every backend that can be used here
    torchrun --standalone --nproc-per-node 8 -m sglang_fl.comm.selftest --backend flagcx --quick --json selftest.json
    torchrun --standalone --nproc-per-node 2 -m sglang_fl.comm.selftest --op all_reduce,send
    torchrun --nnodes 2 --node-rank R --nproc-per-node 8 --master-addr A --master-port P -m sglang_fl.comm.selftest
        the same command on both hosts, with R 0 and 1 and A the first host's address
        (python -m sglang_fl doctor --nnodes 2 tells that, and whether the network is ready)

What is tried
Each dtype in each shape (empty, scalar, odd, large) and each layout (contiguous, offset, strided, transposed), in
place and out of place, from each root, around the ring, uneven; on a GPU also within a captured graph. --quick: each
dtype in two shapes, and each shape and layout in float32. Expected values are computed on each rank alone, and the
memory around each tensor must stay as it was.

What the lines say
operation, backend, cases tried on each rank, elements that were wrong on any rank, seconds; below a wrong line the
first wrong cases with their rank. Settings and versions of all ranks are compared first: what differs is a failure
that names the ranks. A call that does not move for --timeout seconds ends the run, with the case and the stacks.

Without --backend every backend that can be used is tested; one that is asked for, by --backend or by
SGLANG_FL_DIST_BACKEND or FLAGCX_PATH, must be usable. Exit code 0 if everything was right, 1 if not, 2 if the
command line is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_fl import __version__
from sglang_fl.comm.agreement import compare
from sglang_fl.comm.communicator import CommunicatorFL
from sglang_fl.comm.discovery import discover_backends
from sglang_fl.comm.errors import AgreementError, CommError
from sglang_fl.comm.tools import record
from sglang_fl.comm.tools.candidates import asked_for, known_names, opened
from sglang_fl.comm.tools.checks import CHECKS, Check
from sglang_fl.comm.tools.launch import Launch, launched
from sglang_fl.comm.tools.options import RanksParser
from sglang_fl.comm.tools.scope import Case, Scope, Tally, full_cases, quick_cases
from sglang_fl.comm.tools.sizes import seconds
from sglang_fl.comm.tools.watch import Watch
from sglang_fl.config import SettingsError

FAILED = 1
MOST_ROOTS = 3
HEADER = f"{'operation':<36}{'backend':<10}{'cases':>8}{'#wrong':>10}{'seconds':>10}"


@dataclass(frozen=True)
class Line:
    """What came of one check on one backend, over all ranks; ``error`` is the first rank's that had one."""

    operation: str
    backend: str
    cases: int
    wrong: int
    seconds: float
    problems: tuple[str, ...] = ()
    error: str = ""

    @property
    def is_right(self) -> bool:
        """Nothing was wrong and nothing ended it early."""
        return self.wrong == 0 and not self.error

    def __str__(self) -> str:
        numbers = f"{self.cases:>8}{self.wrong:>10}{self.seconds:>10.2f}"
        verdict = "" if self.is_right else "  WRONG"
        note = "  needs 2 ranks" if self.cases == 0 and self.is_right else ""
        return f"{self.operation:<36}{self.backend:<10}{numbers}{verdict}{note}"


@dataclass
class Report:
    """Everything that is said at the end; equal on all ranks."""

    lines: list[Line] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    backends: dict[str, str] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        """Every line is right, nothing failed beside them, and at least one backend was tested."""
        return bool(self.lines) and not self.failures and all(line.is_right for line in self.lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the self-test on this rank; all ranks must call it. The process's exit code, the same on all ranks."""
    options = parse(arguments)
    try:
        with launched(options.device, options.timeout) as launch, Watch(launch.place.rank, options.timeout) as watch:
            report = run(launch, options, watch)
            launch.exchange("end", None)
    except (SettingsError, CommError) as error:
        print(f"selftest: {error}", file=sys.stderr, flush=True)
        return FAILED
    return 0 if report.is_right else FAILED


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = RanksParser(
        prog="torchrun --nproc-per-node N -m sglang_fl.comm.selftest",
        usage="%(prog)s [options]",
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--backend", metavar="NAME", help="test this one, and fail if it cannot be used")
    parser.add_argument("--op", type=_methods, default=[], metavar="NAMES", help="test these methods alone")
    parser.add_argument("--quick", action="store_true", help="fewer combinations of dtype, size and layout")
    parser.add_argument("--device", metavar="TYPE", help="cpu, cuda, ...; default: the accelerator, if there is one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found, on rank 0")
    parser.add_argument("--seed", type=int, default=0, help="of the data (default 0)")
    parser.add_argument(
        "--timeout", type=seconds, default=120.0, metavar="S", help="end if nothing moves for so long (default 120)"
    )
    return parser.parse_args(arguments)


def run(launch: Launch, options: argparse.Namespace, watch: Watch) -> Report:
    """Test what was asked for, and say it on rank 0. All ranks must call it."""
    report = Report()
    launch.on_first("check the file", lambda: record.require_writable("--json", options.json))
    devices = launch.exchange("describe devices", record.describe_device(launch.device))
    _say_head(launch, devices, options)
    watch.step("compare the ranks")
    _compare_ranks(launch, report)
    known = known_names(launch)
    required = asked_for(launch, [options.backend] if options.backend else [])
    cases = (quick_cases if options.quick else full_cases)(launch.device)
    checks = [check for check in CHECKS if not options.op or set(options.op) & set(check.methods)]
    launch.say(HEADER)
    for name in [options.backend] if options.backend else known:
        watch.step(f"create {name}")
        with opened(launch, name) as route:
            report.backends[name] = route.reason
            if route.communicator is None:
                launch.say(f"# {name} cannot be used: {route.reason}")
                if route.has_failed or name in required:
                    report.failures.append(f"{name} cannot be used")
                continue
            _say_exceptions(launch, route.communicator)
            _test(launch, route.communicator, checks, cases, options.seed, report, watch)
    if not report.lines:
        report.failures.append("no backend was tested")
    _say_end(launch, report)
    if options.json is not None:
        launch.on_first("write the file", lambda: record.write(_content(launch, devices, report), options.json))
    return report


def _test(
    launch: Launch,
    communicator: CommunicatorFL,
    checks: Sequence[Check],
    cases: Sequence[Case],
    seed: int,
    report: Report,
    watch: Watch,
) -> None:
    for check in checks:
        line = _line(launch, communicator, check, cases, seed, watch)
        report.lines.append(line)
        launch.say(str(line))
        for text in (*line.problems, *([line.error] if line.error else [])):
            launch.say(f"    {text}")
        if line.error:
            # A rank that left an operation early is out of step with its peers.
            report.failures.append(f"{communicator.backend}: what follows {check.name} was not run")
            return


def _line(
    launch: Launch, communicator: CommunicatorFL, check: Check, cases: Sequence[Case], seed: int, watch: Watch
) -> Line:
    roots = sorted({rank * (launch.place.world_size - 1) // (MOST_ROOTS - 1) for rank in range(MOST_ROOTS)})
    scope = Scope(communicator, cases, roots, Tally(), seed)
    watch.step(f"{check.name} over {communicator.backend}", scope.tally.progress)
    before = time.perf_counter()
    try:
        check.run(scope)
    except (RuntimeError, TypeError, ValueError) as error:
        scope.tally.error = f"{type(error).__name__}: {error}"
        where = f"rank {launch.place.rank}, {check.name} over {communicator.backend}"
        print(f"selftest: {where}: {scope.tally.error}", file=sys.stderr, flush=True)
    seconds = time.perf_counter() - before
    tallies: list[Tally] = launch.exchange(f"results of {check.name} over {communicator.backend}", scope.tally)
    problems = [f"rank {rank}, {text}" for rank, tally in enumerate(tallies) for text in tally.problems]
    errors = [f"rank {rank}: {tally.error}" for rank, tally in enumerate(tallies) if tally.error]
    return Line(
        check.name,
        communicator.backend,
        cases=min(tally.cases for tally in tallies),
        wrong=sum(tally.wrong for tally in tallies),
        seconds=round(seconds, 3),
        problems=tuple(problems[:MOST_ROOTS]),
        error=errors[0] if errors else "",
    )


def _compare_ranks(launch: Launch, report: Report) -> None:
    versions = {f"version of {name}": text for name, text in record.describe_versions().items()}
    views = launch.exchange("compare settings and versions", {**launch.settings.comparable(), **versions})
    try:
        compare(views)
    except AgreementError as error:
        report.failures.append(str(error))
        launch.say(f"# {error}")
        return
    launch.say(f"# settings and versions are equal on {len(views)} rank(s) of {launch.host_count} host(s)")


def _say_head(launch: Launch, devices: Sequence[str], options: argparse.Namespace) -> None:
    versions = ", ".join(f"{name} {text}" for name, text in record.describe_versions().items())
    launch.say(f"# sglang_fl {__version__} communication self-test{', quick' if options.quick else ''}: {versions}")
    for rank, (host, device) in enumerate(zip(launch.hosts, devices, strict=True)):
        launch.say(f"# rank {rank} on {host}: {device}")
    if launch.place.world_size == 1:
        launch.say("# one rank communicates with nobody: CommunicatorFL calls no library. Start 2 or more.")
    for name, text in discover_backends().failures.items():
        launch.say(f"# backend {name} did not register: {text}")


def _say_exceptions(launch: Launch, communicator: CommunicatorFL) -> None:
    others = ", ".join(f"{operation} by {name}" for operation, name in communicator.exceptions().items())
    if others:
        launch.say(f"# {communicator.backend}: carried by another backend: {others}")


def _say_end(launch: Launch, report: Report) -> None:
    for failure in report.failures:
        launch.say(f"# FAILED: {failure}")
    wrong = [f"{line.operation} over {line.backend}" for line in report.lines if not line.is_right]
    if wrong:
        launch.say(f"# FAILED: {len(wrong)} of {len(report.lines)} lines: {'; '.join(wrong)}")
    if report.is_right:
        cases = sum(line.cases for line in report.lines)
        launch.say(f"# OK: {len(report.lines)} lines, {cases} cases a rank, nothing wrong")


def _methods(text: str) -> list[str]:
    known = list(dict.fromkeys(method for check in CHECKS for method in check.methods))
    names = text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)!r}: allowed are {', '.join(known)}")
    return names


def _content(launch: Launch, devices: Sequence[str], report: Report) -> dict[str, Any]:
    rows = [
        {
            "name": f"{line.operation} over {line.backend}",
            "operation": line.operation,
            "backend": line.backend,
            "cases": line.cases,
            "wrong": line.wrong,
            "seconds": line.seconds,
            "problems": list(line.problems),
            "error": line.error,
        }
        for line in report.lines
    ]
    more = {
        "ok": report.is_right,
        "failures": report.failures,
        "world_size": launch.place.world_size,
        "hosts": launch.host_count,
        "not_usable": {name: reason for name, reason in report.backends.items() if reason},
    }
    return record.record(devices, rows, **more)


if __name__ == "__main__":
    sys.exit(main())
