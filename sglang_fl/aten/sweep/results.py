"""The result of one case, the rule that judges it, and the table of all of them."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sglang_fl.aten.sweep.cases import EMPTY_INSTALL, PROBE, Case, merge_origins
from sglang_fl.aten.sweep.errors import Errors
from sglang_fl.aten.sweep.forms import Forms, Measured, form_of_text
from sglang_fl.aten.sweep.timing import NOT_TIMED, Times

# An operator is left to PyTorch if on any recorded shape its GPU time is more than so many times PyTorch's.
ALLOWED_RATIO = 1.02
NOT_REACHED = "not measured: the time limit was reached"
# Beyond so many times the allowed error a value is wrong, not rounded otherwise: profile full leaves it out as well.
WRONG_FACTOR = 100.0
# Profile verified replaces an operator if its measured forms hold so much of the operator's recorded calls: each other
# call pays for being looked at and handed back.
LEAST_SHARE = 0.9


@dataclass(frozen=True)
class Result:
    """One row of the table; times in microseconds a call, errors absolute.

    operator: the ATen operator. function: FlagGems' name of it, which lists hold. call: shapes and dtypes. phases:
    phase and number of calls. failure: why there are no numbers. own_failure: PyTorch's own call could not be made
    again, so the case says nothing. how: ``graph``, ``eager`` or ``not timed`` (probes). first_call_s: seconds of the
    first calls, with compilation.
    """

    operator: str
    function: str
    call: str
    phases: str
    calls: int
    failure: str = ""
    own_failure: bool = False
    reference: str = ""
    torch_error: float = math.nan
    gems_error: float = math.nan
    allowed_error: float = math.nan
    differs: str = ""
    how: str = ""
    torch_us: float = math.nan
    gems_us: float = math.nan
    ratio: float = math.nan
    ratio_low: float = math.nan
    ratio_high: float = math.nan
    pairs: int = 0
    torch_host_us: float = math.nan
    gems_host_us: float = math.nan
    first_call_s: float = math.nan

    @classmethod
    def failed(cls, case: Case, function: str, failure: str, own: bool = False) -> Result:
        """The result of a case without numbers."""
        return cls(**_about(case, function), failure=failure, own_failure=own)

    @classmethod
    def of(cls, case: Case, function: str, errors: Errors, times: Times, first_call_s: float) -> Result:
        """The result of a case that ran."""
        return cls(
            **_about(case, function),
            reference=errors.reference,
            torch_error=errors.torch_error,
            gems_error=errors.gems_error,
            allowed_error=errors.allowed,
            differs=errors.differs,
            how=times.how,
            torch_us=round(times.torch_us, 3),
            gems_us=round(times.gems_us, 3),
            ratio=round(times.ratio, 4),
            ratio_low=round(times.spread[0], 4),
            ratio_high=round(times.spread[1], 4),
            pairs=times.pairs,
            torch_host_us=round(times.torch_host_us, 2),
            gems_host_us=round(times.gems_host_us, 2),
            first_call_s=round(first_call_s, 2),
        )

    def counts(self) -> dict[str, int]:
        """Phase to number of calls."""
        pairs = (entry.rpartition(":") for entry in self.phases.split())
        return {phase: int(count) for phase, _, count in pairs}

    def is_wrong(self) -> bool:
        """Whether FlagGems' kernel failed where PyTorch's did not, or its values are no rounding of the right ones."""
        if self.own_failure or self.failure == NOT_REACHED:
            return False
        return bool(self.failure) or self.gems_error > WRONG_FACTOR * self.allowed_error

    def is_right(self) -> bool:
        """Whether FlagGems' values are within twice PyTorch's own error, of the same dtype and layout."""
        return not self.failure and not self.differs and self.gems_error <= self.allowed_error

    def is_slower(self) -> bool | None:
        """Whether the GPU time is over the allowed ratio; None where it was not taken."""
        timed = not self.failure and self.how != NOT_TIMED
        return not self.ratio <= ALLOWED_RATIO if timed else None

    def measured(self) -> Measured:
        """What this says of its form."""
        is_exact = self.is_right() and self.gems_error == self.torch_error == 0.0
        return Measured(self.call, self.is_right(), is_exact, self.is_slower())

    def verdict(self) -> str:
        """Why this case excludes its operator, or an empty text."""
        if self.own_failure:
            return ""
        if self.failure:
            return self.failure
        if self.differs:
            return self.differs
        if not self.is_right():
            return (
                f"error {self.gems_error:.3g}, PyTorch's own {self.torch_error:.3g}, allowed {self.allowed_error:.3g}"
            )
        if self.is_slower():
            return f"GPU time {self.ratio:.3f} x PyTorch's"
        return ""


@dataclass(frozen=True)
class Table:
    """All results with what they were measured on: FlagGems' version, card, torch, triton, model, SGLang."""

    origin: dict[str, str]
    results: list[Result]

    def write(self, path: Path) -> None:
        """Write as CSV; the first line is a comment with the origin."""
        with path.open("w", newline="") as file:
            file.write("# " + "; ".join(f"{name}={value}" for name, value in self.origin.items()) + "\n")
            writer = csv.DictWriter(file, [*COLUMNS, "excluded_because"], lineterminator="\n")
            writer.writeheader()
            for result in self.results:
                row = {name: _cell(value) for name, value in asdict(result).items()}
                writer.writerow(row | {"excluded_because": result.verdict()})

    @classmethod
    def read(cls, path: Path) -> Table:
        """Read what :meth:`write` wrote."""
        with path.open(newline="") as file:
            head = file.readline().removeprefix("# ").strip()
            origin = dict(item.split("=", 1) for item in head.split("; "))
            return cls(origin, [_from_row(row) for row in csv.DictReader(file)])

    @classmethod
    def merged(cls, tables: Sequence[Table]) -> Table:
        """One table of several sweeps; of a call that more than one measured, the slower measurement."""
        rows: dict[tuple[str, str], Result] = {}
        for table in tables:
            prefix = EMPTY_INSTALL if table.origin.get("recorded_on") == "host" else ""
            for result in table.results:
                phases = Counter({prefix + phase: count for phase, count in result.counts().items()})
                known = rows.get((result.operator, result.call))
                slower = result if known is None or known.how == NOT_TIMED or result.ratio > known.ratio else known
                total = phases + Counter({} if known is None else known.counts())
                rows[result.operator, result.call] = replace(slower, phases=_words(total), calls=total.total())
        return cls(merge_origins([table.origin for table in tables]), sort_results(rows.values()))

    def verified(self) -> list[str]:
        """FlagGems' names of the operators that profile verified replaces, sorted: of whose recorded calls
        :data:`LEAST_SHARE` are of forms that are right and not slower, and that are wrong nowhere but on empty calls.
        """
        return sorted(self._taken)

    def forms(self) -> Forms:
        """What the table says of the calls of the operators in :meth:`verified`."""
        return self._forms

    @cached_property
    def _forms(self) -> Forms:
        broken = {result.function for result in self.results if result.is_wrong() and not _is_empty(result)}
        usable = [result for result in self.results if result.function not in broken and not result.own_failure]
        return Forms(result.measured() for result in usable)

    @cached_property
    def _taken(self) -> dict[str, int]:
        """FlagGems' name of each verified operator to its recorded calls that FlagGems takes."""
        taken: Counter[str] = Counter()
        recorded: Counter[str] = Counter()
        recorded_here = {result.function for result in self.results if _own_calls(result)}
        for result in self.results:
            # An operator that only the empty install calls is judged by that.
            counts = _own_calls(result) if result.function in recorded_here else result.calls
            if result.own_failure or result.how == NOT_TIMED or _is_empty(result):
                continue
            recorded[result.function] += counts
            taken[result.function] += counts if self._forms.take(form_of_text(result.call)) else 0
        return {name: count for name, count in taken.items() if count and count >= LEAST_SHARE * recorded[name]}

    def wrong(self) -> list[str]:
        """FlagGems' names of the operators that are wrong on some case, sorted: what profile full leaves out."""
        return sorted({result.function for result in self.results if result.is_wrong()})

    def excluded(self) -> dict[str, list[str]]:
        """FlagGems' name to the reasons, one for each case that excludes it."""
        found: dict[str, list[str]] = {}
        for result in self.results:
            verdict = result.verdict()
            if verdict:
                found.setdefault(result.function, []).append(f"{result.call}: {verdict}")
        return found

    def call_share(self) -> tuple[int, int]:
        """Recorded calls that FlagGems takes, and all recorded calls that FlagGems has a kernel for.

        Those of the platform's own recording, where the table holds one.
        """
        own = [_own_calls(result) for result in self.results]
        calls = own if any(own) else [result.calls for result in self.results]
        recorded_here = {result.function for result, count in zip(self.results, own, strict=True) if count}
        functions = recorded_here if any(own) else set(self._taken)
        return sum(count for name, count in self._taken.items() if name in functions), sum(calls)

    def called(self) -> list[str]:
        """The operators of :meth:`verified` that the platform's own recording calls, sorted."""
        return sorted(set(self._taken) & {result.function for result in self.results if _own_calls(result)})


COLUMNS = [column.name for column in fields(Result)]
_CONVERSIONS: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": lambda text: text == "yes",
}


def _about(case: Case, function: str) -> dict[str, Any]:
    return {
        "operator": case.operator,
        "function": function,
        "call": case.describe(),
        "phases": _words(case.phases),
        "calls": case.calls,
    }


def _words(phases: Mapping[str, int]) -> str:
    return " ".join(f"{phase}:{count}" for phase, count in sorted(phases.items()))


def _own_calls(result: Result) -> int:
    return sum(count for phase, count in result.counts().items() if not phase.startswith((EMPTY_INSTALL, PROBE)))


def _is_empty(result: Result) -> bool:
    return form_of_text(result.call).has_empty


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return "" if math.isnan(value) else repr(value)
    return str(value)


def _from_row(row: dict[str, str]) -> Result:
    values: dict[str, Any] = {}
    for column in fields(Result):
        text = row[column.name]
        if column.type == "float" and not text:
            continue
        values[column.name] = _CONVERSIONS[str(column.type)](text)
    return Result(**values)


def sort_results(results: Iterable[Result]) -> list[Result]:
    """By operator, then by call: two tables compare line by line."""
    return sorted(results, key=lambda result: (result.operator, result.call))
