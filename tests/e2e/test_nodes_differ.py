"""Two nodes that are not alike end with an error that names rank and field, and do not hang."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_fl.testing.server import Environment, Server
from sglang_fl.testing.tiny_model import Family

from .topologies import CONTROL, TWO_NODES

pytestmark = pytest.mark.e2e

BOUND_S = 300.0
# The plugin waits two minutes for a rank, or as long as SGLang is told to wait.
WAIT_S = 45


def _two_nodes(models: Mapping[Family, Path], folder: Path, second: Environment, *arguments: str) -> Server:
    topology = replace(TWO_NODES, arguments=arguments)
    return replace(topology.server(models, folder, {}), node_environments={1: second})


@pytest.fixture(scope="module")
def without_plugin(models: Mapping[Family, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Node 1 has no plugin. Most of its time is waiting, so it starts first and is looked at last."""
    folder = tmp_path_factory.mktemp("without_plugin")
    server = _two_nodes(models, folder, CONTROL, f"--dist-timeout={WAIT_S}")
    server.start()
    yield server
    server.stop()


def test_a_different_setting_is_named_on_both_nodes(
    without_plugin: Server, models: Mapping[Family, Path], tmp_path: Path
) -> None:
    """Given SGLANG_FL_COMM_MODE on one node only, then both nodes end, and each names field, values and ranks."""
    server = _two_nodes(models, tmp_path, {"SGLANG_FL_COMM_MODE": "fastest"})
    codes = server.run_to_end(BOUND_S)
    assert all(code != 0 for code in codes), codes
    for node in range(2):
        expected = "the ranks differ in comm.mode: global rank 0 has all; global rank 1 has fastest"
        assert expected in server.log(node), server.log(node)


def test_a_node_without_the_plugin_is_named(without_plugin: Server) -> None:
    """Given a node that does not load the plugin, then the other names the group, the stage and the missing rank."""
    codes = without_plugin.wait_for_end(BOUND_S)
    assert all(code != 0 for code in codes), codes
    log = without_plugin.log(0)
    missing = "group world:0, global rank 0 of [0, 1]: global rank(s) [1] did not reach 'announce candidates'"
    assert f"{missing} within {WAIT_S} s" in log, log
    assert "is the plugin installed and loaded there?" in log
