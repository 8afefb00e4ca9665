"""The control of the controls: one wrong all_reduce in each forward changes the tokens, so equal tokens mean something.

The fault sits in a backend that an installed distribution brings, as a vendor's would.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from sglang_fl.testing.audits import VARIABLE, inactive, settled_audits
from sglang_fl.testing.tiny_model import Family

from .conftest import Control
from .distributions import write_distribution
from .topologies import TP, ask

pytestmark = pytest.mark.e2e

# A forward at tp=2 has five: after the embedding, and after attention and MLP of both layers.
FAULTY = '''
"""torch.distributed, except that of every five all_reduces one leaves out rank 1."""
from sglang_fl.comm.backends.torch_dist import TorchBackend, TorchTransport
from sglang_fl.selection import Kind


class FaultyTransport(TorchTransport):
    def __init__(self, name, context):
        super().__init__(name, context)
        self.calls = 0
        self.rank = context.rank

    def all_reduce(self, tensor):
        if self.calls % 5 == 2 and self.rank == 1:
            tensor.zero_()
        self.calls += 1
        super().all_reduce(tensor)


class FaultyBackend(TorchBackend):
    def create(self, context):
        return FaultyTransport(self.name, context)


def register_comm(registry):
    registry.register(FaultyBackend("faulty", Kind.FLAGOS))
'''


def test_one_wrong_all_reduce_changes_the_tokens(
    models: Mapping[Family, Path], control: Control, tmp_path: Path
) -> None:
    """Given an installed backend with a fault, when auto selects it, then every prompt's tokens differ."""
    expected = control(TP)
    packages = write_distribution(tmp_path / "packages", "faulty", FAULTY, "sglang_fl.comm", "register_comm")
    audit = tmp_path / "audit.json"
    environment = {VARIABLE: str(audit), "SGLANG_FL_DIST_BACKEND": "auto", "PYTHONPATH": str(packages)}
    with TP.server(models, tmp_path, environment) as server:
        answers = ask(server)
        audits = settled_audits(audit, server.world_size)
        assert inactive(server, audits) == []
    for report in audits:
        assert {group.backend for group in report.shared_groups} == {"faulty"}
        assert report.calls()["all_reduce"] > 0
    pairs = zip((*answers.alone, *answers.batched), (*expected.alone, *expected.batched), strict=True)
    assert all(got != wanted for got, wanted in pairs), (answers, expected)
