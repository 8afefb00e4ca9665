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
from sglang_fl.aten.sweep.forms import NOT_SLOWER, Forms, Measured, form_of_text
from sglang_fl.aten.sweep.timing import NOT_TIMED, Times

# An operator is left to PyTorch if on any recorded shape its GPU time is more than so many times PyTorch's.
ALLOWED_RATIO = 1.02
NOT_REACHED = "not measured: the time limit was reached"
# Beyond so many times the allowed error a value is wrong, not rounded otherwise: profile full leaves it out as well.
WRONG_FACTOR = 100.0
# Outside of a graph a kept launch costs so much more on the host than PyTorch's own call, and a call that is looked at
# and handed back so much: what FlagGems takes there must save more on the GPU. Measured beside an H200.
LEAST_EAGER_GAIN_US = 5.0
HANDED_BACK_US = 1.5
# How long a matrix product takes its shape says, not its size; and FlagGems tries many kernels on each shape.
MATRIX_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "mv", "addmv"})


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

    def of_case(self, case: Case) -> Result:
        """The same measurement with the phases and numbers of calls of ``case``: of another recording of the call."""
        return replace(self, phases=_words(case.phases), calls=case.calls)

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
        is_slower = self.is_slower()
        gain_us = None if is_slower is None else -math.inf if is_slower else self.torch_us - self.gems_us
        return Measured(self.call, self.is_right(), is_exact, gain_us)

    def calls_in_graphs(self) -> int:
        """Recorded calls that a graph of decoding holds: those of a decoding step less those of its replay. A phase
        without a replay beside it, as of a recording on the host, counts whole."""
        counts = self.counts()
        return sum(
            max(count - counts.get(f"{phase}_replay", 0), 0) for phase, count in counts.items() if _is_step(phase)
        )

    def eager_calls(self) -> int:
        """Recorded calls outside of graphs: of prefill, of replays, and what sampling adds to a step."""
        counts = self.counts()
        prefill = sum(count for phase, count in counts.items() if "prefill" in phase)
        replays = sum(count for phase, count in counts.items() if phase.endswith("_replay"))
        sampled = sum(
            max(count - counts.get(phase.removesuffix("_sampled"), 0), 0)
            for phase, count in counts.items()
            if phase.endswith("_sampled")
        )
        return prefill + replays + sampled

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


class TableError(ValueError):
    """A file is no table of a sweep; the message says why."""


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
        """Read what :meth:`write` wrote.

        Raises:
            TableError: names the file and what is wrong with it.
            OSError: it cannot be read.
        """
        try:
            with path.open(newline="") as file:
                head = file.readline().removeprefix("# ").strip()
                origin = dict(item.split("=", 1) for item in head.split("; "))
                lacking = [name for name in _ORIGIN if name not in origin]
                if lacking:
                    raise ValueError(f"its first line does not say {', '.join(lacking)}")
                reader = csv.DictReader(file)
                if not reader.fieldnames:
                    raise ValueError("it has no columns")
                table = cls(origin, [_from_row(row) for row in reader])
            for result in table.results:
                result.counts()
        except (ValueError, KeyError, TypeError, csv.Error) as error:
            raise TableError(
                f"{path} is no table of a sweep ({type(error).__name__}: {error}). Make it with aten-sweep --out."
            ) from error
        return table

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
        """FlagGems' names of the operators that profile verified replaces, sorted: those of which FlagGems takes a
        recorded call, inside a graph or outside, and that are wrong nowhere but on empty calls.
        """
        return sorted({result.function for result in self.results if self.takes(result) or self.takes_eagerly(result)})

    def forms(self) -> Forms:
        """What the table says of calls."""
        return self._forms

    def eager(self) -> list[str]:
        """The ATen operators that profile verified replaces outside of graphs as well, sorted: what FlagGems saves on
        recorded calls is more than what looking at all of them costs.
        """
        saved: dict[str, float] = {}
        for result in self.results:
            is_taken = self._can_take(result, LEAST_EAGER_GAIN_US)
            us = result.torch_us - result.gems_us - LEAST_EAGER_GAIN_US if is_taken else -HANDED_BACK_US
            saved[result.operator] = saved.get(result.operator, 0.0) + result.eager_calls() * us
        return sorted(operator for operator, us in saved.items() if us > 0)

    def takes(self, result: Result) -> bool:
        """Whether FlagGems takes a recorded call inside graphs."""
        return result.calls_in_graphs() > 0 and self._can_take(result, NOT_SLOWER)

    def takes_eagerly(self, result: Result) -> bool:
        """Whether FlagGems takes a recorded call outside of graphs."""
        is_taken = result.eager_calls() > 0 and self._can_take(result, LEAST_EAGER_GAIN_US)
        return is_taken and result.operator in self._eager

    def _can_take(self, result: Result, least_gain_us: float) -> bool:
        return result.function not in self._broken and self._forms.take(form_of_text(result.call), least_gain_us)

    @cached_property
    def _eager(self) -> frozenset[str]:
        return frozenset(self.eager())

    @cached_property
    def _broken(self) -> frozenset[str]:
        wrong = {result.function for result in self.results if result.is_wrong() and not _is_empty(result)}
        return frozenset(wrong | MATRIX_PRODUCTS)

    @cached_property
    def _forms(self) -> Forms:
        usable = [result for result in self.results if result.function not in self._broken and not result.own_failure]
        return Forms(result.measured() for result in usable)

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
        own = self._own() or self.results
        return sum(self._taken_calls(result) for result in own), sum(result.calls for result in own)

    def called(self) -> list[str]:
        """The operators of :meth:`verified` of which FlagGems takes a call of the platform's own recording, sorted."""
        return sorted({result.function for result in self._own() if self._taken_calls(result)})

    def _taken_calls(self, result: Result) -> int:
        in_graphs = result.calls_in_graphs() if self.takes(result) else 0
        return in_graphs + (result.eager_calls() if self.takes_eagerly(result) else 0)

    def _own(self) -> list[Result]:
        """The results with the phases of the platform's own recording alone, those without any left out."""
        found = []
        for result in self.results:
            own = {phase: count for phase, count in result.counts().items() if _is_own(phase)}
            if own:
                found.append(replace(result, phases=_words(own), calls=sum(own.values())))
        return found


# What every table's first line says, of all that Table.origin may hold.
_ORIGIN = ("flag_gems", "card", "torch")
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


def _is_own(phase: str) -> bool:
    return not phase.startswith((EMPTY_INSTALL, PROBE))


def _is_step(phase: str) -> bool:
    return "decode" in phase and not phase.endswith(("_replay", "_sampled"))


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
