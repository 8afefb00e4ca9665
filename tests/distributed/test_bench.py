"""The benchmark under torchrun: its table, its files, and what it refuses; its times are nobody's promise here."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from sglang_fl.comm import bench
from sglang_fl.comm.backends.torch_dist import TorchTransport
from sglang_fl.comm.tools.bench_operations import OPERATIONS
from sglang_fl.comm.tools.sizes import parse_size, scan
from sglang_fl.testing.ranks import RankContext, run_ranks

LIMIT_S = 240
FEW = ("--iters", "2", "--warmup-iters", "1", "--cycles", "2")
# nccl-tests, PERFORMANCE.md, for 2 ranks
FACTORS = {"all_reduce": 1.0, "broadcast": 1.0, "send_recv": 1.0}
IN_PLACE = {"all_reduce", "all_gather", "reduce_scatter", "broadcast"}


def _bench(context: RankContext, arguments: Sequence[str], fault: str = "") -> tuple[int, str, str]:
    if fault:
        setattr(TorchTransport, fault, lambda *_: None)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = bench.main([*arguments, *FEW])
    return code, out.getvalue(), err.getvalue()


def run_bench(arguments: Sequence[str], flagcx: Path | None = None, fault: str = "") -> tuple[int, str, str]:
    """Rank 0's code, output and errors; every rank must return the same code."""
    env = {"FLAGCX_PATH": None if flagcx is None else str(flagcx), "HOSTCX_QUIET": "1", "SGLANG_FL_DIST_BACKEND": None}
    outcomes = run_ranks(_bench, 2, arguments, fault, timeout_s=LIMIT_S, env=env)
    assert outcomes[0][0] == outcomes[1][0]
    assert outcomes[1][1] == ""
    code, out, err = outcomes[0]
    return code, out, err


def test_under_torchrun_every_operation_is_measured_on_every_backend(hostcx: Path, tmp_path: Path) -> None:
    kept, table = tmp_path / "bench.json", tmp_path / "bench.csv"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "sglang_fl.comm.bench", "--op", "all", "-b", "64", "-e", "64K", "-f", "1024", *FEW]
    command += ["--json", str(kept), "--csv", str(table)]
    env = {**os.environ, "FLAGCX_PATH": str(hostcx), "HOSTCX_QUIET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# Wrong elements: 0 OK" in done.stdout
    content = json.loads(kept.read_text())
    assert {"kind", "machine", "gpu", "date", "commit", "versions", "command", "rows"} == set(content)
    found = {(r["operation"], r["backend"], r["size_bytes"], r["in_place"]): r for r in content["rows"]}
    expected = {
        (name, backend, size, in_place)
        for name in OPERATIONS
        for backend in ("flagcx", "torch")
        for size in (64, 64 * 1024)
        for in_place in (False, True)
        if not in_place or name in IN_PLACE
    }
    assert set(found) == expected
    for (name, _, size, _), row in found.items():
        assert row["wrong"] == 0 and len(row["samples"]) == 2 and row["unit"] == "us"
        assert row["algbw_gb_s"] == pytest.approx(size / row["time_us"] / 1e3)
        assert row["busbw_gb_s"] == pytest.approx(row["algbw_gb_s"] * FACTORS.get(name, 0.5))
    with table.open(newline="") as file:
        assert len(list(csv.DictReader(file))) == len(expected)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    assert len(lines) == len(OPERATIONS) * 2 * 2
    assert all(len(line.split()) == 15 for line in lines)


def test_a_wrong_result_is_counted_and_fails() -> None:
    code, out, _ = run_bench(["-b", "1K", "-e", "1K", "--backends", "torch"], fault="all_reduce")
    assert code == 1
    line = next(line for line in out.splitlines() if not line.startswith("#")).split()
    assert int(line[10]) > 0 and int(line[14]) > 0
    assert re.search(r"# Wrong elements: \d+ FAILED", out)


def test_dtypes_that_only_move_are_measured_and_not_summed() -> None:
    arguments = ["-b", "1K", "-e", "1K", "--backends", "torch", "--dtype", "float8_e5m2"]
    code, out, err = run_bench([*arguments, "--op", "all_gather,broadcast"])
    assert code == 0, out + err
    code, _, err = run_bench([*arguments, "--op", "all_reduce"])
    assert code == 1
    assert "all_reduce: torch has no sum for torch.float8_e5m2; --dtype may be bfloat16, float16" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backends", "torch,nccl"], "nccl cannot be used: the group's torch.distributed backend is gloo"),
        (["--graph"], "--graph needs CUDA graphs; this run's device is cpu"),
    ],
)
def test_what_was_asked_for_and_cannot_be_done_fails(arguments: list[str], message: str) -> None:
    code, out, err = run_bench(["-b", "1K", "-e", "1K", "--device", "cpu", *arguments])
    assert code == 1
    assert message in out + err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "all_reduc"], "'all_reduc': allowed are all, all_reduce, all_gather"),
        (["-b", "1X"], "'1X' is no size"),
        (["-b", "2K", "-e", "1K"], "sizes from 2048 to 1024"),
        (["-f", "1"], "a factor is at least 2"),
        (["--dtype", "nn"], "'nn' is no dtype of torch"),
        (["--iters", "0"], "'0' is no whole number of 1 or more"),
    ],
)
def test_a_wrong_command_line_says_what_is_allowed(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        bench.main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_sizes() -> None:
    assert [parse_size(text) for text in ("8", "4K", "4k", "2MiB", "1GB")] == [8, 4096, 4096, 2**21, 2**30]
    assert scan(1, 20, 4, None) == [1, 4, 16]
    assert scan(4, 13, None, 4) == [4, 8, 12]


def _record(path: Path, times: dict[str, float]) -> Path:
    path.write_text(json.dumps({"rows": [{"name": name, "time_us": time} for name, time in times.items()]}))
    return path


def test_two_files_beside_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = _record(tmp_path / "first.json", {"a": 10.0, "b": 2.0, "gone": 1.0})
    second = _record(tmp_path / "second.json", {"b": 3.0, "a": 5.0})
    assert bench.main(["--compare", str(first), str(second)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:] == [["a", "10.00", "5.00", "0.50"], ["b", "2.00", "3.00", "1.50"]]
    other = _record(tmp_path / "other.json", {"c": 1.0})
    assert bench.main(["--compare", str(first), str(other)]) == 1
    assert "have no measurement in common" in capsys.readouterr().err
    (tmp_path / "broken.json").write_text("{}")
    assert bench.main(["--compare", str(first), str(tmp_path / "broken.json")]) == 1
    assert "is no file that this benchmark wrote" in capsys.readouterr().err


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed, wherever this runs
    code, _, err = run_bench(["--backends", "torch", "-b", "8", "-e", "8", "--plot", str(tmp_path / "plot.png")])
    assert code == 1
    assert "pip install matplotlib" in err


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_sizes_of_shares_add_up(world_size: int) -> None:
    for operation in OPERATIONS.values():
        count = operation.count(4096, torch.float32.itemsize, world_size)
        size = operation.size_bytes(count, torch.float32.itemsize, world_size)
        assert 4096 - 4 * world_size < size <= 4096
