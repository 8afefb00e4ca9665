"""The demo as a program of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

from .conftest import ROOT

LIMIT_S = 400.0


def start(folder: Path, *command: str, **environment: str) -> subprocess.Popen[str]:
    """The demo with its temporary files in ``folder``, whose name its processes therefore carry."""
    merged = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.Popen(
        command or (sys.executable, "-m", "sglang_fl.testing.demo"),
        cwd=ROOT,
        env={**merged, "TMPDIR": str(folder), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def processes_of(folder: Path) -> list[int]:
    """Every process of a demo: their environment names its folder, whoever their parent is by now."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == str(folder):
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
