"""The self-test: right on the backends that run here, and not on libraries and backends with a planted fault."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from sglang_fl.comm import selftest
from sglang_fl.comm.communicator import CommunicatorFL
from sglang_fl.comm.discovery import discover_backends
from sglang_fl.comm.tools import data, launch
from sglang_fl.comm.tools.checks import CHECKS
from sglang_fl.comm.tools.data import Layout
from sglang_fl.comm.tools.launch import LaunchError, Place
from sglang_fl.testing.ranks import FailureKind, RankContext, RanksFailed, run_ranks

LIMIT_S = 240
SUMMING = {"all_reduce", "all_reduce_in_place", "all_reduce_new", "quant_all_reduce"}
LINE = re.compile(r"^(?P<operation>\S.*?) {2,}(?P<backend>\w+) +(?P<cases>\d+) +(?P<wrong>\d+) +\d+\.\d+", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """What one rank's self-test returned and said."""

    code: int
    out: str
    err: str

    def wrong(self) -> dict[str, int]:
        """Operation to #wrong, for the lines that are not right."""
        return {found["operation"]: int(found["wrong"]) for found in LINE.finditer(self.out) if int(found["wrong"])}


def _see(path: str) -> None:
    """Look for distributions in ``path``, too."""
    sys.path.insert(0, path)
    discover_backends.cache_clear()


def _selftest(context: RankContext, arguments: Sequence[str], path: str | None = None) -> Outcome:
    if path is not None:
        _see(path)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = selftest.main(["--timeout", "60", *arguments])
    return Outcome(code, out.getvalue(), err.getvalue())


def run_selftest(
    arguments: Sequence[str], flagcx: Path | None, world_size: int = 2, path: str | None = None
) -> Outcome:
    """Rank 0's outcome; every rank must return the same code, and only rank 0 talks."""
    env = {"FLAGCX_PATH": None if flagcx is None else str(flagcx), "HOSTCX_QUIET": "1", "SGLANG_FL_DIST_BACKEND": None}
    outcomes = run_ranks(_selftest, world_size, arguments, path, timeout_s=LIMIT_S, env=env)
    assert len({outcome.code for outcome in outcomes}) == 1
    assert not any(outcome.out for outcome in outcomes[1:])
    first: Outcome = outcomes[0]
    return first


