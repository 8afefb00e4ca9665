"""The benchmark's table in nccl-tests' columns, the same as CSV and as JSON rows, and two files beside each other."""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_fl.comm.errors import CommError
from sglang_fl.comm.tools.measure import Result

_LEFT = f"{'size':>12}{'count':>12}{'type':>15}{'redop':>7}{'root':>6}{'backend':>9}{'mode':>7}"
_RIGHT = f"{'time':>11}{'algbw':>9}{'busbw':>9}{'#wrong':>8}"
_UNITS = f"{'(us)':>11}{'(GB/s)':>9}{'(GB/s)':>9}{'':>8}"
_ABSENT = f"{'N/A':>11}{'N/A':>9}{'N/A':>9}{'N/A':>8}"
HEAD = (
    f"#{'':>{len(_LEFT) - 1}}{'out-of-place':>{len(_RIGHT)}}{'in-place':>{len(_RIGHT)}}",
    f"#{_LEFT[1:]}{_RIGHT}{_RIGHT}",
    f"#{'(B)':>11}{'(elements)':>12}{'':>{len(_LEFT) - 24}}{_UNITS}{_UNITS}".rstrip(),
)


def line(out_of_place: Result | None, in_place: Result | None) -> str:
    """Both forms of one operation, size, backend and mode; at least one is there."""
    one = out_of_place or in_place
    if one is None:
        raise ValueError("a line needs a result")
    left = (
        f"{one.size_bytes:>12}{one.count:>12}{one.dtype:>15}{one.operation.redop:>7}{one.operation.root:>6}"
        f"{one.backend:>9}{one.mode.value:>7}"
    )
    return left + _numbers(out_of_place) + _numbers(in_place)


def _numbers(result: Result | None) -> str:
    if result is None:
        return _ABSENT
    time = f"{result.time_us:.2f}" if result.time_us < 10_000 else f"{result.time_us:.0f}"
    return f"{time:>11}{result.algorithm_gb_s:>9.2f}{result.bus_gb_s:>9.2f}{result.wrong:>8}"


def as_row(result: Result) -> dict[str, Any]:
    """One row of the record: the fields that every benchmark of this project has, and this one's own."""
    form = "in place" if result.in_place else "out of place"
    operation = result.operation
    return {
        "name": f"{operation.name} {result.size_bytes} B {result.dtype}, {result.backend}, {result.mode.value}, {form}",
        "unit": "us",
        "samples": list(result.samples_us),
        "reference": "",
        "reference_samples": [],
        "bar": None,
        "operation": operation.name,
        "backend": result.backend,
        "mode": result.mode.value,
        "in_place": result.in_place,
        "world_size": result.world_size,
        "size_bytes": result.size_bytes,
        "count": result.count,
        "dtype": result.dtype,
        "redop": operation.redop,
        "root": int(operation.root),
        "time_us": result.time_us,
        "algbw_gb_s": result.algorithm_gb_s,
        "busbw_gb_s": result.bus_gb_s,
        "wrong": result.wrong,
    }


_NOT_IN_CSV = ("name", "unit", "samples", "reference", "reference_samples", "bar")


def write_csv(results: Sequence[Result], path: Path) -> None:
    """One line a result, the first one names the columns."""
    rows = [{key: value for key, value in as_row(result).items() if key not in _NOT_IN_CSV} for result in results]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)


CHANGE = 0.05  # below it a difference is not called one


@dataclass(frozen=True)
class Pair:
    """The same measurement in two files: a time a cycle, us, and whether a result was wrong in either."""

    name: str
    before_us: tuple[float, ...]
    after_us: tuple[float, ...]
    is_wrong: bool = False

    @property
    def ratio(self) -> float:
        """Second over first, of the medians."""
        return statistics.median(self.after_us) / statistics.median(self.before_us)

    @property
    def verdict(self) -> str:
        """``faster`` or ``slower`` where the cycles do not overlap and the medians differ by more; else empty."""
        if self.is_wrong:
            return "WRONG"
        if self.ratio > 1 + CHANGE and min(self.after_us) > max(self.before_us):
            return "slower"
        if self.ratio < 1 / (1 + CHANGE) and max(self.after_us) < min(self.before_us):
            return "faster"
        return ""

    def __str__(self) -> str:
        before, after = statistics.median(self.before_us), statistics.median(self.after_us)
        return f"{self.name:<64}{before:>12.2f}{after:>12.2f}{self.ratio:>8.2f}  {self.verdict}".rstrip()


COMPARISON_HEAD = f"{'#':<64}{'first (us)':>12}{'second (us)':>12}{'ratio':>8}"


def summary(pairs: Sequence[Pair]) -> str:
    """One line about all of them; at least one."""
    verdicts = [pair.verdict for pair in pairs]
    counted = [f"{verdicts.count(word)} {word}" for word in ("faster", "slower", "WRONG") if word in verdicts]
    mean = statistics.geometric_mean(pair.ratio for pair in pairs)
    others = verdicts.count("")
    return f"# {len(pairs)} rows: {', '.join([*counted, f'{others} alike'])}; geometric mean of the ratios {mean:.2f}"


def compared(first: Path, second: Path) -> Iterator[Pair]:
    """What both files have, in the first one's order.

    Raises:
        CommError: one of them cannot be read or is no record of this benchmark, or they have nothing in common.
    """
    before, after = _rows(first), _rows(second)
    common = [name for name in before if name in after]
    if not common:
        raise CommError(f"{first} and {second} have no measurement in common; compare runs of the same arguments")
    for name in common:
        (one, one_is_wrong), (other, other_is_wrong) = before[name], after[name]
        yield Pair(name, one, other, one_is_wrong or other_is_wrong)


def _rows(path: Path) -> dict[str, tuple[tuple[float, ...], bool]]:
    """Name to the cycles' times and whether a result was wrong."""
    try:
        rows = _listed(_content(path))
        return {_name(row): (_times(row), bool(row["wrong"])) for row in rows}
    except ValueError as error:
        raise CommError(f"{path} {error}; --compare takes two files that this benchmark wrote with --json") from error


def _content(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
        if not text.strip():
            raise ValueError("is empty")
        return json.loads(text)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError("is no text in UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON (line {error.lineno}, column {error.colno}: {error.msg})") from error


def _listed(content: Any) -> list[Any]:
    rows = content.get("rows") if isinstance(content, dict) else None
    if not isinstance(rows, list):
        raise ValueError("is JSON of another kind: it has no list of rows")
    if not rows:
        raise ValueError("has no rows: nothing was measured in that run")
    return rows


def _name(row: Any) -> str:
    missing = [key for key in ("name", "samples", "wrong") if not isinstance(row, dict) or key not in row]
    if missing:
        raise ValueError(f"is JSON of another kind: it has a row without {', '.join(missing)}")
    return str(row["name"])


def _times(row: dict[str, Any]) -> tuple[float, ...]:
    samples = row["samples"]
    numbers = samples if isinstance(samples, list) else []
    if not numbers or not all(isinstance(each, (int, float)) and 0 < each < math.inf for each in numbers):
        raise ValueError(f"has no times in its row {row['name']!r}")
    return tuple(map(float, numbers))
