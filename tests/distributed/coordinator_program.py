"""Starts the program of real SGLang groups, without the settings of this process, and gives its answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from sglang_fl.config.fields import FIELD_BY_VARIABLE

ROOT = Path(__file__).parents[2]


def ask(request: dict[str, Any]) -> dict[str, Any]:
    """What one process with SGLang found out, with ranks forked from it; see coordinator_ranks.py for requests."""
    own = {name: value for name, value in os.environ.items() if name not in FIELD_BY_VARIABLE}
    ended = subprocess.run(
        [sys.executable, "-m", "tests.distributed.coordinator_ranks", json.dumps(request)],
        cwd=ROOT,
        env={**own, "SGLANG_USE_CPU_ENGINE": "1", "LD_LIBRARY_PATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith("RESULT ")]
    assert ended.returncode == 0 and len(lines) == 1, ended.stderr[-4000:]
    found: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return found
