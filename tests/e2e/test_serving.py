"""The real SGLang at every size, with the plugin in charge: its tokens are those of SGLang alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from sglang_fl.testing.audits import VARIABLE, ProcessAudit, inactive, settled_audits, wait_for
from sglang_fl.testing.server import Server
from sglang_fl.testing.tiny_model import DEFAULT_PROMPTS, GREEDY_TOKENS, Family

from .conftest import Control
from .topologies import ALL, Answers, Topology, ask, difference

pytestmark = pytest.mark.e2e


@dataclass(frozen=True)
class Running:
    """A server with the plugin, and what SGLang without it answered before."""

    topology: Topology
    server: Server
    audit: Path
    expected: Answers

    def settled(self) -> list[ProcessAudit]:
        """What the processes report while nothing is asked."""
        return settled_audits(self.audit, self.server.world_size)


@pytest.fixture(scope="module", params=ALL, ids=lambda topology: topology.name)
def running(
    request: pytest.FixtureRequest,
    models: Mapping[Family, Path],
    control: Control,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Running]:
    """One server at a time: first the control, if it has not run yet, then the one with the plugin."""
    topology: Topology = request.param
    expected = control(topology.control or topology)
    folder = tmp_path_factory.mktemp(topology.name)
    audit = folder / "audit.json"
    with topology.server(models, folder, {VARIABLE: str(audit)}) as server:
        yield Running(topology, server, audit, expected)
    assert server.tree() == []


def test_the_plugin_is_active_in_every_scheduler_process(running: Running) -> None:
    """Given a server, then each scheduler process, and no other, reports that every hook is live."""
    audits = running.settled()
    assert inactive(running.server, audits) == []
    assert [audit.rank for audit in audits] == list(range(running.server.world_size))
    for audit in audits:
        assert all(group.backend == "torch" for group in audit.shared_groups), audit
        assert bool(audit.shared_groups) == (running.server.world_size > 1)


def test_both_reports_are_in_the_log(running: Running) -> None:
    """Given a server, then its log has layers with reasons, groups with backends and the ranks' agreement."""
    logs = running.server.logs()
    world_size = running.server.world_size
    for layer in ("layer 1, ATen operators: off: ", "layer 2, fused operators: on: ", "layer 3, communication: on: "):
        assert logs.count(f"[sglang_fl] {layer}") >= world_size
    assert logs.count(f"settings, versions and choices are equal on {world_size} rank(s)") == world_size
    assert logs.count("checked by identity") == world_size


def test_tokens_and_answers_equal_those_of_sglang_alone(running: Running) -> None:
    """Given the same model and sizes, when the same is asked, then the same tokens come, and they are no monotone."""
    answers = ask(running.server)
    assert answers == running.expected
    for tokens in (*answers.alone, *answers.batched):
        assert len(tokens) == GREEDY_TOKENS
        assert len(set(tokens)) >= GREEDY_TOKENS // 4, f"too few different tokens to prove anything: {tokens}"
    assert len(set(answers.batched)) == len(DEFAULT_PROMPTS)
    assert answers.chat


def test_every_forward_goes_through_the_communicator(running: Running) -> None:
    """Given a request of N tokens, then each rank's calls grow by at least N times what one forward needs."""
    tokens = GREEDY_TOKENS
    before = [audit.calls() for audit in running.settled()]

    def grown(audits: list[ProcessAudit]) -> bool:
        for audit in audits:
            made = difference(audit.calls(), before[audit.rank])
            wanted = running.topology.calls_of(audit.rank)
            if any(made[method] < tokens * count for method, count in wanted.items()):
                return False
        return True

    running.server.generate(DEFAULT_PROMPTS[0], tokens)
    after = wait_for(running.audit, running.server.world_size, grown)
    print([dict(difference(audit.calls(), before[audit.rank])) for audit in after])
