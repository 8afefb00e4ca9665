"""Run as a program: writes as JSON which of FlagGems' functions the settings of this environment choose.

A process of its own, because FlagGems touches the device when it is imported.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

LIMIT_S = 300.0


def chosen_names(path: Path, environ: Mapping[str, str]) -> list[str]:
    """The names, by a new process with ``environ`` that writes them to ``path``; empty if FlagGems cannot be used."""
    command = [sys.executable, "-m", "sglang_fl.bisect.aten_names", str(path)]
    path.unlink(missing_ok=True)
    log = path.with_suffix(".log")
    with log.open("wb") as output:
        subprocess.run(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            timeout=LIMIT_S,
            check=False,
        )
    return list(json.loads(path.read_text())) if path.exists() else []


def main() -> None:
    """Write the names to the path given as argument."""
    from sglang_fl.aten.gems import load
    from sglang_fl.aten.plan import make_plan
    from sglang_fl.config import load_settings
    from sglang_fl.devices import detect_platform

    plan = make_plan(load_settings(platform=detect_platform()), load())
    Path(sys.argv[1]).write_text(json.dumps(plan.names))


if __name__ == "__main__":
    main()
