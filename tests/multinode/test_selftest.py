"""The self-test on two hosts: ranks whose settings or versions differ are told apart, and what is equal is tested."""

from __future__ import annotations

import sys
from pathlib import Path

from .conftest import Hosts

LIMIT_S = 120.0
PORT = 29560


def test_ranks_that_differ_in_a_version_and_a_setting_are_named(hosts: Hosts, tmp_path: Path) -> None:
    """Given another Triton and another mode on the second host, then both, with the ranks, and exit code 1 on both;
    the operations are tested all the same."""
    information = tmp_path / "packages/triton-9.9.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: triton\nVersion: 9.9\n")
    variables = [{}, {"PYTHONPATH": str(tmp_path / "packages"), "SGLANG_FL_STRICT": "1"}]
    logs = [tmp_path / host.name for host in hosts]
    processes = []
    for node, (host, log) in enumerate(zip(hosts, logs, strict=True)):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        command += [f"--master-addr={hosts[0].name}", f"--master-port={PORT}", f"--node-rank={node}"]
        command += ["-m", "sglang_fl.comm.selftest", "--quick", "--backend=torch", "--op=all_reduce", "--timeout=60"]
        processes.append(host.start(command, log, variables[node]))
    codes = [process.wait(LIMIT_S) for process in processes]
    said = logs[0].read_text()
    assert codes == [1, 1], said + logs[1].read_text()
    assert "# FAILED: the ranks differ: ops.strict is '0' on rank(s) [0], '1' on rank(s) [1]" in said
    assert "version of triton is" in said and "'9.9' on rank(s) [1]" in said
    assert "Give all nodes the same settings and the same versions." in said
    assert "\nall_reduce   " in said