def test_under_torchrun_every_operation_is_right_over_every_usable_backend(hostcx: Path, tmp_path: Path) -> None:
    record = tmp_path / "selftest.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "sglang_fl.comm.selftest", "--quick", "--json", str(record)]
    env = {**os.environ, "FLAGCX_PATH": str(hostcx), "HOSTCX_QUIET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {(line["operation"], line["backend"]): line for line in LINE.finditer(done.stdout)}
    expected = {(check.name, backend) for check in CHECKS for backend in ("flagcx", "torch")}
    assert set(found) == expected, done.stdout
    assert all(int(line["cases"]) > 0 and int(line["wrong"]) == 0 for line in found.values())
    assert "# nccl cannot be used: the group's torch.distributed backend is gloo" in done.stdout
    kept = json.loads(record.read_text())
    assert kept["ok"] is True and kept["kind"] == "comm" and len(kept["rows"]) == len(expected)


def _routes_selftest(context: RankContext) -> Outcome:
    return _selftest(context, ["--quick"])


def test_routes_by_size_are_tested_together(hostcx: Path) -> None:
    """Given mode fastest with routes, when the self-test runs, then every operation is also right over the routes."""
    environment = {
        "FLAGCX_PATH": str(hostcx),
        "SGLANG_FL_COMM_MODE": "fastest",
        "SGLANG_FL_COMM_ROUTES": "all_reduce=torch:64|flagcx;all_gather=torch:64",
    }
    outcomes = run_ranks(_routes_selftest, 2, env=environment)
    assert [outcome.code for outcome in outcomes] == [0, 0]
    tested = {found["operation"] for found in LINE.finditer(outcomes[0].out) if found["backend"] == "routes"}
    assert tested == {check.name for check in CHECKS}
    assert "# routes: all_gather by size: torch:64|else flagcx; all_reduce by size: torch:64|flagcx" in outcomes[0].out


@pytest.mark.parametrize("limit", ["0", "-1", "soon", "nan"])
def test_a_time_limit_that_is_none_is_a_usage_error(limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Given a limit that is no time, then the command line is refused with what is needed."""
    with pytest.raises(SystemExit):
        selftest.parse(["--timeout", limit])
    assert f"{limit!r} is no time limit; allowed is a number of seconds from 0.001, such as" in capsys.readouterr().err


def test_one_process_needs_no_torchrun() -> None:
    outcome = run_selftest(["--quick", "--backend", "torch"], None, world_size=1)
    assert outcome.code == 0, outcome.out + outcome.err
    assert "Start 2 or more" in outcome.out
    assert re.search(r"^send, recv +torch +0 +0 .*needs 2 ranks$", outcome.out, re.MULTILINE)


def test_every_public_method_of_the_communicator_is_tested() -> None:
    """A method that is added there must get its line here."""
    covered = {method for check in CHECKS for method in check.methods}
    beneath = {"isend", "send_held", "recv_into", "isend_object_part", "send_object_part", "recv_object_part"}
    beneath.add("broadcast_objects")
    about = {"destroy", "exceptions", "status", "from_agreed", "recorders", "dump"}
    public = {name for name, _ in inspect.getmembers(CommunicatorFL, inspect.isroutine) if not name.startswith("_")}
    assert public - beneath - about == covered


# Backends and libraries that do not do what they say


CHIP = """
from sglang_fl.comm.backends.torch_dist import TorchBackend, TorchTransport
from sglang_fl.selection import Availability, Kind


class Planted(TorchTransport):
    {fault}


class Chip(TorchBackend):
    def probe(self, context):
        return Availability.yes()

    def create(self, context):
        return Planted(self.name, context)


def register_comm(registry):
    registry.register(Chip("chip", Kind.VENDOR, vendor="chip"))
"""

FAULTS = {
    "all_reduce does nothing": (
        "def all_reduce(self, tensor): pass",
        SUMMING,
    ),
    "gather brings the parts in another order": (
        """
    def gather(self, output, tensor, dst):
        super().gather(output, tensor, dst)
        if output is not None:
            output.copy_(output.view(2, -1).flip(0).reshape(output.shape).clone())
        """,
        {"gather"},
    ),
    "broadcast always comes from rank 0": (
        "def broadcast(self, tensor, src): return super().broadcast(tensor, 0)",
        {"broadcast", "broadcast_tensor_dict", "all_gatherv"},
    ),
    "send changes the last byte": (
        """
    def send(self, tensor, dst):
        if tensor.numel() > 100:
            import torch
            tensor.view(torch.uint8)[-1] ^= 1
        return super().send(tensor, dst)
        """,
        {"send, recv", "send_tensor_dict, recv_tensor_dict"},
    ),
}


def _install_chip(folder: Path, fault: str) -> str:
    """An installed distribution with one backend, as a vendor would bring it; its folder for the module path."""
    (folder / "chip.py").write_text(CHIP.format(fault=textwrap.dedent(fault).strip().replace("\n", "\n    ")))
    information = folder / "chip-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: chip\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[sglang_fl.comm]\nchip = chip:register_comm\n")
    return str(folder)


@pytest.mark.parametrize("name", FAULTS)
def test_a_backend_with_a_fault_is_found_out(name: str, tmp_path: Path) -> None:
    fault, expected = FAULTS[name]
    outcome = run_selftest(["--quick", "--backend", "chip"], None, path=_install_chip(tmp_path, fault))
    assert outcome.code == 1, outcome.out
    assert set(outcome.wrong()) == expected, outcome.out
    assert re.search(r"^    rank [01], .*: \d+ wrong$", outcome.out, re.MULTILINE)


def test_an_operation_that_raises_ends_its_backend_and_fails(tmp_path: Path) -> None:
    fault = 'def gather(self, output, tensor, dst): raise RuntimeError("planted")'
    outcome = run_selftest(["--quick", "--backend", "chip"], None, path=_install_chip(tmp_path, fault))
    assert outcome.code == 1
    assert re.search(r"rank 0: CommError: group .* chip, .*, gather .* failed: planted; ", outcome.out), outcome.out
    assert "# FAILED: chip: what follows gather was not run" in outcome.out
    assert not re.search("^broadcast ", outcome.out, re.MULTILINE)


LIBRARY = """
#include <stddef.h>
#include <dlfcn.h>

typedef int (*all_reduce_function)(const void *, void *, size_t, int, int, void *, void *);

/* Does nothing from LIMIT elements on; everything else is the library's beneath. */
int flagcxAllReduce(const void *send, void *receive, size_t count, int type, int op, void *comm, void *stream) {
  if (count >= LIMIT) return 0;
  return ((all_reduce_function)dlsym(RTLD_NEXT, "flagcxAllReduce"))(send, receive, count, type, op, comm, stream);
}
"""


def _idle_library(folder: Path, hostcx: Path, limit: int) -> Path:
    """hostcx with an all_reduce that does nothing from ``limit`` elements on; a FLAGCX_PATH."""
    source, library = folder / "idle.c", folder / "lib" / "libflagcx.so"
    source.write_text(LIBRARY)
    library.parent.mkdir()
    beneath = hostcx / "lib"
    command = ["cc", "-shared", "-fPIC", "-D_GNU_SOURCE", f"-DLIMIT={limit}", "-o", str(library), str(source)]
    command += ["-Wl,--no-as-needed", f"-L{beneath}", "-l:libflagcx.so", f"-Wl,-rpath,{beneath}", "-ldl"]
    subprocess.run(command, check=True)
    return folder


def test_a_library_whose_all_reduce_does_nothing_cannot_be_created(hostcx: Path, tmp_path: Path) -> None:
    outcome = run_selftest(["--quick", "--backend", "flagcx"], _idle_library(tmp_path, hostcx, 0))
    assert outcome.code == 1
    assert "does not reduce" in outcome.out


def test_a_library_whose_all_reduce_does_nothing_for_larger_counts_is_found_out(hostcx: Path, tmp_path: Path) -> None:
    outcome = run_selftest(["--quick", "--backend", "flagcx"], _idle_library(tmp_path, hostcx, 100))
    assert outcome.code == 1
    assert set(outcome.wrong()) == SUMMING, outcome.out


# What cannot be run


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--backend", "nccl"], "nccl cannot be used: the group's torch.distributed backend is gloo"),
        (["--backend", "typo"], "no backend of this name is installed, there are flagcx, "),
        (["--backend", "flagcx"], "flagcx cannot be used: "),
        # FLAGCX_PATH alone asks for flagcx, too
        ([], "flagcx cannot be used: "),
    ],
)
def test_what_was_asked_for_must_be_usable(arguments: list[str], reason: str, tmp_path: Path) -> None:
    outcome = run_selftest(["--quick", *arguments], tmp_path / "nothing")
    assert outcome.code == 1
    assert reason in outcome.out
    assert "# FAILED: " in outcome.out


def test_single_methods_can_be_tested_alone() -> None:
    outcome = run_selftest(["--quick", "--backend", "torch", "--op", "recv,gather"], None)
    assert outcome.code == 0
    assert [found["operation"] for found in LINE.finditer(outcome.out)] == ["gather", "send, recv"]


def _hang(context: RankContext, path: str) -> int:
    _see(path)
    return selftest.main(["--quick", "--backend", "chip", "--op", "gather", "--timeout", "4"])


def test_a_hang_ends_with_the_case_and_the_stacks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Every process says where it stood, and ends."""
    fault = """
    def gather(self, output, tensor, dst):
        if tensor.numel() == 24:
            import threading
            threading.Event().wait()
        super().gather(output, tensor, dst)
    """
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_hang, 2, _install_chip(tmp_path, fault), timeout_s=LIMIT_S)
    assert {failure.kind for failure in failed.value.failures} == {FailureKind.EXITED}
    said = capfd.readouterr().err
    assert "in 'gather over chip' after " in said
    assert "cases, the last of them: float32 3x5 transposed cpu to " in said
    assert 'chip.py", line' in said


def _differ(context: RankContext) -> Outcome:
    os.environ["SGLANG_FL_STRICT"] = str(context.rank)
    return _selftest(context, ["--quick", "--backend", "torch"])


def test_ranks_with_different_settings_are_told_apart() -> None:
    outcomes = run_ranks(_differ, 2, timeout_s=LIMIT_S)
    assert [outcome.code for outcome in outcomes] == [1, 1]
    assert "the ranks differ: ops.strict is '0' on rank(s) [0], '1' on rank(s) [1]" in outcomes[0].out


def torchrun(rank: int, world_size: int, local_rank: int, local_world_size: int) -> dict[str, str]:
    """torchrun's variables."""
    return dict(zip(launch.VARIABLES, map(str, (rank, world_size, local_rank, local_world_size)), strict=True))


def test_the_device_is_the_local_ranks() -> None:
    place = launch.place_of(torchrun(9, 16, 1, 8))
    assert place == Place(9, 16, 1, 8)
    assert launch.device_of(place, "cuda", 8) == torch.device("cuda", 1)
    assert launch.device_of(place, "cpu", 0) == torch.device("cpu")
    assert launch.place_of({}) == Place(0, 1, 0, 1)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE='', LOCAL_RANK='', LOCAL_WORLD_SIZE=''"),
        ({"WORLD_SIZE": "2"}, "RANK=''"),
        (torchrun(2, 2, 0, 1), "a rank must be less than its world size"),
        (torchrun(0, 2, 0, 4), "a host's share at most the whole"),
        ({**torchrun(0, 2, 0, 2), "LOCAL_RANK": "-1"}, "LOCAL_RANK='-1'"),
        ({**torchrun(0, 2, 0, 2), "WORLD_SIZE": "9" * 5000}, "WORLD_SIZE='999999999999...9999999999999'"),
    ],
)
def test_a_launch_that_is_none_is_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(message)):
        launch.place_of(environment)


