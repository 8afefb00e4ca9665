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
from sglang_fl.comm.discovery import discover_backends
from sglang_fl.comm.errors import CommError
from sglang_fl.comm.tools import tune
from sglang_fl.comm.tools.bench_operations import OPERATIONS
from sglang_fl.comm.tools.measure import Mode, Result
from sglang_fl.comm.tools.sizes import parse_size, scan
from sglang_fl.config import Settings, load_settings
from sglang_fl.testing.ranks import RankContext, run_ranks
from tests.distributed.groups import communicator_of_all

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
        (["--iters", "0"], "'0' is no whole number from 1 to 2**63 - 1"),
        (["--iters", "9" * 5000], "'999999999999...9999999999999' is no whole number from 1"),
        (["-b", "9" * 5000], "'999999999999...9999999999999' is no size"),
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
    with pytest.raises(ValueError, match="'8589934592G' is no size; write bytes"):  # one more than there can be
        parse_size("8589934592G")
    assert scan(1, 20, 4, None) == [1, 4, 16]
    assert scan(4, 13, None, 4) == [4, 8, 12]


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


# --- two files beside each other ---


def _record(path: Path, samples: dict[str, list[float]], wrong: int = 0) -> Path:
    rows = [{"name": name, "samples": times, "wrong": wrong} for name, times in samples.items()]
    path.write_text(json.dumps({"rows": rows}))
    return path


def test_two_files_beside_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Given two records, then their common rows, each called faster or slower only where the cycles do not overlap."""
    first = _record(tmp_path / "first.json", {"a": [10.0, 10.2], "b": [2.0, 2.1], "c": [4.0, 6.0], "gone": [1.0]})
    second = _record(tmp_path / "second.json", {"b": [3.0, 3.3], "a": [5.0, 5.2], "c": [5.0, 9.0]})
    assert bench.main(["--compare", str(first), str(second)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:4] == [
        ["a", "10.10", "5.10", "0.50", "faster"],
        ["b", "2.05", "3.15", "1.54", "slower"],
        ["c", "5.00", "7.00", "1.40"],
    ]
    assert " ".join(lines[4]).startswith("# 3 rows: 1 faster, 1 slower, 1 alike; geometric mean of the ratios 1.03")


def test_a_comparison_of_wrong_results_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Given a record with a wrong result, then its row says so, whatever its time, and the exit code is 1."""
    first = _record(tmp_path / "first.json", {"a": [10.0]})
    second = _record(tmp_path / "second.json", {"a": [1.0]}, wrong=3)
    assert bench.main(["--compare", str(first), str(second)]) == 1
    assert "WRONG" in capsys.readouterr().out.splitlines()[1]


def test_what_cannot_be_compared_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Given files without a common row, or that are no records, then one message each."""
    first, other = _record(tmp_path / "first.json", {"a": [1.0]}), _record(tmp_path / "other.json", {"c": [1.0]})
    assert bench.main(["--compare", str(first), str(other)]) == 2
    assert "have no measurement in common" in capsys.readouterr().err
    contents = {
        "": "is empty",
        "rubbish": "is not JSON (line 1, column 1",
        "{}": "it has no list of rows",
        '{"rows": []}': "has no rows",
        '{"rows": [{"name": "a"}]}': "a row without samples, wrong",
        '{"rows": [{"name": "a", "samples": [], "wrong": 0}]}': "has no times in its row 'a'",
    }
    broken = tmp_path / "broken.json"
    for content, reason in contents.items():
        broken.write_text(content)
        assert bench.main(["--compare", str(first), str(broken)]) == 2
        out, err = capsys.readouterr()
        assert (out, f"bench: {broken} " in err, reason in err) == ("", True, True), err
    assert bench.main(["--compare", str(first), str(tmp_path / "none.json")]) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err


# --- files ---


def test_a_plot_is_a_picture(tmp_path: Path) -> None:
    """Given --plot, then a PNG that is not empty is written; matplotlib is among the tests' requirements."""
    picture = tmp_path / "plot.png"
    arguments = ["--backends", "torch", "-b", "8", "-e", "1K", "-f", "8", "--op", "all_reduce,all_gather"]
    code, out, err = run_bench([*arguments, "--plot", str(picture)])
    assert code == 0, out + err
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000


