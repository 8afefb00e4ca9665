"""The table as a picture: per operator the GPU times' ratio on every recorded call; matplotlib draws it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from sglang_fl.aten.sweep.results import ALLOWED_RATIO, Table


class PlotError(RuntimeError):
    """The picture cannot be drawn; the message says why."""


def draw(table: Table, path: Path) -> None:
    """Draw ``table`` into ``path``: a row per operator, a dot per call, good ones apart from excluded ones.

    Raises:
        PlotError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    good = set(table.verified())
    measured = [result for result in table.results if result.ratio == result.ratio]
    names = sorted({result.function for result in measured}, key=lambda name: (name not in good, name), reverse=True)
    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.24 * len(names)))
    for result in measured:
        colour = "tab:green" if result.function in good else "tab:red"
        axes.plot(result.ratio, names.index(result.function), "o", color=colour, markersize=4, alpha=0.7)
    axes.axvline(ALLOWED_RATIO, color="grey", linewidth=1)
    axes.set_xscale("log")
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_xlabel("GPU time, FlagGems / PyTorch (one dot a recorded call); grey: what the rule allows")
    axes.set_title(f"FlagGems {table.origin['flag_gems']} on {table.origin['card']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _pyplot() -> Any:
    try:
        importlib.import_module("matplotlib").use("agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise PlotError(f"it needs matplotlib: pip install matplotlib ({error})") from error
