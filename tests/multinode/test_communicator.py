"""CommunicatorFL across two hosts: the self-test, and the refusal of a library that works on one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import Hosts

LIMIT_S = 120.0  # against a hang; half a minute is much on a busy machine
PORT = 29500  # nobody else has one on these hosts


def _wait(processes: list[subprocess.Popen[str]], logs: list[Path]) -> None:
    for process, log in zip(processes, logs, strict=True):
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {LIMIT_S:g} s: {process.args}\n{log.read_text()}")
        assert code == 0, f"{process.args}\n{log.read_text()}"


def test_the_self_test_passes_under_torchrun(hosts: Hosts, tmp_path: Path) -> None:
    """Given torchrun on both hosts, when it runs the self-test, then every line is right on ranks of both."""
    logs = [tmp_path / host.name for host in hosts]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    torchrun += [f"--master-addr={hosts[0].name}", f"--master-port={PORT}"]
    self_test = ["-m", "sglang_fl.comm.selftest", "--quick", "--backend=torch"]
    processes = [
        host.start([*torchrun, f"--node-rank={node}", *self_test], log)
        for node, (host, log) in enumerate(zip(hosts, logs, strict=True))
    ]
    _wait(processes, logs)
    said = logs[0].read_text()
    print(said)
    assert "settings and versions are equal on 2 rank(s) of 2 host(s)" in said
    for rank, host in enumerate(hosts):
        assert f"# rank {rank} on {host.name}" in said
    assert "# OK: " in said


@pytest.fixture(scope="module")
def chosen(hosts: Hosts, hostcx: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four ranks, two a host, says about hostcx across the hosts and on each of them."""
    folder = tmp_path_factory.mktemp("chosen")
    processes, logs = [], []
    for rank in range(4):
        host, local_rank = hosts[rank // 2], rank % 2
        place = {
            "RANK": rank,
            "WORLD_SIZE": 4,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": 2,
            "MASTER_PORT": PORT + 1,
        }
        environment = {name: str(value) for name, value in place.items()}
        environment |= {"MASTER_ADDR": hosts[0].address, "FLAGCX_PATH": str(hostcx), "HOSTCX_QUIET": "1"}
        environment |= {"SGLANG_FL_DIST_BACKEND": "flagcx"}
        logs.append(folder / f"rank{rank}")
        script = [sys.executable, "-m", "tests.multinode.choose"]
        processes.append(host.start(script, logs[-1], environment))
    _wait(processes, logs)
    return [json.loads(log.read_text().splitlines()[-1]) for log in logs]


def test_a_library_of_one_machine_is_passed_over_on_all_ranks(chosen: list[dict[str, Any]], hosts: Hosts) -> None:
    """Given hostcx asked for across hosts, then all ranks take the next backend, for one and the same reason."""
    across = [views["across"] for views in chosen]
    assert [view["backend"] for view in across] == ["torch"] * 4
    assert [view["sum"] for view in across] == [[6.0] * 3] * 4
    (reason,) = {view["reasons"]["flagcx"] for view in across}
    assert "connects processes of one machine, these ranks are on different ones" in reason
    for host, ranks in zip(hosts, ([0, 1], [2, 3]), strict=True):
        assert f"global rank(s) {ranks} on {host.name}" in reason


def test_in_strict_mode_all_ranks_raise_the_same_error(chosen: list[dict[str, Any]]) -> None:
    """Given hostcx across hosts and strict mode, then every rank raises, with one and the same text."""
    (error,) = {views["across, strict"]["error"] for views in chosen}
    assert "Strict mode allows only the first choice" in error
    assert "connects processes of one machine, these ranks are on different ones" in error


def test_a_group_within_a_host_keeps_the_library(chosen: list[dict[str, Any]]) -> None:
    """Given the same four ranks, then the groups of ranks of one host run on the library all the same."""
    for group, ranks in (("first host", (0, 1)), ("second host", (2, 3))):
        for rank, views in enumerate(chosen):
            expected = {"backend": "flagcx", "reasons": {}, "sum": [float(sum(ranks))] * 3}
            assert views[group] == (expected if rank in ranks else None)
