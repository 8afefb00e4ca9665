"""Runs the sweep: hands the cases to a worker process, starts another when one dies or hangs, gathers the results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from sglang_fl.aten.gems import Gems
from sglang_fl.aten.sweep.cases import Case
from sglang_fl.aten.sweep.partial import Partial, SweepError
from sglang_fl.aten.sweep.results import NOT_REACHED, Result

# FlagGems tries many configurations of these on the first call of each shape, so they come last.
SLOW_TO_COMPILE = ("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "sort", "topk")
_POLL_S = 0.1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WORKER = (sys.executable, "-m", "sglang_fl.aten.sweep.worker")


@dataclass(frozen=True)
class Job:
    """One case and FlagGems' name of the operator."""

    case: Case
    function: str


@dataclass
class Limits:
    """Seconds: of the whole sweep, of one case with its compilation, and of a worker's start."""

    total_s: float = 480.0
    case_s: float = 90.0
    start_s: float = 120.0


@dataclass
class Progress:
    """What the worker has said so far."""

    results: dict[int, Result] = field(default_factory=dict)
    current: int | None = None
    ready: dict[str, Any] = field(default_factory=dict)
    changed_at: float = field(default_factory=time.monotonic)


def choose(cases: Sequence[Case], gems: Gems, only: Collection[str] | None = None) -> list[Job]:
    """The cases whose operator FlagGems replaces, those that compile slowly last, the often called first.

    only: ATen operators as FlagGems keys them, None for all.
    """
    names = {entry.key: entry.name for entry in gems.entries}
    jobs = [Job(case, names[case.operator]) for case in cases if case.operator in names and _has_accelerator(case)]
    if only is not None:
        jobs = [job for job in jobs if job.case.operator in only]
    calls: dict[str, int] = {}
    for job in jobs:
        calls[job.function] = calls.get(job.function, 0) + job.case.calls
    return sorted(jobs, key=lambda job: (job.function in SLOW_TO_COMPILE, -calls[job.function], job.function))


def run(
    jobs: Sequence[Job],
    partial: Partial,
    limits: Limits,
    say: Callable[[str], None],
    command: Sequence[str] = _WORKER,
) -> tuple[list[Result], dict[str, Any]]:
    """Measure all ``jobs``; every job has a result, if only the reason why there is none.

    partial: where finished results are kept; those of an earlier run in it are not measured again.
    command: what is started as ``command JOBS RESULTS PID``, with the id of this process; it ends with it.

    Returns the results in the order of ``jobs`` and what the worker said of itself (version, card).

    Raises:
        SweepError: the worker cannot even start.
    """
    known = partial.results
    progress = Progress(
        {place: known[job.case.key].of_case(job.case) for place, job in enumerate(jobs) if job.case.key in known}
    )
    if progress.results:
        say(f"{len(progress.results)} of {len(jobs)} cases were measured already")
    deadline = time.monotonic() + limits.total_s
    while len(progress.results) < len(jobs) and time.monotonic() < deadline:
        before = len(progress.results)
        signals = _Signals()
        with signals.kept():
            ended = _one_worker(jobs, progress, partial, limits, deadline, say, command, signals)
        if progress.current is not None:
            place = progress.current
            _keep(partial, jobs, progress, place, _failure(jobs[place], ended))
            say(f"{jobs[place].case.describe()}: {ended}; the rest goes on")
        elif len(progress.results) == before and time.monotonic() < deadline:
            raise SweepError(f"the sweep's worker measured nothing: {ended}")
    for place in range(len(jobs)):
        progress.results.setdefault(place, _failure(jobs[place], NOT_REACHED))
    return [progress.results[place] for place in range(len(jobs))], progress.ready


class _Signals:
    """SIGINT, SIGTERM and SIGHUP, kept until :meth:`obey`: as exceptions they could come while a process is started,
    and leave it behind.
    """

    def __init__(self) -> None:
        self._number = 0

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Inside they are kept; at the end they are obeyed. In another thread than the main one none arrives."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._keep) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        self.obey()

    def obey(self) -> None:
        """Raise what ends this process, if a signal has come."""
        if self._number == signal.SIGINT:
            raise KeyboardInterrupt
        if self._number:
            raise SystemExit(128 + self._number)

    def _keep(self, number: int, frame: FrameType | None) -> None:
        self._number = number


def _one_worker(
    jobs: Sequence[Job],
    progress: Progress,
    partial: Partial,
    limits: Limits,
    deadline: float,
    say: Callable[[str], None],
    command: Sequence[str],
    signals: _Signals,
) -> str:
    """Run one worker over what is left; how it ended."""
    left = [{"place": place, "case": vars(job.case)} for place, job in enumerate(jobs) if place not in progress.results]
    with tempfile.TemporaryDirectory() as folder:
        jobs_file, lines_file, log_file = (Path(folder, name) for name in ("jobs.json", "results.jsonl", "log"))
        jobs_file.write_text(json.dumps(left))
        lines_file.touch()
        progress.ready, progress.current, progress.changed_at = {}, None, time.monotonic()
        with log_file.open("w") as log, lines_file.open() as lines:
            arguments = [str(jobs_file), str(lines_file), str(os.getpid())]
            process = subprocess.Popen([*command, *arguments], stdout=log, stderr=log)
            try:
                ended = _watch(process, lines, jobs, progress, partial, limits, deadline, say, signals)
            finally:
                process.kill()
                process.wait()
        if progress.ready:
            return ended
        return f"{ended}: {' '.join(log_file.read_text()[-1500:].split())}"


def _watch(
    process: subprocess.Popen[bytes],
    lines: Any,
    jobs: Sequence[Job],
    progress: Progress,
    partial: Partial,
    limits: Limits,
    deadline: float,
    say: Callable[[str], None],
    signals: _Signals,
) -> str:
    rest = ""
    while True:
        signals.obey()
        ended = process.poll()
        rest += lines.read()
        *whole, rest = rest.split("\n")
        for line in whole:
            _take(json.loads(line), jobs, progress, partial, say)
        if ended is not None:
            return f"the process ended with {_exit_text(ended)}"
        waited = time.monotonic() - progress.changed_at
        limit = limits.case_s if progress.ready else limits.start_s
        if waited > limit:
            return f"took longer than {limit:g} s"
        if time.monotonic() > deadline:
            progress.current = None
            return NOT_REACHED
        time.sleep(_POLL_S)


def _take(
    line: dict[str, Any], jobs: Sequence[Job], progress: Progress, partial: Partial, say: Callable[[str], None]
) -> None:
    progress.changed_at = time.monotonic()
    if "ready" in line:
        progress.ready = line
    elif "begin" in line:
        progress.current = line["begin"]
    else:
        result = Result(**line["result"])
        _keep(partial, jobs, progress, line["place"], result)
        progress.current = None
        verdict = result.verdict() or ("says nothing" if result.own_failure else "good")
        say(f"[{len(progress.results)}/{len(jobs)}] {result.call}: {result.ratio:.3f} x, {verdict}")


def _keep(partial: Partial, jobs: Sequence[Job], progress: Progress, place: int, result: Result) -> None:
    progress.results[place] = result
    partial.add(jobs[place].case.key, result)


def _failure(job: Job, failure: str) -> Result:
    return Result.failed(job.case, job.function, failure)


def _exit_text(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"code {code}"


def _has_accelerator(case: Case) -> bool:
    """Whether a tensor or a device argument of the call is the accelerator's; FlagGems replaces nothing on the host."""
    return '"accelerator"' in case.key
