"""The end-to-end benchmark here: real servers at tp=2, alone and with the plugin, and faults that it must see."""

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

LIMIT_S = 600.0  # against a hang
CONFIGURATION = "layers-12"
FAULTS = ("silu_and_mul", "all_reduce", "all_gather")
Finished = tuple[subprocess.CompletedProcess[str], dict[str, Any], Path]


def benchmark(folder: Path, *arguments: str) -> Finished:
    """Run it with the tiny shape; the process, the record and the folder of logs."""
    command = [sys.executable, "-m", "benchmarks.e2e", "--shape=tiny", "--device=cpu", f"--out={folder}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (folder / "e2e.json").exists(), done.stdout + done.stderr
    return done, json.loads((folder / "e2e.json").read_text()), folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """One round of native and plugin at tp=2, and the controls."""
    arguments = ("--tp=2", f"--configurations=native,{CONFIGURATION}", "--starts=1", "--repeats=1", "--controls")
    return benchmark(tmp_path_factory.mktemp("e2e"), *arguments, "--commit=abc")


def test_the_record_has_every_start_and_row(finished: Finished) -> None:
    """Given a run, then its record has what it was made on and all rows, with a reference of each time."""
    done, record, _ = finished
    assert (record["failed"], record["not_run"]) == ({}, []), done.stdout
    assert (record["kind"], record["commit"], record["shape"], record["tp"]) == ("e2e", "abc", "tiny", 2)
    assert record["versions"]["sglang"] and record["machine"]["cores"] and record["date"] and record["command"]
    names = [start["name"] for start in record["starts"]]
    assert names == ["0-native", f"0-{CONFIGURATION}", f"0-{CONFIGURATION}-controls"]
    timed = [row for row in record["rows"] if row["unit"] == "ms"]
    assert [row["name"] for row in timed] == [
        f"decode {CONFIGURATION}, batch 1",
        f"decode {CONFIGURATION}, batch 2",
        f"sampled decode {CONFIGURATION}, batch 2",
        f"sampled decode {CONFIGURATION}, batch 2, top-p 0.9",
        f"prefill {CONFIGURATION}, 256 tokens",
    ]
    assert all(len(row["samples"]) == len(row["reference_samples"]) == 1 for row in timed)


def test_a_row_that_cannot_be_is_absent_with_the_server_s_own_reason(finished: Finished) -> None:
    """Given servers without graphs, then each rank was asked, and record and table say why there is no GPU time."""
    done, record, folder = finished
    reason = "no graph here: SGLang decodes without graphs"
    assert record["absent"] == {f"gpu decode {CONFIGURATION}, batch {batch}": reason for batch in (1, 2)}
    assert f"no row gpu decode {CONFIGURATION}, batch 2: {reason}" in done.stdout
    reports = [folder / f"0-{name}.graph.rank{rank}" for name in ("native", CONFIGURATION) for rank in range(2)]
    assert [json.loads(path.read_text()) for path in reports] == 4 * [{"absent": reason}]


def test_the_plugin_is_in_its_own_servers_only(finished: Finished) -> None:
    """Given the logs, then native has no line of the plugin, and the others say which layers are on."""
    _, record, folder = finished
    native, *others = record["starts"]
    assert native["plugin"] == [] and "[sglang_fl]" not in (folder / "0-native.log").read_text()
    assert all(any(line.startswith("layer 2, fused operators: on") for line in start["plugin"]) for start in others)


def test_tokens_are_native_s_and_each_fault_is_seen(finished: Finished) -> None:
    """Given faults in one silu, one all_reduce and one gather's order, then each is seen, and none without a fault."""
    done, record, _ = finished
    rows = {row["name"]: row for row in record["rows"] if row["bar"] is not None and row["unit"] != "ms"}
    assert all(row["bar"]["met"] for row in rows.values()), done.stdout
    assert f"tokens equal {CONFIGURATION}, prompts that differ though native's logits decide" in rows
    assert "control: no fault is on, but one is seen" in rows
    for fault in FAULTS:
        assert any(name.startswith(f"control: a fault in {fault} (") for name in rows), fault


def test_weights_matter_and_replicas_are_equal(finished: Finished) -> None:
    """Given two ranks, then exactly what SGLang splits differs; native and the plugin have the same weights."""
    _, _, folder = finished
    ranks = [
        [json.loads((folder / f"0-{name}.weights.rank{rank}").read_text())["weights"] for rank in range(2)]
        for name in ("native", CONFIGURATION)
    ]
    assert ranks[0] == ranks[1]
    first, second = ranks[0]
    equal = {name for name in first if first[name]["digest"] == second[name]["digest"]}
    assert equal == {name for name in first if "norm" in name}
    assert {weight["kind"] for weight in first.values()} == {"embedding", "matrix", "norm", "bias"}
    # The fan in of what is split along its input is the whole's: 128, of which a rank has 64.
    assert first["model.layers.0.mlp.down_proj.weight"]["deviation"] == pytest.approx(128**-0.5)
    assert first["model.layers.0.mlp.gate_up_proj.weight"]["deviation"] == pytest.approx(64**-0.5)


def test_nothing_is_left_running(finished: Finished) -> None:
    """Given a run that has ended, then no process has its variables."""
    _, _, folder = finished
    assert [process for process in psutil.process_iter() if str(folder) in _environment(process)] == []


def test_a_limit_that_is_too_short_ends_with_3_and_names_what_was_not_run(tmp_path: Path) -> None:
    """Given a second, then no server is started, the code is 3, and table and record name all starts."""
    done, record, _ = benchmark(tmp_path, "--limit-s=1", "--starts=1")
    assert done.returncode == 3, done.stderr
    assert record["not_run"] == ["0-native", "0-verified"]
    assert "NOT RUN, the limit of 1 s is reached: 0-native, 0-verified" in done.stdout


def test_a_server_that_does_not_come_up_shows_its_log(tmp_path: Path) -> None:
    """Given an argument that SGLang does not know, then the code is 1, with the last lines of the log."""
    done, record, _ = benchmark(tmp_path, "--starts=1", "--configurations=native", "--", "--no-such-argument")
    assert done.returncode == 1, done.stderr
    assert list(record["failed"]) == ["0-native"]
    assert "unrecognized arguments: --no-such-argument" in done.stdout


def _environment(process: psutil.Process) -> str:
    try:
        return "\n".join(process.environ().values())
    except psutil.Error:
        return ""
