"""The benchmark harness: a missed bar fails the run, and nothing that was not measured passes for a figure."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from benchmarks.figures import Bar, Figure, alternate

ROOT = Path(__file__).parents[2]
LIMIT_S = 120


def figure(samples: list[float], reference: list[float], bar: Bar | None) -> Figure:
    return Figure("a figure", "ns", samples, reference, "a reference" if reference else "", bar)


@pytest.mark.parametrize(
    ("samples", "reference", "bar", "met"),
    [
        ([10, 20, 30], [10, 10, 10], Bar.ratio_at_most(2.0), True),
        ([10, 21, 30], [10, 10, 10], Bar.ratio_at_most(2.0), False),
        ([130, 120, 110], [100, 100, 100], Bar.difference_at_most(20), True),
        ([130, 121, 110], [100, 100, 100], Bar.difference_at_most(20), False),
        ([5, 4, 3], [], Bar.at_most(4), True),
        ([5, 4.1, 3], [], Bar.at_most(4), False),
        ([5], [1], None, True),
        # the larger of a ratio and a difference
        ([2.3, 2.19, 2.1], [2, 2, 2], Bar.ratio_at_most(1.05, or_more_by=0.2), True),
        ([2.3, 2.3, 2.1], [2, 2, 2], Bar.ratio_at_most(1.05, or_more_by=0.2), False),
        ([104, 104, 104], [100, 100, 100], Bar.ratio_at_most(1.05, or_more_by=0.2), True),
        ([106, 106, 106], [100, 100, 100], Bar.ratio_at_most(1.05, or_more_by=0.2), False),
        # pairs, not medians: the machine was slow in two rounds, for both alike
        ([30, 300, 300], [10, 100, 310], Bar.ratio_at_most(2.0), False),
    ],
)
def test_a_bar_holds_for_the_median_of_the_pairs(
    samples: list[float], reference: list[float], bar: Bar | None, met: bool
) -> None:
    assert figure(samples, reference, bar).is_met is met


@pytest.mark.parametrize(
    ("samples", "reference", "bar", "message"),
    [
        ([], [], Bar.at_most(1), "has no samples"),
        ([math.nan], [], Bar.at_most(1), "no finite numbers"),
        ([1.0], [math.inf], Bar.ratio_at_most(1), "no finite numbers"),
        ([1.0, 2.0], [1.0], Bar.ratio_at_most(1), "2 samples and 1 of its reference"),
        ([1.0], [], Bar.ratio_at_most(1), "no reference"),
        ([1.0], [0.0], Bar.ratio_at_most(1), "to which there is no ratio"),
    ],
)
def test_what_was_not_measured_is_no_figure(
    samples: list[float], reference: list[float], bar: Bar, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        figure(samples, reference, bar)


def test_subjects_take_turns_in_both_directions() -> None:
    order: list[str] = []

    def subject(name: str) -> float:
        order.append(name)
        return float(len(order))

    samples = alternate({"a": lambda: subject("a"), "b": lambda: subject("b")}, rounds=3, warm_up=1)
    assert order == ["b", "a", "a", "b", "b", "a", "a", "b"]
    assert samples == {"a": [3, 6, 7], "b": [4, 5, 8]}


def planted(folder: Path, name: str, limit: float, needs_gpu: bool = False) -> None:
    """A benchmark whose one figure is 3 against a reference of 2."""
    module = f'''
        """A planted benchmark."""
        from benchmarks.figures import Bar, Figure, Kind
        KIND, NEEDS_GPU = Kind.OPS, {needs_gpu}
        def run():
            return [Figure("planted", "us", [3.0, 3.0], [2.0, 2.0], "two", Bar.ratio_at_most({limit}))]
    '''
    (folder / f"bench_{name}.py").write_text(textwrap.dedent(module).lstrip())


def run_benchmarks(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", "--folder", str(folder), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def test_a_met_bar_exits_0_and_the_samples_are_kept(tmp_path: Path) -> None:
    planted(tmp_path, "good", 1.5)
    done = run_benchmarks(tmp_path, "good", "--json", str(tmp_path / "good.json"))
    assert done.returncode == 0, done.stderr
    assert "met" in done.stdout
    kept = json.loads((tmp_path / "good.json").read_text())
    assert set(kept) == {"kind", "machine", "gpu", "date", "commit", "versions", "command", "rows"}
    assert (kept["kind"], kept["command"]) == ("ops", "python -m benchmarks good")
    (row,) = kept["rows"]
    assert (row["name"], row["samples"], row["reference_samples"]) == ("planted", [3.0, 3.0], [2.0, 2.0])
    assert row["bar"] == {"measure": "ratio", "at_most": 1.5, "met": True}


def test_what_a_run_notes_is_kept(tmp_path: Path) -> None:
    """Given a benchmark whose run fills NOTES, then its record has them."""
    planted(tmp_path, "noting", 1.5)
    with (tmp_path / "bench_noting.py").open("a") as module:
        module.write("    \n\nNOTES, own = [], run\n\ndef run():\n    NOTES[:] = ['a note']\n    return own()\n")
    done = run_benchmarks(tmp_path, "noting", "--json", str(tmp_path / "noting.json"))
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "noting.json").read_text())["notes"] == ["a note"]


def test_a_missed_bar_exits_1_and_is_named(tmp_path: Path) -> None:
    """Its samples are kept all the same."""
    planted(tmp_path, "bad", 1.4)
    done = run_benchmarks(tmp_path, "bad", "--json", str(tmp_path / "bad.json"))
    assert done.returncode == 1
    assert "MISSED" in done.stdout
    assert "1 missed: bad: planted" in done.stdout
    assert json.loads((tmp_path / "bad.json").read_text())["rows"][0]["bar"]["met"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["typo"], "no benchmark named typo; there are good, other"),
        (["good", "other", "--json", "x.json"], "name exactly one"),
        (["--json", "x.json"], "name exactly one"),
    ],
)
def test_what_cannot_be_run_exits_2(arguments: list[str], message: str, tmp_path: Path) -> None:
    planted(tmp_path, "good", 1.5)
    planted(tmp_path, "other", 1.5)
    done = run_benchmarks(tmp_path, *arguments)
    assert done.returncode == 2
    assert message in done.stdout


def test_a_benchmark_that_needs_a_gpu_runs_only_when_it_is_named(tmp_path: Path) -> None:
    """The one without a name list leaves it out, or its missed bar would exit 1."""
    planted(tmp_path, "gpu", 0.1, needs_gpu=True)
    planted(tmp_path, "host", 1.5)
    done = run_benchmarks(tmp_path)
    assert done.returncode == 0, done.stdout
    assert "gpu" not in done.stdout
    assert "host" in done.stdout


def test_no_benchmark_at_all_is_not_a_success(tmp_path: Path) -> None:
    done = run_benchmarks(tmp_path)
    assert done.returncode == 2
    assert "holds no bench_NAME.py" in done.stdout
