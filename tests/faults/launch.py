"""Runs several cases at once, since they mostly wait, and says how each rank of them ended."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import multiprocessing
import os
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.faults.cases import Case
from tests.faults.program import Rank

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_START_LIMIT_S = 60.0
_STACKS_AFTER_S = 75.0  # of a rank that does not end
_FORK = multiprocessing.get_context("fork")


@dataclass
class Ended:
    """How one rank ended.

    Attributes:
        code: the process's exit code; None if it had not ended when its time was over.
        after_s: seconds after the fault.
        error: class name of what it raised; empty if it raised nothing.
        text: the error's words.
        output: what it wrote.
    """

    code: int | None = None
    after_s: float = 0.0
    error: str = ""
    text: str = ""
    output: str = ""


@dataclass
class Run:
    """One case and what came of it. ``left_over``: process groups of its ranks that have members after their end."""

    case: Case
    folder: Path
    processes: dict[int, BaseProcess] = field(default_factory=dict)
    descriptors: dict[int, int] = field(default_factory=dict)
    ended: dict[int, Ended] = field(default_factory=dict)
    left_over: list[int] = field(default_factory=list)

    def struck_s(self) -> float | None:
        """When the fault happened, as of ``time.monotonic()``; None before it."""
        path = self.folder / "struck"
        text = path.read_text() if path.exists() else ""
        return float(text) if text else None

    def dumps(self, rank: int) -> list[Path]:
        """The dumps of one rank."""
        return sorted((self.folder / "dumps").glob(f"sglang_fl-comm-*-rank{rank}-*.json"))


def run_cases(cases: Sequence[Case], folder: Path, environment: dict[str, str], limit_s: float) -> list[Run]:
    """Run all ``cases`` at once; survivors that still run ``limit_s`` seconds after all were ready are killed."""
    runs = []
    with warnings.catch_warnings():
        # Python 3.12 warns of a fork beside other threads; a rank touches none of their locks.
        warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
        for number, case in enumerate(cases):
            run = Run(case, folder / str(number))
            (run.folder / "dumps").mkdir(parents=True, mode=0o700)
            (run.folder / "dumps").chmod(0o700)
            runs.append(run)
            for rank in range(case.size):
                _start(run, rank, environment)
    _let_go(runs, time.monotonic() + _START_LIMIT_S)
    _wait(runs, time.monotonic() + limit_s)
    for run in runs:
        _end(run)
    return runs


def _start(run: Run, rank: int, environment: dict[str, str]) -> None:
    process = _FORK.Process(target=_main, args=(run.case, rank, run.folder, environment, os.getpid()))
    process.start()
    assert process.pid is not None
    run.processes[rank] = process
    run.descriptors[rank] = os.pidfd_open(process.pid)


def _main(case: Case, rank: int, folder: Path, environment: dict[str, str], parent_pid: int) -> None:
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)
    output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(output), "w", buffering=1) for _ in range(2))
    os.environ.update(environment)
    os.environ["SGLANG_FL_COMM_DUMP_DIR"] = str(folder / "dumps")
    sys.modules["torch"].set_num_threads(1)
    faulthandler.dump_traceback_later(_STACKS_AFTER_S, file=sys.stderr)
    try:
        Rank(case, rank, folder).run()
    except BaseException as error:
        report = {"error": type(error).__name__, "text": str(error)}
        (folder / f"raised-{rank}").write_text(json.dumps(report))
        traceback.print_exc()
        raise


def _let_go(runs: Sequence[Run], deadline_s: float) -> None:
    """When every rank is ready; one that is not by then tells why in its case."""
    waited_for = [run.folder / f"ready-{rank}" for run in runs for rank in range(run.case.size)]
    while time.monotonic() < deadline_s and not all(path.exists() for path in waited_for):
        time.sleep(0.02)
    for run in runs:
        (run.folder / "go").touch()


def _wait(runs: Sequence[Run], deadline_s: float) -> None:
    """Until every survivor has ended, or the time is over."""
    waiting = {run.descriptors[rank]: (run, rank) for run in runs for rank in run.case.survivors}
    while waiting:
        ready, _, _ = select.select(list(waiting), [], [], max(0.0, deadline_s - time.monotonic()))
        now_s = time.monotonic()
        if not ready:
            return
        for descriptor in ready:
            run, rank = waiting.pop(descriptor)
            run.ended[rank] = Ended(after_s=now_s - (run.struck_s() or now_s))


def _end(run: Run) -> None:
    """Kill what is left, reap all, and collect what they said."""
    for rank, process in run.processes.items():
        pid = process.pid
        assert pid is not None
        has_ended = rank in run.ended
        if has_ended or rank == run.case.victim:
            process.join(None if has_ended else 0.0)
        ended = run.ended.setdefault(rank, Ended())
        if process.exitcode is None and rank != run.case.victim:
            ended.text = "it was still running"
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        process.join()
        ended.code = process.exitcode if has_ended or rank == run.case.victim else None
        os.close(run.descriptors[rank])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
            run.left_over.append(rank)
        raised = run.folder / f"raised-{rank}"
        if raised.exists():
            report = json.loads(raised.read_text())
            ended.error, ended.text = report["error"], report["text"]
        ended.output = (run.folder / f"output-{rank}").read_text(errors="replace")
