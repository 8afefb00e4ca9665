"""Run as a program: kills the sessions in its arguments when its standard input ends, so when its parent is gone.

SGLang's processes end with their parent too, but only from some seconds after their start on.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def main() -> None:
    """Wait for the end of the input, then kill until nothing of the sessions is left, for ten seconds at most."""
    sessions = {int(argument) for argument in sys.argv[1:]}
    sys.stdin.buffer.read()
    for _ in range(100):
        pids = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
        members = [pid for pid in pids if _session(pid) in sessions]
        if not members:
            return
        for pid in members:
            _kill(pid)
        time.sleep(0.1)


if __name__ == "__main__":
    main()
