"""``make demo`` as a program: what it prints, its exit code, and that nothing of it is left."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import ROOT
from .demo_program import LIMIT_S, processes_of, start

pytestmark = pytest.mark.e2e


def _until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, f"not within {LIMIT_S:g} s: {what}"
        time.sleep(0.2)


def test_it_answers_and_shows_what_each_process_carried(tmp_path: Path) -> None:
    """Given nothing, then ``make demo`` shows command, question, answer and the calls that FlagCX's API over host
    memory carried, per rank and in sum per group."""
    hostcx = ROOT / "build/hostcx"
    demo = start(tmp_path, "make", "-s", "demo")
    output, _ = demo.communicate(timeout=LIMIT_S)
    assert demo.returncode == 0, output
    assert f"FLAGCX_PATH={hostcx}" in output and "-m sglang.launch_server --model-path=" in output
    sections = re.findall(r"^== (\w+)", output, flags=re.MULTILINE)
    assert sections == ["writing", "the", "waiting", "question", "answer"]
    answer = output.split("== answer")[1].splitlines()[1]
    assert answer.strip()
    rows = re.findall(r"rank (\d), pid \d+ +│ tp:0 +│ \[0, 1\] │ (\w+) +│ (\w+) +│ (\d+)", output)
    carried = {(int(rank), method): int(count) for rank, backend, method, count in rows if backend == "flagcx"}
    assert len(carried) == len(rows) > 0, output
    for rank in range(2):
        assert carried[rank, "all_reduce"] == 5 * carried[rank, "all_gather"] > 0
    total = sum(carried.values())
    assert f"group tp:0: flagcx carried {total} calls" in output
    assert "active in all 2 scheduler processes" in output
    assert processes_of(tmp_path) == []


def test_it_shows_the_logs_end_where_the_server_ends(tmp_path: Path) -> None:
    """Given a wrong setting, then the demo shows the server's own message and ends with 1."""
    demo = start(tmp_path, SGLANG_FL_DIST_BACKEND="torhc")
    output, _ = demo.communicate(timeout=LIMIT_S)
    assert demo.returncode == 1, output
    assert "ended with code 1; the log of node 0 ends:" in output
    assert "sglang_fl: a setting is wrong. SGLANG_FL_DIST_BACKEND" in output
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_nothing_is_left_when_it_is_stopped(number: signal.Signals, tmp_path: Path) -> None:
    """Given a demo whose schedulers run, when it is interrupted or killed, then all of its processes end."""
    demo = start(tmp_path)

    def has_schedulers() -> bool:
        # The demo, SGLang's main process, two schedulers and their resource tracker.
        assert demo.poll() is None
        return len(processes_of(tmp_path)) >= 5

    _until(has_schedulers, "the schedulers run")
    demo.send_signal(number)
    output, _ = demo.communicate(timeout=LIMIT_S)
    assert demo.returncode == (130 if number is signal.SIGINT else -signal.SIGKILL), output
    _until(lambda: not processes_of(tmp_path), "all processes have ended")
