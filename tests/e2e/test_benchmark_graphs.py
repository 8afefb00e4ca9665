"""The GPU's time of a decode step in a real server of two ranks, whose graphs are a stand-in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.e2e import shapes
from benchmarks.e2e.configurations import CONFIGURATIONS, NATIVE
from benchmarks.e2e.graphs import graph_steps
from benchmarks.e2e.requests import Sizes, answers
from benchmarks.e2e.server_plugin.graphs import SPANS
from benchmarks.e2e.servers import Site, install_plugin

from . import graph_runner_standin as standin

pytestmark = pytest.mark.e2e


def test_all_ranks_measure_the_same_step_and_later_answers_stay(tmp_path: Path) -> None:
    """Given two ranks with collectives in the step, then both measure each batch that has a graph, and no other."""
    plugin = install_plugin(tmp_path / "plugin")
    shutil.copy(standin.__file__, plugin)
    described = plugin / f"{standin.NAME}-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {standin.NAME}\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{standin.NAME} = {standin.NAME}:load\n")
    site = Site(shapes.write("tiny", tmp_path / "model"), plugin, tmp_path, 2, is_on_gpu=False)
    server = site.server(CONFIGURATIONS[NATIVE], "0-native", 300.0, None)
    server.environment["SGLANG_PLUGINS"] = f"{server.environment['SGLANG_PLUGINS']},{standin.NAME}"
    sizes = Sizes(shapes.vocabulary_size("tiny"), (1, 2, 4), steps=16, prompts=1)
    one, two, four = graph_steps(sizes)
    with server:
        before = answers(server, sizes)
        assert four.warm_up(server) == "no graph here: SGLang captured none for batch 4, but for 1, 2"
        for step in (one, two):
            assert step.warm_up(server) == ""
            taken = step.sample(server)
            ranks = [json.loads((tmp_path / f"0-native.graph.rank{rank}").read_text())["us"] for rank in range(2)]
            slowest = sorted(max(spans) for spans in zip(*ranks, strict=True))
            assert len(slowest) == SPANS and slowest[0] > 0 and taken == slowest[SPANS // 2]
        assert answers(server, sizes) == before
