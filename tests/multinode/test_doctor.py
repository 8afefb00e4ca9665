"""The doctor on two hosts: a host name that resolves to the loopback is told with what to do, and that helps."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang_fl.testing.hosts import INTERFACE, Host

from .conftest import Hosts
from .test_communicator import _wait

PORT = 29540
MODULE = (sys.executable, "-m", "sglang_fl", "doctor", "--json", "--quick")


@pytest.fixture
def loopback_hosts(hosts: Hosts, tmp_path: Path) -> Path:
    """A hosts file as many installers write it: this host's own name is of the loopback, the others are not known."""
    path = tmp_path / "hosts-file"
    path.write_text("127.0.0.1 localhost\n127.0.1.1 " + " ".join(host.name for host in hosts) + "\n")
    return path


def with_hosts_file(path: Path, command: Sequence[str]) -> list[str]:
    """``command`` with another /etc/hosts, for itself alone."""
    script = 'mount --bind "$0" /etc/hosts && exec "$@"'
    return ["/usr/bin/env", "unshare", "--mount", "/bin/sh", "-c", script, str(path), *command]


def examine(host: Host, *arguments: str, hosts_file: Path | None = None, variables: str = "") -> dict[str, Any]:
    """The doctor's report on ``host``; ``variables``: NAME=value to set."""
    command = ["/usr/bin/env", *variables.split(), *MODULE, *arguments]
    done = host.run(with_hosts_file(hosts_file, command) if hosts_file else command, 120.0)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["ok"] is (done.returncode == 0)
    return report


def test_hosts_that_know_each_other_have_no_problem(hosts: Hosts) -> None:
    """Given names that resolve to the cable's addresses, then code 0, and the interface and address of the cable."""
    for host in hosts:
        report = examine(host, "--nnodes=2", f"--master-addr={hosts[0].name}")
        assert report["problems"] == []
        network = report["network"]
        assert (network["interface"], network["address"]) == (INTERFACE, host.address)
        assert network["host_addresses"] == [host.address] and not network["host_is_loopback"]
    assert network["reason"] == f"it leads to {hosts[0].address}"


def test_a_name_of_the_loopback_is_a_problem_on_two_hosts_alone(hosts: Hosts, loopback_hosts: Path) -> None:
    """Given a host name that resolves to 127.0.1.1, then two hosts make it a problem with the interface to use."""
    report = examine(hosts[0], "--nnodes=2", hosts_file=loopback_hosts)
    (problem,) = report["problems"]
    assert f"the host name {hosts[0].name} resolves to 127.0.1.1, which other hosts cannot reach" in problem["found"]
    assert f"export GLOO_SOCKET_IFNAME={INTERFACE}" in problem["action"]
    assert f"--local-addr={hosts[0].address}" in problem["action"]
    alone = examine(hosts[0], hosts_file=loopback_hosts)
    assert alone["problems"] == []
    assert any("on one host that does no harm" in each["found"] for each in alone["warnings"])


def test_nccls_notation_for_gloo_is_told_with_the_interface_to_use(hosts: Hosts, loopback_hosts: Path) -> None:
    """Given GLOO_SOCKET_IFNAME=^lo,docker on top, then gloo takes one plain name, here that of the cable."""
    report = examine(hosts[0], "--nnodes=2", hosts_file=loopback_hosts, variables="GLOO_SOCKET_IFNAME=^lo,docker")
    (problem,) = [each for each in report["problems"] if "GLOO_SOCKET_IFNAME=^lo,docker" in each["found"]]
    assert "gloo takes one plain name" in problem["found"]
    assert problem["action"] == f"export GLOO_SOCKET_IFNAME={INTERFACE}"


def test_a_master_that_each_host_finds_in_itself_is_a_problem(hosts: Hosts, loopback_hosts: Path) -> None:
    """Given the first host's name as MASTER_ADDR, and a hosts file that makes it the loopback, then that is told."""
    report = examine(hosts[1], "--nnodes=2", f"--master-addr={hosts[0].name}", hosts_file=loopback_hosts)
    assert any("where other hosts find themselves" in each["found"] for each in report["problems"])
    unknown = examine(hosts[1], "--nnodes=2", "--master-addr=host-c")
    assert any("MASTER_ADDR=host-c does not resolve" in each["found"] for each in unknown["problems"])


def test_what_the_doctor_says_to_do_helps(hosts: Hosts, loopback_hosts: Path, tmp_path: Path) -> None:
    """Given the wrong hosts file on both, when the action is followed, then doctor and self-test are content."""
    report = examine(hosts[0], "--nnodes=2", hosts_file=loopback_hosts, variables=f"GLOO_SOCKET_IFNAME={INTERFACE}")
    assert report["problems"] == []
    logs = [tmp_path / host.name for host in hosts]
    processes = []
    for node, (host, log) in enumerate(zip(hosts, logs, strict=True)):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        torchrun += [f"--master-addr={hosts[0].address}", f"--master-port={PORT}", f"--node-rank={node}"]
        torchrun += [f"--local-addr={host.address}", "-m", "sglang_fl.comm.selftest", "--quick", "--op=all_reduce"]
        variables = ["/usr/bin/env", f"GLOO_SOCKET_IFNAME={INTERFACE}"]
        processes.append(host.start(with_hosts_file(loopback_hosts, [*variables, *torchrun]), log))
    _wait(processes, logs)
    assert "# OK: " in logs[0].read_text()
