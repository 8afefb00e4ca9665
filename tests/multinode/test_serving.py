"""SGLang over two hosts: its tokens are those of one host without the plugin, its calls go through CommunicatorFL."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sglang_fl.testing.audits import VARIABLE, ProcessAudit, audit_path, settled_audits
from sglang_fl.testing.hosts import ServerOnHosts
from sglang_fl.testing.server import Server
from sglang_fl.testing.tiny_model import DEFAULT_PROMPTS, GREEDY_TOKENS

from .conftest import Hosts

# float32, because bfloat16 leaves ties between tokens, which rounding would decide.
ARGUMENTS = ("--dtype=float32",)
# Of each rank in every forward: the embedding, attention and MLP of two layers reduce, the logits gather.
CALLS = {"all_reduce": 5, "all_gather": 1}
PROMPTS = DEFAULT_PROMPTS[:2]


@dataclass(frozen=True)
class Served:
    """What two hosts answered, where the ranks ran, and what they reported before the requests and after them."""

    tokens: list[list[int]]
    networks: list[int]
    before: list[ProcessAudit]
    audits: list[ProcessAudit]
    rows: list[list[dict[str, Any]]]


def _ask(server: Server) -> list[list[int]]:
    return [server.generate(prompt, GREEDY_TOKENS) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """SGLang alone, both ranks on this host."""
    environment = {"SGLANG_PLUGINS": "__none__"}
    with Server(model, tmp_path_factory.mktemp("control"), ARGUMENTS, environment, tp=2) as server:
        tokens = _ask(server)
    assert "[sglang_fl]" not in server.logs()
    return tokens


@pytest.fixture(scope="module")
def served(model: Path, hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The same model and sizes, one rank on each host."""
    folder = tmp_path_factory.mktemp("two-hosts")
    audit = folder / "audit.json"
    environment = {"SGLANG_FL_DIST_BACKEND": "torch", VARIABLE: str(audit)}
    with ServerOnHosts(model, folder, ARGUMENTS, environment, tp=2, hosts=hosts) as server:
        print(f"ready after {server.ready_after_s:.1f} s\n{server.shell_command(0)}\n{server.shell_command(1)}")
        before = settled_audits(audit, server.world_size)
        tokens = _ask(server)
        networks = [Path(f"/proc/{process.pid}/ns/net").stat().st_ino for process in server.schedulers()]
        audits = settled_audits(audit, server.world_size)
    assert server.tree() == []
    rows = [json.loads(audit_path(audit, rank).read_text())["calls"] for rank in range(2)]
    yield Served(tokens, networks, before, audits, rows)


def test_each_rank_ran_on_its_own_host(served: Served, hosts: Hosts) -> None:
    """Given two scheduler processes, then each is in the network of another host."""
    of_hosts = {Path(f"/proc/{host.first_pid}/ns/net").stat().st_ino for host in hosts}
    assert len(served.networks) == 2
    assert set(served.networks) == of_hosts


def test_tokens_equal_those_of_one_host_without_the_plugin(served: Served, expected: list[list[int]]) -> None:
    """Given the same requests, then the same tokens come, and they are no monotone."""
    assert served.tokens == expected
    for tokens in served.tokens:
        assert len(set(tokens)) >= GREEDY_TOKENS // 4


def test_both_ranks_carried_every_forward(served: Served) -> None:
    """Given requests of N tokens, then each rank's report has all hooks live and N forwards on torch, or more."""
    forwards = len(PROMPTS) * GREEDY_TOKENS
    assert [audit.rank for audit in served.audits] == [0, 1]
    for before, audit in zip(served.before, served.audits, strict=True):
        assert audit.hooks_live == audit.hooks > 0
        assert [group.backend for group in audit.shared_groups] == ["torch"] * len(audit.shared_groups)
        made = audit.calls() - before.calls()
        assert made.keys() == CALLS.keys()
        for method, least in CALLS.items():
            assert made[method] >= least * forwards


def test_no_collective_on_the_groups_device_went_around(served: Served) -> None:
    """Given both reports, then what bypassed CommunicatorFL were SGLang's own requests on CPU groups, and start-up."""
    for rows in served.rows:
        carried = [row for row in rows if not row["around"]]
        assert {row["group"] for row in carried} == {"tp:0"}
        assert sorted({row["operation"] for row in carried}) == sorted(CALLS)
        assert all("sglang/srt/distributed/communication_op.py:" in row["caller"] for row in carried)
        around = {row["group"] for row in rows if row["around"]}
        assert around.isdisjoint({"tp:0", "world:0"})