@pytest.mark.parametrize("option", ["--json", "--csv", "--tune"])
def test_a_file_that_cannot_be_written_is_refused_before_the_measurement(option: str, tmp_path: Path) -> None:
    """Given a folder as the file, then every rank ends at once with a message that names the option."""
    code, out, err = run_bench(["-b", "1K", "-e", "1K", option, str(tmp_path)])
    assert code == 1
    assert f"{option} {tmp_path} cannot be written" in err
    assert "# all_reduce" not in out


@pytest.mark.parametrize("option", ["--json", "--csv", "--tune", "--plot"])
def test_no_folder_is_made_for_a_file(option: str, tmp_path: Path) -> None:
    """Given a file in a folder that is not there, then every rank ends at once, and no folder is made."""
    path = tmp_path / "none" / "file.png"
    code, out, err = run_bench(["-b", "1K", "-e", "1K", option, str(path)])
    assert code == 1
    assert f"{option} {path} cannot be written: No such file or directory" in err
    assert "# all_reduce" not in out
    assert not path.parent.exists()


def test_a_picture_of_no_known_format_is_refused_before_the_measurement(tmp_path: Path) -> None:
    """Given a suffix that matplotlib does not know, then every rank ends at once and names those that it knows."""
    code, out, err = run_bench(["-b", "1K", "-e", "1K", "--plot", str(tmp_path / "plot.docx")])
    assert code == 1
    assert "the suffix decides the format" in err and ".png" in err
    assert "# all_reduce" not in out


@pytest.mark.parametrize("module", ["sglang_fl.comm.bench", "sglang_fl.comm.selftest"])
def test_a_wrong_option_is_told_once(module: str) -> None:
    """Given an option that is none under torchrun, then rank 0 alone says so, and the run fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", module]
    done = subprocess.run([*command, "--no-such-option"], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode != 0
    assert done.stderr.count("unrecognized arguments: --no-such-option") == 1


# --- routes by size ---

TOKENS = {"torch": ("torch", "reference", "vendor:"), "chip": ("chip", "vendor", "vendor:chip")}


def _results(
    times: dict[str, list[float]], mode: Mode = Mode.EAGER, op: str = "all_reduce", wrong: str = "", spread: float = 0.0
) -> list[Result]:
    """Of each backend a time for 1, 2, 4, ... KiB, in the form that counts and, ten times as long, in the other."""
    found = []
    for in_place in (False, True):
        factor = 1.0 if in_place is (op == "all_reduce") else 10.0
        for name, own in times.items():
            for number, time in enumerate(own):
                samples = tuple(time * factor * each for each in (1.0 - spread, 1.0, 1.0 + spread))
                size = 1024 << number
                found.append(
                    Result(
                        OPERATIONS[op], name, mode, in_place, size // 4, size, "float32", 2, samples, int(name == wrong)
                    )
                )
    return found


def _settings(**variables: str) -> Settings:
    return load_settings({"SGLANG_FL_DIST_BACKEND": "torch", **variables})


def _tuned_text(results: list[Result], **variables: str) -> str:
    found = tune.tuned(results, _settings(**variables), TOKENS)
    return ";".join(f"{order.op}={'|'.join(map(str, order.routes))}" for order in found.orders)


@pytest.mark.parametrize(
    ("torch_times", "chip_times", "expected"),
    [
        ([10, 10, 10], [5, 5, 20], "all_reduce=chip:2048"),
        ([10, 10, 10], [20, 5, 5], "all_reduce=torch:1024|chip"),
        ([10, 10, 10], [5, 5, 5], "all_reduce=chip"),
        ([10, 10, 10], [20, 20, 20], ""),
        # By less than the margin: what was in use stays.
        ([10, 10, 10], [9.8, 9.8, 9.8], ""),
        ([10, 10, 10], [5, 10.2, 10.2], "all_reduce=chip"),
        ([10, 10, 10, 10], [20, 5, 20, 5], "all_reduce=torch:1024|chip:2048|torch:4096|chip"),
    ],
)
def test_the_rule(torch_times: list[float], chip_times: list[float], expected: str) -> None:
    """Given times by size, then a route begins where another backend is clearly faster, and ends as the rule says."""
    assert _tuned_text(_results({"torch": torch_times, "chip": chip_times})) == expected


def test_a_difference_within_the_cycles_spread_is_none() -> None:
    """Given a median that is better by a fifth and cycles that overlap, then the group's backend stays."""
    times = {"torch": [10.0, 10.0], "chip": [8.0, 8.0]}
    assert _tuned_text(_results(times, spread=0.05)) == "all_reduce=chip"
    assert _tuned_text(_results(times, spread=0.2)) == ""


