"""One part of the run of everything on one machine, with two real ranks; make test-serving has all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT

pytestmark = pytest.mark.e2e

LIMIT_S = 300.0  # against a hang


def test_a_single_part_runs_and_all_others_are_named(tmp_path: Path) -> None:
    """Given one part by its name, then it is met but for what a CPU has not, the others are not run, the code is 3."""
    command = [sys.executable, "-m", "benchmarks.cluster", "--device=cpu", "--ranks=2", "--only=selftest flagcx"]
    done = subprocess.run(
        [*command, f"--out={tmp_path}"], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    record = json.loads((tmp_path / "cluster.json").read_text())
    tested, *others = record["parts"]
    assert (done.returncode, tested["name"], tested["was_run"]) == (3, "selftest flagcx", True), done.stdout
    assert {check["state"] for check in tested["checks"]} == {"met", "not run"}
    assert len([check for check in tested["checks"] if check["state"] == "met"]) == len(record["rows"]) > 20
    assert [each["was_run"] for each in others] == [False] * 6
    assert "NOT RUN routes: all of it: not named by --only" in done.stdout
