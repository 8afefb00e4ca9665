"""The benchmark of dispatch: it measures what it says, and a planted fault misses its bar and is reported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import bench_dispatch
from benchmarks.bench_dispatch import Fault, call_figures, import_figures
from benchmarks.figures import Figure

ROOT = Path(__file__).parents[2]
LIMIT_S = 120.0  # against a hang


def missed(figures: list[Figure]) -> set[str]:
    """The figures that did not keep their bar."""
    return {figure.name for figure in figures if not figure.is_met}


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Fault.CALL, {"bound, 10 registered", "bound, 200 registered"}),
        (Fault.GROWTH, {"bound, 200 registered against 10"}),
    ],
)
def test_a_planted_fault_of_a_call_misses_its_bar(fault: Fault, expected: set[str]) -> None:
    """Given work in each call that is many times what is allowed, then the figures that are about it are missed."""
    assert expected <= missed(call_figures(fault, rounds=3, calls=50))


def test_a_slow_registration_misses_its_bar() -> None:
    """Given a registration that takes more than twice what is allowed, then its figure is missed."""
    figures = import_figures(Fault.IMPORT, rounds=1, base="import torch")
    assert missed(figures) == {"import and registration of all backends"}


def test_every_figure_has_its_reference_of_the_same_rounds() -> None:
    """Given no fault, then each figure is paired, with as many samples as rounds; bars are those of the project."""
    figures = call_figures(rounds=2, calls=10) + import_figures(rounds=1, base="import torch")
    assert [len(figure.samples) for figure in figures] == [2] * 7 + [1]
    assert all(figure.reference for figure in figures)
    limits = {figure.name: figure.bar.limit for figure in figures if figure.bar is not None}
    assert limits["bound, 200 registered"] == 150
    assert limits["import and registration of all backends"] == 150
    assert all(sample > reference for figure in figures[-1:] for sample, reference in _pairs(figure))


def _pairs(figure: Figure) -> list[tuple[float, float]]:
    return list(zip(figure.samples, figure.reference_samples, strict=True))


def test_a_call_that_does_not_arrive_is_no_figure() -> None:
    """Given a function that is not the implementation, when measured, then an error."""
    with pytest.raises(RuntimeError, match="did not reach the implementation"):
        bench_dispatch.loop_ns(lambda layer, x, residual: residual, 1)


def test_a_process_that_fails_is_no_figure() -> None:
    """Given a base that cannot be imported, when measured, then an error with the process's words."""
    with pytest.raises(RuntimeError, match="No module named 'a_module_that_nobody_has'"):
        import_figures(rounds=0, base="import a_module_that_nobody_has")


def test_it_is_listed_with_the_others() -> None:
    """Given the benchmarks' command line, then dispatch is among them, with its first line."""
    command = [sys.executable, "-m", "benchmarks", "--list"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("dispatch")]
    assert "ops" in line
    assert "what it adds to a call of a bound operator" in line