def test_a_backend_with_wrong_results_gets_no_route() -> None:
    """Given the faster one wrong, then it is left out, and the notes say so."""
    found = tune.tuned(_results({"torch": [10.0], "chip": [1.0]}, wrong="chip"), _settings(), TOKENS)
    assert found.orders == ()
    assert "all_reduce: chip gave wrong results and gets no route" in found.notes


def test_captured_calls_have_routes_of_their_own_where_they_differ() -> None:
    """Given other times within a graph, then the routes say when each holds; given the same, they do not."""
    eager = _results({"torch": [10, 10], "chip": [5, 20]})
    same, other = ({"torch": [10, 10], "chip": [5, 20]}, {"torch": [10, 10], "chip": [5, 5]})
    assert _tuned_text([*eager, *_results(same, Mode.GRAPH)]) == "all_reduce=chip:1024"
    assert _tuned_text([*eager, *_results(other, Mode.GRAPH)]) == "all_reduce=chip:1024@eager|chip@graph"


def test_sglangs_own_routes_stay_in_front() -> None:
    """Given a native route in the settings, then it is kept, and what it hides is left out."""
    settings = {"SGLANG_FL_COMM_MODE": "fastest", "SGLANG_FL_COMM_ROUTES": "all_reduce=native:2048"}
    text = _tuned_text(_results({"torch": [10, 10, 10, 10], "chip": [5, 20, 5, 20]}), **settings)
    assert text == "all_reduce=native:2048|chip:4096"


def test_more_routes_than_may_be_are_made_fewer_by_a_wider_margin(tmp_path: Path) -> None:
    """Given backends that win in turns, ever more clearly, then at most eight routes, with a note, that can be read."""
    torch_times = [10.0] * 16
    chip_times = [10 * (1 + 0.08 * n) ** (1 if n % 2 else -1) for n in range(1, 17)]
    found = tune.tuned(_results({"torch": torch_times, "chip": chip_times}), _settings(), TOKENS)
    assert 1 < len(found.orders[0].routes) <= 8
    assert any("the margin is" in note for note in found.notes)
    tune.write(found, tmp_path / "routes.yaml", _settings(), [])


def test_one_backend_alone_is_nothing_to_choose_from() -> None:
    """Given one backend, then an error that says what is needed."""
    with pytest.raises(CommError, match="needs two backends or more to choose between; this run has torch"):
        tune.tuned(_results({"torch": [1.0]}), _settings(), {"torch": ("torch",)})


def test_an_operation_without_routes_cannot_be_tuned(capsys: pytest.CaptureFixture[str]) -> None:
    """Given --op broadcast with --tune, then a usage error that names those with routes."""
    with pytest.raises(SystemExit):
        bench.parse(["--tune", "routes.yaml", "--op", "broadcast"])
    assert "--tune is for all_gather, all_reduce, reduce_scatter" in capsys.readouterr().err


