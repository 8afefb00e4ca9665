"""The record of a run: its samples, and on what they were taken, as JSON."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, Kind

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("sglang_fl", "sglang", "torch", "triton", "flag_gems", "cffi")


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory and kernel; no name of the machine."""
    cpu = next((line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if "model name" in line), "")
    memory_kib = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if "MemTotal" in line), 0)
    return {
        "cpu": cpu or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_kib / 2**20, 1),
        "kernel": platform.release(),
    }


def describe_gpus() -> list[str]:
    """Names of the GPUs that torch sees, in order; empty without torch or GPUs."""
    try:
        import torch
    except ImportError:
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def describe_versions() -> dict[str, str]:
    """Python and the packages that the figures depend on, where they are installed."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def describe_commit() -> str:
    """The commit of this checkout, with ``+changes`` if tracked files differ from it; empty outside of one."""
    try:
        commit = _git("rev-parse", "HEAD")
        return commit + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (FileNotFoundError, subprocess.CalledProcessError):
        return ""


def record(kind: Kind, figures: Sequence[Figure], command: str, needs_gpu: bool) -> dict[str, Any]:
    """Everything about one benchmark's run."""
    return {
        "kind": kind.value,
        "machine": describe_machine(),
        "gpu": describe_gpus() if needs_gpu else [],
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": describe_commit(),
        "versions": describe_versions(),
        "command": command,
        "rows": [_row(figure) for figure in figures],
    }


def write(content: dict[str, Any], path: Path) -> None:
    """Write one record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _row(figure: Figure) -> dict[str, Any]:
    bar = None
    if figure.bar is not None:
        bar = {"measure": figure.bar.measure.value, "at_most": figure.bar.limit, "met": figure.is_met}
    return {
        "name": figure.name,
        "unit": figure.unit,
        "samples": list(figure.samples),
        "reference": figure.reference,
        "reference_samples": list(figure.reference_samples),
        "bar": bar,
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
