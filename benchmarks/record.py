"""The record of a run: its samples, and on what they were taken, as JSON."""

from __future__ import annotations

import datetime
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, Kind
from sglang_fl.comm.tools.record import describe_machine, describe_versions, write

__all__ = ["ROOT", "record", "write"]

# For files that were unpacked from an archive.
COMMIT_VARIABLE = "BENCHMARKS_COMMIT"
ROOT = Path(__file__).resolve().parent.parent


def describe_gpus() -> list[str]:
    """Names of the GPUs that torch sees, in order; empty without torch or GPUs."""
    try:
        import torch
    except ImportError:
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def describe_commit() -> str:
    """The commit of this checkout, with ``+changes`` if tracked files differ from it; elsewhere COMMIT_VARIABLE."""
    try:
        commit = _git("rev-parse", "HEAD")
        return commit + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (FileNotFoundError, subprocess.CalledProcessError):
        return os.environ.get(COMMIT_VARIABLE, "")


def record(
    kind: Kind,
    figures: Sequence[Figure],
    command: str,
    needs_gpu: bool,
    commit: str = "",
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Everything about one benchmark's run; ``commit`` where it is known better than from here."""
    return {
        "kind": kind.value,
        "machine": describe_machine(),
        "gpu": describe_gpus() if needs_gpu else [],
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or describe_commit(),
        "versions": describe_versions(),
        "command": command,
        **({"notes": list(notes)} if notes else {}),
        "rows": [_row(figure) for figure in figures],
    }


def _row(figure: Figure) -> dict[str, Any]:
    bar: dict[str, Any] | None = None
    if figure.bar is not None:
        bar = {"measure": figure.bar.measure.value, "at_most": figure.bar.limit, "met": figure.is_met}
        if figure.bar.or_more_by is not None:
            bar["or_more_by"] = figure.bar.or_more_by
    return {
        "name": figure.name,
        "unit": figure.unit,
        "samples": list(figure.samples),
        "reference": figure.reference,
        "reference_samples": list(figure.reference_samples),
        "bar": bar,
    }


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
