"""Latency and bus bandwidth over size as a picture; matplotlib draws it, where it is installed."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_fl.comm.errors import CommError
from sglang_fl.comm.tools.measure import Result

_ROW_INCHES = 3.4
_LINES = {False: "-", True: "--"}
_FORMS = {False: "out of place", True: "in place"}


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


def require_format(path: Path) -> None:
    """Found out before the run, not after it.

    Raises:
        CommError: matplotlib is not installed, or the suffix of ``path`` is no format of it.
    """
    load_pyplot()
    known = importlib.import_module("matplotlib.backend_bases").FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise CommError(f"--plot {path}: the suffix decides the format; it may be .{', .'.join(sorted(known))}")


def draw(results: Sequence[Result], path: Path) -> None:
    """One row an operation, time on the left, bus bandwidth on the right; a colour a backend and mode, dashed in place.

    The suffix of ``path`` decides the format: png, pdf, svg.

    Raises:
        CommError: matplotlib is not installed.
    """
    pyplot = load_pyplot()
    operations = list(dict.fromkeys(each.operation.name for each in results))
    subjects = list(dict.fromkeys((each.backend, each.mode) for each in results))
    size = (13, _ROW_INCHES * len(operations) + 0.8)
    figure, rows = pyplot.subplots(len(operations), 2, figsize=size, squeeze=False, layout="constrained")
    for row, name in zip(rows, operations, strict=True):
        own = [each for each in results if each.operation.name == name]
        _row(row, own, subjects)
    handles: dict[str, Any] = {}
    for axes in rows[:, 0]:
        found, names = axes.get_legend_handles_labels()
        handles.update(zip(names, found, strict=True))
    labels = list(handles)
    figure.legend(handles.values(), labels, loc="outside lower center", ncols=min(4, len(labels)), fontsize="small")
    ranks, dtype = results[0].world_size, results[0].dtype
    figure.suptitle(f"{ranks} ranks, {dtype}")
    try:
        figure.savefig(path)
    finally:
        pyplot.close(figure)


def _row(row: Sequence[Any], results: Sequence[Result], subjects: Sequence[tuple[str, Any]]) -> None:
    times, bandwidths = row
    for number, (backend, mode) in enumerate(subjects):
        for in_place in (False, True):
            points = [each for each in results if (each.backend, each.mode, each.in_place) == (backend, mode, in_place)]
            if not points:
                continue
            style = {"color": f"C{number}", "linestyle": _LINES[in_place], "marker": "."}
            sizes = [point.size_bytes for point in points]
            label = f"{backend}, {mode.value}, {_FORMS[in_place]}"
            times.plot(sizes, [point.time_us for point in points], label=label, **style)
            bandwidths.plot(sizes, [point.bus_gb_s for point in points], **style)
    sizes = sorted({each.size_bytes for each in results})
    for axes, name in ((times, "time (us)"), (bandwidths, "bus bandwidth (GB/s)")):
        axes.set(xlabel="size (bytes)", ylabel=name, title=results[0].operation.name)
        axes.set_xscale("log", base=2)
        every = -(-len(sizes) // 12)
        axes.set_xticks(sizes[::every], [_short(size) for size in sizes[::every]])
        axes.grid(visible=True, alpha=0.3)
    times.set_yscale("log")
    bandwidths.set_ylim(bottom=0)


def _short(size: int) -> str:
    for unit, name in ((2**30, "G"), (2**20, "M"), (2**10, "K")):
        if size >= unit and size % unit == 0:
            return f"{size // unit}{name}"
    return str(size)
