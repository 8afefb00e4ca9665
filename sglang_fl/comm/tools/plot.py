"""Latency and bus bandwidth over size as a picture; matplotlib draws it, where it is installed."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_fl.comm.errors import CommError
from sglang_fl.comm.tools.measure import Result


def load_pyplot() -> Any:
    """matplotlib's pyplot, drawing into files.

    Raises:
        CommError: it is not installed.
    """
    try:
        importlib.import_module("matplotlib").use("agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise CommError(f"--plot needs matplotlib: pip install matplotlib ({error})") from error


def draw(results: Sequence[Result], path: Path) -> None:
    """One curve an operation, backend, mode and form: time on the left, bus bandwidth on the right."""
    pyplot = load_pyplot()
    figure, (times, bandwidths) = pyplot.subplots(1, 2, figsize=(13, 5))
    curves: dict[str, list[Result]] = {}
    for result in results:
        form = "in place" if result.in_place else "out of place"
        label = f"{result.operation.name}, {result.backend}, {result.mode.value}, {form}"
        curves.setdefault(label, []).append(result)
    for label, points in curves.items():
        sizes = [point.size_bytes for point in points]
        times.plot(sizes, [point.time_us for point in points], marker=".", label=label)
        bandwidths.plot(sizes, [point.bus_gb_s for point in points], marker=".", label=label)
    for axes, name in ((times, "time (us)"), (bandwidths, "bus bandwidth (GB/s)")):
        axes.set(xlabel="size (bytes)", ylabel=name, xscale="log")
        axes.grid(visible=True, alpha=0.3)
    times.set_yscale("log")
    times.legend(fontsize="small")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
