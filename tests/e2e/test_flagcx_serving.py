"""The real SGLang over FlagCX's C API (hostcx): its tokens are SGLang's own, and no group's call goes elsewhere."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from sglang_fl.testing.audits import VARIABLE, audit_path, inactive, settled_audits, wait_for
from sglang_fl.testing.tiny_model import DEFAULT_PROMPTS, GREEDY_TOKENS, Family

from .conftest import ROOT, Control
from .test_serving import Running
from .topologies import DP_ATTENTION, PP, TP, TP_PP, Topology, ask

pytestmark = pytest.mark.e2e

HOSTCX = ROOT / "build/hostcx"
METRICS = "--enable-metrics"


@pytest.fixture(scope="module", params=(TP, PP, TP_PP, DP_ATTENTION), ids=lambda topology: topology.name)
def running(
    request: pytest.FixtureRequest,
    models: Mapping[Family, Path],
    control: Control,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Running]:
    """A server whose FLAGCX_PATH names hostcx, and what SGLang alone answered."""
    topology: Topology = request.param
    expected = control(topology.control or topology)
    folder = tmp_path_factory.mktemp(f"flagcx-{topology.name}")
    audit = folder / "audit.json"
    server = topology.server(models, folder, {VARIABLE: str(audit), "FLAGCX_PATH": str(HOSTCX)})
    server.arguments = (*server.arguments, METRICS)
    with server:
        yield Running(topology, server, audit, expected)
    assert server.tree() == []


def test_tokens_equal_those_of_sglang_alone(running: Running) -> None:
    """Given FLAGCX_PATH alone, when the same is asked, then every group runs on FlagCX and the same tokens come."""
    audits = running.settled()
    assert inactive(running.server, audits) == []
    assert all(group.backend == "flagcx" for audit in audits for group in audit.shared_groups)
    assert ask(running.server) == running.expected


def test_no_call_of_a_group_goes_elsewhere(running: Running) -> None:
    """Given requests, then the audit has no torch.distributed call on a group's device group, and FlagCX's calls."""
    running.server.generate(DEFAULT_PROMPTS[0], GREEDY_TOKENS)
    wait_for(running.audit, running.server.world_size, lambda audits: all(audit.calls() for audit in audits))
    for rank in range(running.server.world_size):
        report = json.loads(audit_path(running.audit, rank).read_text())
        groups = {group["group"] for group in report["groups"]}
        around = [call for call in report["calls"] if call["around"] and call["group"] in groups]
        assert around == []
        carried = [call for call in report["calls"] if not call["around"]]
        assert carried and {call["backend"] for call in carried} == {"flagcx"}
        assert all(call["caller"].startswith("sglang/") for call in carried)


def test_metrics_have_what_the_groups_carried(running: Running) -> None:
    """Given --enable-metrics, when requests have run, then /metrics counts calls, bytes and time of each rank."""
    audits = settled_audits(running.audit, running.server.world_size)
    wanted = {f'rank="{audit.rank}"' for audit in audits}

    def lines() -> list[str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{running.server.port}/metrics", timeout=30) as reply:
            return [line for line in reply.read().decode().splitlines() if line.startswith("sglang_fl_comm_")]

    running.server.generate(DEFAULT_PROMPTS[1], GREEDY_TOKENS)
    wait_for(
        running.audit, running.server.world_size, lambda _: all(any(w in line for line in lines()) for w in wanted)
    )
    for name in ("calls_total", "bytes_total", "host_seconds_total"):
        values = [float(line.split()[-1]) for line in lines() if line.startswith(f"sglang_fl_comm_{name}")]
        assert values and all(value > 0 for value in values), name
