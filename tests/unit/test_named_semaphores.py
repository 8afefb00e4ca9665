"""What shows progress while a model is loaded makes no semaphore with a name, which a killed process would leave."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SHOWS_A_BAR = """
import io, multiprocessing, os, sys
from pathlib import Path
from tqdm import tqdm
from tqdm.auto import tqdm as other
from sglang_fl.sglang_hooks.shared_memory import keep_bars_in_process
multiprocessing.set_start_method("spawn")
for _ in range(int(sys.argv[1])):
    keep_bars_in_process()
for bar in (tqdm, other):
    assert list(bar(range(3), file=io.StringIO())) == [0, 1, 2]
named = {entry.inode() for entry in os.scandir("/dev/shm")}
mapped = {int(line.split()[4]) for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line}
print(len(named & mapped))
"""


@pytest.mark.parametrize(("calls", "left"), [(0, 1), (1, 0), (2, 0)])
def test_a_bar_makes_no_named_semaphore(calls: int, left: int) -> None:
    """Given a process of a server, which spawns, when it shows bars, then nothing of them has a name; without the
    plugin one has, or this test sees nothing."""
    command = [sys.executable, "-c", _SHOWS_A_BAR, str(calls)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, f"{left}\n"), done.stderr
