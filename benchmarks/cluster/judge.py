"""What came of a part, by its record: checks that were met or missed, what failed, and what was not run and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

from benchmarks.cluster.parts import Part

MISSED, INCOMPLETE = 1, 3
NO_TIMES = "times on a CPU mean nothing"
_TIMES = ("ms", "us", "s")
_TAIL_LINES = 12


class State(str, Enum):
    """Of a check or a part; of several the first in this order counts."""

    FAILED = "failed"
    MISSED = "missed"
    NOT_RUN = "not run"
    MET = "met"


@dataclass(frozen=True)
class Check:
    """One thing that had to hold, or could not be tried."""

    name: str
    state: State
    detail: str = ""


@dataclass(frozen=True)
class Ended:
    """How a part's command ended.

    Attributes:
        code: its exit code; None: it was ended at its limit.
        took_s: seconds.
        content: its record; empty where it wrote none.
        said: what it printed.
    """

    code: int | None
    took_s: float
    content: Mapping[str, Any] = field(default_factory=dict)
    said: str = ""


@dataclass(frozen=True)
class Result:
    """A part and what came of it."""

    part: Part
    checks: Sequence[Check]
    ended: Ended | None = None

    @property
    def state(self) -> State:
        """Of all its checks together."""
        states = {check.state for check in self.checks}
        return next((state for state in State if state in states), State.NOT_RUN)

    @property
    def verdict(self) -> str:
        """For the table: the state, or ``in part`` where what was run is met and something was not run."""
        return "in part" if self.state is State.NOT_RUN and self.of(State.MET) else self.state.value

    def of(self, state: State) -> list[Check]:
        """Its checks in this state."""
        return [check for check in self.checks if check.state is state]

    @property
    def counts(self) -> Counter[State]:
        """Number of checks by state."""
        return Counter(check.state for check in self.checks)


def not_run(part: Part, reason: str) -> Result:
    """Nothing of the part was tried."""
    return Result(part, [Check("all of it", State.NOT_RUN, reason)])


def judge(part: Part, ended: Ended, limit_s: float, is_on_gpu: bool) -> Result:
    """By the record, the exit code, and what should be in the record."""
    rows = list(ended.content.get("rows", ()))
    checks = [check for row in rows for check in _of_row(row, is_on_gpu)]
    failed = ended.content.get("failed", {})
    checks += [Check(name, State.FAILED, _first_line(error)) for name, error in failed.items()]
    checks += [Check("ranks", State.FAILED, text) for text in ended.content.get("failures", ())]
    reason = f"the limit of {limit_s:.0f} s is reached"
    checks += [Check(f"start {name}", State.NOT_RUN, reason) for name in ended.content.get("not_run", ())]
    if ended.code is None:
        checks.append(Check("its end", State.NOT_RUN, f"ended at the limit of {limit_s:.0f} s"))
    checks += [Check(name, State.NOT_RUN, text) for name, text in {**part.absent, **absent_routes(ended.said)}.items()]
    names = [str(row["name"]) for row in rows]
    missing = [pattern for pattern in part.expected if not any(fnmatchcase(name, pattern) for name in names)]
    checks += [Check(pattern, State.NOT_RUN, "the record has no such row") for pattern in missing]
    is_explained = any(check.state in (State.FAILED, State.MISSED) for check in checks)
    is_incomplete = ended.code == INCOMPLETE and bool(ended.content.get("not_run"))
    # On a CPU, bars of time are not held, and a code of 1 may be theirs alone.
    has_missed = any(_is_missed(row) for row in rows)
    if ended.code and not (is_explained or is_incomplete or has_missed):
        tail = "\n".join(ended.said.splitlines()[-_TAIL_LINES:])
        checks.append(Check(f"exit code {ended.code}", State.FAILED, f"its output ends:\n{tail}"))
    return Result(part, checks, ended)


def absent_routes(said: str) -> dict[str, str]:
    """Routes that the benchmark of routes could not use, ``NAME is absent: REASON``."""
    lines = (line.partition(" is absent: ") for line in said.splitlines())
    return {f"route {name}": reason for name, found, reason in lines if found}


def exit_code(results: Sequence[Result]) -> int:
    """1: something failed or missed its bar; 3: something was not run; 0: all was run and met."""
    states = {check.state for result in results for check in result.checks}
    if states & {State.FAILED, State.MISSED}:
        return MISSED
    return 0 if states == {State.MET} else INCOMPLETE


def _of_row(row: Mapping[str, Any], is_on_gpu: bool) -> Iterator[Check]:
    """A row with a bar, of wrong elements, or neither, which is shown only."""
    name = str(row["name"])
    if row.get("bar"):
        if not is_on_gpu and row["unit"] in _TIMES:
            yield Check(f"bar of {name}", State.NOT_RUN, NO_TIMES)
        else:
            yield Check(name, State.MET if row["bar"]["met"] else State.MISSED, _in_words(row))
    elif "wrong" in row:
        is_right = not row["wrong"] and not row.get("error")
        problems = "; ".join((*row.get("problems", ()), *filter(None, [row.get("error")])))
        if is_right and row.get("cases") == 0:
            yield Check(name, State.NOT_RUN, "no case of it was tried")
        else:
            yield Check(name, State.MET if is_right else State.MISSED, problems or f"{row['wrong']} wrong")


def _is_missed(row: Mapping[str, Any]) -> bool:
    return bool(row.get("bar")) and not row["bar"]["met"]


def _in_words(row: Mapping[str, Any]) -> str:
    bar, samples, reference = row["bar"], sorted(row["samples"]), sorted(row["reference_samples"])
    median = f"{samples[len(samples) // 2]:.4g} {row['unit']}"
    beside = f", {row['reference']} {reference[len(reference) // 2]:.4g}" if reference else ""
    return f"{median}{beside}; {bar['measure']} at most {bar['at_most']:g}"


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""


__all__ = ["MISSED", "Check", "Ended", "Result", "State", "exit_code", "judge", "not_run"]
