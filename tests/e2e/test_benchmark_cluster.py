"""The run of everything on one machine, at two ranks on the CPU: real collectives, real servers, all that it checks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from .conftest import ROOT

pytestmark = pytest.mark.e2e

LIMIT_S = 1500.0  # against a hang
SERVERS = ("e2e tp=2", "e2e tp=1 pp=2", "e2e tp=2 DP attention, tiny-qwen3-8")
# What a CPU cannot show, and nothing else, by part.
TIMES = ("decode flagcx, batch 1", "decode flagcx, batch 2", "prefill flagcx, 256 tokens")
NOT_RUN = {
    "selftest flagcx": {"captured calls", "all combinations"},
    "selftest torch": {"captured calls", "all combinations"},
    "operations": {"captured calls"},
    "routes": {"all of it"},
    **{name: {"fastest", "server ready", *(f"bar of {time}" for time in TIMES)} for name in SERVERS},
}
NOT_RUN["e2e tp=1 pp=2"].add("transfers between stages over FlagCX")
Finished = tuple[subprocess.CompletedProcess[str], dict[str, Any], Path]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The process, the record and the folder of logs."""
    folder = tmp_path_factory.mktemp("cluster")
    command = [sys.executable, "-m", "benchmarks.cluster", "--device=cpu", "--ranks=2", f"--out={folder}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (folder / "cluster.json").exists(), done.stdout + done.stderr
    return done, json.loads((folder / "cluster.json").read_text()), folder


def test_everything_that_a_cpu_can_show_is_met(finished: Finished) -> None:
    """Given a run, then what was not run is exactly what a CPU cannot show, and all else is met."""
    done, record, _ = finished
    found = {
        part["name"]: {check["name"] for check in part["checks"] if check["state"] == "not run"}
        for part in record["parts"]
    }
    assert found == NOT_RUN, done.stdout
    states = {check["state"] for part in record["parts"] for check in part["checks"]}
    assert states == {"met", "not run"}, done.stdout
    assert (done.returncode, record["exit_code"]) == (3, 3)


@pytest.mark.parametrize("name", SERVERS)
def test_servers_answer_as_sglang_alone_and_faults_are_seen(finished: Finished, name: str) -> None:
    """Given each size of servers, then tokens were compared and each fault that the size has was seen."""
    _, record, _ = finished
    (part,) = [each for each in record["parts"] if each["name"] == name]
    met = [check["name"] for check in part["checks"] if check["state"] == "met"]
    faults = ("silu_and_mul",) if "tp=1" in name else ("silu_and_mul", "all_reduce", "all_gather")
    assert [each for each in met if each.startswith("tokens equal flagcx")]
    assert all(any(each.startswith(f"control: a fault in {fault} (") for each in met) for fault in faults)
    assert [start["name"] for start in part["record"]["starts"]] == ["0-native", "0-flagcx", "0-flagcx-controls"]


def test_collectives_went_over_flagcx_and_torch(finished: Finished) -> None:
    """Given the rows, then each operation was measured on both backends, and the self-test tried cases on both."""
    _, record, _ = finished
    rows = {row["name"]: row for row in record["rows"]}
    for backend in ("flagcx", "torch"):
        assert rows[f"selftest {backend}: all_reduce over {backend}"]["cases"] > 0
        assert any(name.startswith("operations: all_gatherv ") and f", {backend}, " in name for name in rows)


def test_nothing_is_left_running(finished: Finished) -> None:
    """Given a run that has ended, then no process has its folder among its variables or arguments."""
    _, _, folder = finished
    assert [process for process in psutil.process_iter() if str(folder) in _words(process)] == []


def _words(process: psutil.Process) -> str:
    try:
        return "\n".join((*process.cmdline(), *process.environ().values()))
    except psutil.Error:
        return ""
