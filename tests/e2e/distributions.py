"""Writes an installed distribution with one module and entry points into a folder for PYTHONPATH."""

from __future__ import annotations

from pathlib import Path


def write_distribution(folder: Path, name: str, source: str, group: str, function: str) -> Path:
    """A distribution ``name`` with the module ``name``, whose ``function`` is its entry point of ``group``."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / f"{name}.py").write_text(source)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {name}:{function}\n")
    return folder
