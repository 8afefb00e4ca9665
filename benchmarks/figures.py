"""Figures: samples beside a reference of the same run, a bar that they meet or miss, and the table of both.

A benchmark is a module ``bench_NAME.py`` of this folder with

    KIND = Kind.COMM                      # what it is about
    NEEDS_GPU = False
    def run() -> list[Figure]: ...

In every figure less is better: times, bytes, ratios of times.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from rich.console import Console
from rich.table import Table


class Kind(str, Enum):
    """What a benchmark is about."""

    COMM = "comm"
    OPS = "ops"
    E2E = "e2e"


class Measure(str, Enum):
    """What a bar is held against."""

    RATIO = "ratio"
    DIFFERENCE = "difference"
    VALUE = "value"


@dataclass(frozen=True)
class Bar:
    """The largest ratio to, difference from the reference, or value that counts as met.

    Attributes:
        measure: what is limited.
        limit: its largest value.
        or_more_by: for a ratio: a difference, in the figure's unit, up to which the bar is met at any ratio.
    """

    measure: Measure
    limit: float
    or_more_by: float | None = None

    @classmethod
    def ratio_at_most(cls, limit: float, or_more_by: float | None = None) -> Bar:
        """samples / reference, no unit; or samples - reference at most ``or_more_by``: the larger of both counts."""
        return cls(Measure.RATIO, limit, or_more_by)

    @classmethod
    def difference_at_most(cls, limit: float) -> Bar:
        """samples - reference, in the figure's unit."""
        return cls(Measure.DIFFERENCE, limit)

    @classmethod
    def at_most(cls, limit: float) -> Bar:
        """samples alone, in the figure's unit."""
        return cls(Measure.VALUE, limit)


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of some samples."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Quartiles by linear interpolation; of one sample all three are it."""
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0])
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(low, median, high)

    def __str__(self) -> str:
        return f"{_short(self.median)} ({_short(self.low)} to {_short(self.high)})"


@dataclass(frozen=True)
class Figure:
    """One measured quantity.

    Attributes:
        name: what was measured.
        unit: of the samples, such as ns or MiB.
        samples: one number a round.
        reference_samples: the reference's number of the same round; empty where there is no reference.
        reference: what the reference is.
        bar: what must hold; None for a figure that is only shown.

    Raises:
        ValueError: no samples, a number that is none, rounds without their pair, a bar without what it needs.
    """

    name: str
    unit: str
    samples: Sequence[float]
    reference_samples: Sequence[float] = ()
    reference: str = ""
    bar: Bar | None = None

    def __post_init__(self) -> None:
        if not self.samples:
            raise ValueError(f"figure {self.name!r} has no samples")
        if not all(math.isfinite(sample) for sample in (*self.samples, *self.reference_samples)):
            raise ValueError(f"figure {self.name!r} has samples that are no finite numbers")
        if self.reference_samples and len(self.reference_samples) != len(self.samples):
            raise ValueError(
                f"figure {self.name!r} has {len(self.samples)} samples and {len(self.reference_samples)} of its "
                "reference; both are measured in each round"
            )
        if bool(self.reference_samples) != bool(self.reference):
            raise ValueError(f"figure {self.name!r} must name its reference exactly if it has one")
        if self.bar is not None and self.bar.measure is not Measure.VALUE and not self.reference_samples:
            raise ValueError(f"figure {self.name!r} has a bar on its {self.bar.measure.value} and no reference")
        if any(sample <= 0 for sample in self.reference_samples) and self._measures_ratio:
            raise ValueError(f"figure {self.name!r} has a reference of 0 or less, to which there is no ratio")

    @property
    def _measures_ratio(self) -> bool:
        return self.bar is not None and self.bar.measure is Measure.RATIO

    def _pairs(self) -> list[tuple[float, float]]:
        return list(zip(self.samples, self.reference_samples, strict=True))

    @property
    def compared(self) -> Spread:
        """What the bar is held against, from each round's pair; the ratio where there is no bar."""
        measure = self.bar.measure if self.bar is not None else Measure.RATIO
        if measure is Measure.VALUE or not self.reference_samples:
            return Spread.of(self.samples)
        if measure is Measure.DIFFERENCE:
            return self._difference
        return Spread.of([sample / reference if reference else math.inf for sample, reference in self._pairs()])

    @property
    def _difference(self) -> Spread:
        return Spread.of([sample - reference for sample, reference in self._pairs()])

    @property
    def is_met(self) -> bool:
        """Whether the median keeps the bar; a figure without one is never missed."""
        if self.bar is None or self.compared.median <= self.bar.limit:
            return True
        return self.bar.or_more_by is not None and self._difference.median <= self.bar.or_more_by


def alternate(subjects: Mapping[str, Callable[[], float]], rounds: int, warm_up: int = 3) -> dict[str, list[float]]:
    """Measure all subjects in every round, in turns forwards and backwards, so that drift falls on all alike.

    Args:
        subjects: name -> function that measures once and returns the sample.
        rounds: samples of each subject.
        warm_up: rounds before, whose samples are dropped.
    """
    samples: dict[str, list[float]] = {name: [] for name in subjects}
    for number in range(-warm_up, rounds):
        names = list(subjects)
        order = names if number % 2 == 0 else names[::-1]
        for name in order:
            sample = subjects[name]()
            if number >= 0:
                samples[name].append(sample)
    return samples


def show(title: str, figures: Sequence[Figure], console: Console) -> None:
    """Print the table: median and quartiles over the rounds."""
    table = Table(title=title, title_justify="left", caption="median (quartiles) over the rounds; less is better")
    for column in ("figure", "unit", "value", "reference", "compared", "bar", ""):
        table.add_column(column, overflow="fold")
    for figure in figures:
        table.add_row(*_row(figure))
    console.print(table)


def _row(figure: Figure) -> tuple[str, ...]:
    reference = compared = bar = verdict = ""
    if figure.reference_samples:
        reference = f"{figure.reference}: {Spread.of(figure.reference_samples)}"
        measure = figure.bar.measure if figure.bar is not None else Measure.RATIO
        compared = f"{measure.value} {figure.compared}" if measure is not Measure.VALUE else ""
    if figure.bar is not None:
        bar = f"{figure.bar.measure.value} at most {_short(figure.bar.limit)}"
        if figure.bar.or_more_by is not None:
            bar += f", or {_short(figure.bar.or_more_by)} {figure.unit} more"
        verdict = "[green]met[/green]" if figure.is_met else "[bold red]MISSED[/bold red]"
    return (figure.name, figure.unit, str(Spread.of(figure.samples)), reference, compared, bar, verdict)


def _short(value: float) -> str:
    """Four significant digits, without an exponent where people would not write one."""
    return f"{value:.4g}" if abs(value) < 10_000 else f"{value:.0f}"