# A backend that is slow beyond 4 KiB and one that is slow up to there; each counts what it carried.
CHIPS = """
import time
from collections import Counter
from sglang_fl.comm.backends.torch_dist import TorchBackend, TorchTransport
from sglang_fl.selection import Availability, Kind

CARRIED = Counter()
LIMIT, DELAY_S = 4096, 0.05


class Planted(TorchTransport):
    is_slow_beyond = False

    def all_reduce(self, tensor):
        CARRIED[self.name, tensor.nbytes] += 1
        super().all_reduce(tensor)
        if (tensor.nbytes > LIMIT) is self.is_slow_beyond:
            time.sleep(DELAY_S)


class PlantedSlowBeyond(Planted):
    is_slow_beyond = True


class Chip(TorchBackend):
    def __init__(self, name, transport):
        super().__init__(name, Kind.VENDOR, vendor=name)
        self.transport = transport

    def probe(self, context):
        return Availability.yes()

    def create(self, context):
        return self.transport(self.name, context)


def register_comm(registry):
    registry.register(Chip("small", PlantedSlowBeyond))
    registry.register(Chip("large", Planted))
"""


def _install_chips(folder: Path) -> None:
    (folder / "two_chips.py").write_text(CHIPS)
    information = folder / "two_chips-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: two_chips\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[sglang_fl.comm]\ntwo_chips = two_chips:register_comm\n")


def _tune_with_chips(context: RankContext, folder: str, file: str) -> tuple[int, str]:
    sys.path.insert(0, folder)
    discover_backends.cache_clear()
    arguments = ["--op", "all_reduce", "--backends", "large,small", "-b", "1K", "-e", "64K", "-f", "4", "--tune", file]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = bench.main([*arguments, *FEW])
    return code, out.getvalue()


def _call_with_chips(context: RankContext, folder: str) -> tuple[dict[int, str], tuple[str, ...]]:
    """What carried an all_reduce of each size, and the group's routes in words."""
    sys.path.insert(0, folder)
    discover_backends.cache_clear()
    communicator = communicator_of_all(context)
    import two_chips  # type: ignore[import-not-found]  # it is written by the test

    carriers = {}
    for size in (4, 1024, 4096, 4100, 65536, 2**20):
        two_chips.CARRIED.clear()
        total = communicator.all_reduce(torch.ones(size // 4))
        assert total.eq(context.world_size).all()
        carriers[size] = next(iter(two_chips.CARRIED))[0]
    return carriers, communicator.routes


@pytest.mark.parametrize("base", ["large", "small"])
def test_what_was_tuned_is_what_carries(base: str, tmp_path: Path) -> None:
    """Given two backends of which each is slow where the other is fast, when the routes are measured and read back by
    SGLANG_FL_CONFIG, then each call goes to the fast one, whichever is the group's own."""
    _install_chips(tmp_path)
    file = tmp_path / "routes.yaml"
    order = {"SGLANG_FL_PER_OP": f"communicator=vendor:{base}", "FLAGCX_PATH": None, "SGLANG_FL_DIST_BACKEND": None}
    outcomes = run_ranks(_tune_with_chips, 2, str(tmp_path), str(file), timeout_s=LIMIT_S, env=order)
    assert [code for code, _ in outcomes] == [0, 0], outcomes
    expected = "small:4096" if base == "large" else "small:4096|large"
    assert f"# tuned: all_reduce: {expected}, else {base}" in outcomes[0][1]
    environment = {**order, "SGLANG_FL_CONFIG": str(file)}
    for carriers, routes in run_ranks(_call_with_chips, 2, str(tmp_path), timeout_s=LIMIT_S, env=environment):
        assert carriers == {4: "small", 1024: "small", 4096: "small", 4100: "large", 65536: "large", 2**20: "large"}
        assert routes == (f"all_reduce by size: {expected}|else {base}",)