def test_more_processes_than_devices_are_refused() -> None:
    with pytest.raises(LaunchError, match=r"LOCAL_RANK=3, but this host has 2 cuda device\(s\)"):
        launch.device_of(Place(3, 4, 3, 4), "cuda", 2)


# The data, on which everything above stands


@pytest.mark.parametrize("dtype", data.DTYPES)
@pytest.mark.parametrize("layout", Layout)
def test_a_placed_tensor_sees_a_wrong_element_and_a_touched_neighbour(dtype: torch.dtype, layout: Layout) -> None:
    values = data.random_bytes((3, 5), dtype, seed=1)
    placed = data.place(values, layout, torch.device("cpu"))
    assert placed.wrong(values) == 0
    assert data.wrong_elements(placed.tensor, values) == 0
    flipped = placed.storage.view(torch.uint8)
    last = placed.tensor[2, 4].storage_offset() * dtype.itemsize
    flipped[last] ^= 1
    assert placed.wrong(values) == 1
    assert data.wrong_elements(placed.tensor, values) == 1
    flipped[last] ^= 1
    flipped[-1] ^= 1
    assert placed.wrong(values) == 1


@pytest.mark.parametrize("world_size", [1, 2, 8, 300, 3000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.int8])
def test_sums_are_exact_in_any_order(dtype: torch.dtype, world_size: int) -> None:
    parts = [data.whole_numbers((64,), dtype, data.seed_of(7, rank), rank, world_size) for rank in range(world_size)]
    total = sum(parts, torch.zeros(64, dtype=torch.int64))
    in_order = torch.zeros(64, dtype=dtype)
    for part in parts:
        assert torch.equal(part.to(dtype).to(torch.int64), part)
        in_order += part.to(dtype)
    assert torch.equal(in_order, total.to(dtype))
    assert total.unique().numel() > 1
