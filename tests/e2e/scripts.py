"""Runs a user's Python script as a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from sglang_fl.testing.server import CPU_ENVIRONMENT, Environment


@dataclass(frozen=True)
class Outcome:
    """How the script ended and what it printed."""

    returncode: int
    output: str
    errors: str

    def lines(self, prefix: str) -> list[str]:
        """What stands behind ``prefix`` in the lines of the output that begin with it."""
        return [line.removeprefix(prefix) for line in self.output.splitlines() if line.startswith(prefix)]


def run_script(
    source: str,
    folder: Path,
    environment: Environment,
    *arguments: str,
    interpreter: str | Path = sys.executable,
    limit_s: float = 300.0,
) -> Outcome:
    """Write ``source`` into ``folder`` and run it as ``python script.py``, as users do."""
    script = folder / "script.py"
    script.write_text(source)
    merged = dict(os.environ)
    for name, value in {"PYTHONDONTWRITEBYTECODE": None, **CPU_ENVIRONMENT, **environment}.items():
        merged.pop(name, None)
        if value is not None:
            merged[name] = value
    process = subprocess.Popen(
        [str(interpreter), str(script), *arguments],
        cwd=folder,
        env=merged,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=limit_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return Outcome(process.returncode, output, errors)
