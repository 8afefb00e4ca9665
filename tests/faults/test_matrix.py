"""The fault matrix: kill -9, SIGSTOP and an exception of one rank at every point, on FlagCX and torch, 2 and 4 ranks.

torch's own collectives are trapped where FlagCX is under test. The cases of one test run at once: they mostly wait.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults.cases import ABSENCE, ALLOWANCE_S, BEHIND, Case, Fault, Point
from tests.faults.launch import Ended, Run, run_cases

_WHOLE_LIMIT_S = 20.0
_SHARED_MEMORY = Path("/dev/shm")
# Python's own; a rank makes none, other programs of the machine do.
_OTHERS = ("psm_", "sem.")


def _points(backend: str) -> list[Point]:
    return [point for point in Point if backend == "flagcx" or point is not Point.IN_GROUP]


def _shared_memory() -> set[str]:
    return {path.name for path in _SHARED_MEMORY.iterdir() if not path.name.startswith(_OTHERS)}


def _check_creation(case: Case, rank: int, ended: Ended) -> list[str]:
    who = rf"global rank\(s\) \[{case.victim}\] did not reach '"
    if case.victim == 0:  # with the store goes what it would have said of itself
        who += "|the process that holds torch.distributed's store, mostly that of global rank 0, was lost at '"
    pattern = rf"^group tp:0, global rank {rank} of .*: ({who})"
    if ended.error == "AgreementError" and re.search(pattern, ended.text):
        return []
    return [f"it should be an AgreementError that fits {pattern}"]


def _check_call(case: Case, rank: int, ended: Ended) -> list[str]:
    problems = []
    kind = "CollectiveTimeout" if case.fault is Fault.STOP else "PeerLost"
    if ended.error != kind:
        problems.append(f"it should be a {kind}")
    call = rf"group tp:0 .*, global rank {rank} of .*: call number \d+, {case.call(rank)}"
    if not re.search(call, ended.text):
        problems.append(f"it should name the call: {call}")
    named = re.findall(r"global rank (\d+) \(process \d+ on [^)]*\) ([^;:]*(?:; its log[^.]*)?)", ended.text)
    if not named or int(named[0][0]) != case.victim:
        problems.append(f"it should name rank {case.victim} first as missing, it names {named}")
    elif any(int(who) == case.victim or not words.startswith(BEHIND) for who, words in named[1:]):
        problems.append(f"beside rank {case.victim} it should only name who waits because of it, it names {named}")
    elif not re.match(ABSENCE[case.fault], named[0][1]):
        problems.append(f"it should say that the rank {ABSENCE[case.fault]}, it says {named[0][1]!r}")
    return problems


def _check_survivor(run: Run, rank: int) -> list[str]:
    case, ended = run.case, run.ended[rank]
    check = _check_creation if case.point.is_creation else _check_call
    problems = check(case, rank, ended)
    if ended.code in (None, 0):
        problems.append(f"its exit code is {ended.code}")
    if ended.after_s > case.limit_s + ALLOWANCE_S:
        problems.append(f"it ended {ended.after_s:.1f} s after the fault, the limit is {case.limit_s:g} s")
    if not case.point.is_creation and not run.dumps(rank):
        problems.append("it left no dump")
    return problems


def _check(run: Run) -> str:
    """What is wrong with a run, in words; empty if all is right."""
    problems = []
    if run.struck_s() is None:
        problems.append("the fault did not happen")
    if run.left_over:
        problems.append(f"processes of rank(s) {run.left_over} outlived them")
    for rank in run.case.survivors:
        ended = run.ended[rank]
        found = _check_survivor(run, rank)
        if found:
            problems.append(f"rank {rank}: {'; '.join(found)}\n  {ended.error}: {ended.text}\n  {ended.output[-3000:]}")
    if problems and run.struck_s() is None:
        problems.append(f"rank {run.case.victim}: {run.ended[run.case.victim].output[-3000:]}")
    return "\n".join([f"{run.case}:", *problems]) if problems else ""


def _run(cases: list[Case], hostcx: Path, folder: Path) -> None:
    environment = {
        "SGLANG_FL_DIST_BACKEND": cases[0].backend,
        "FLAGCX_PATH": str(hostcx) if cases[0].backend == "flagcx" else "",
        "GLOO_SOCKET_IFNAME": "lo",
        "HOSTCX_QUIET": "1",
        "OMP_NUM_THREADS": "1",
    }
    before = _shared_memory()
    runs = run_cases(cases, folder, environment, _WHOLE_LIMIT_S)
    failures = [text for run in runs if (text := _check(run))]
    leaked = _shared_memory() - before
    assert not failures, "\n\n".join(failures)
    assert not leaked, f"segments of shared memory are left behind: {sorted(leaked)}"


@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.name.lower())
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("backend", ["flagcx", "torch"])
def test_a_fault_of_one_rank(backend: str, size: int, fault: Fault, turn: int, hostcx: Path, tmp_path: Path) -> None:
    """Given a group, or one being made, when a rank is killed, stopped or raises at any point, then every other rank
    ends within the limit plus two seconds, with an exit code that is not zero and an error that names the call and
    that rank before any other, and leaves a dump; no process and no shared memory is left."""
    _run([Case(backend, size, fault, point, size // 2) for point in _points(backend)], hostcx, tmp_path)


@pytest.mark.parametrize("backend", ["flagcx", "torch"])
def test_a_fault_of_the_rank_that_holds_the_store(backend: str, turn: int, hostcx: Path, tmp_path: Path) -> None:
    """Given that the ranks' store is in rank 0, when that one is killed or stopped, then the other ends as above."""
    cases = [Case(backend, 2, fault, point, 0) for fault in (Fault.KILL, Fault.STOP) for point in _points(backend)]
    _run(cases, hostcx, tmp_path)
