"""The rows of the GPU's own time: a server is told to replay the graph of a decode step, and is asked for that step.

The time of a request is also the host's, in whose noise a difference below a hundredth is lost; the GPU's time
between two events has none of it. How it is measured is in :mod:`benchmarks.e2e.server_plugin.graphs`.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.e2e.requests import GPU_DECODE, PROMPT_TOKENS, Sizes, ask, make_prompts
from benchmarks.e2e.server_plugin.graphs import KEY
from sglang_fl.testing.server import Server, ServerError

# Decode steps that are asked for, and which of all with the whole batch is measured: late enough that all requests
# are in it, early enough that none has ended.
STEPS = 32
MEASURED_STEP = 16
REPORT_WAIT_S = 10.0


@dataclass(frozen=True)
class GraphStep:
    """One row: the graph of a decode step.

    Attributes:
        name: of the row, {} where the configuration's name goes.
        prompts: token ids, as of the row of the request's time.
    """

    name: str
    prompts: list[list[int]]

    def warm_up(self, server: Server) -> str:
        """Measure once for nothing; why there is nothing to measure, empty where there is."""
        path = self._order(server)
        first = _report(path, 0)
        if first.exists():
            return str(json.loads(first.read_text())["absent"])
        self._measure(server, path)
        return ""

    def sample(self, server: Server, _: int = 1) -> float:
        """Microseconds of a decode step: of the slowest rank in each span of replays, the median of the spans.

        Raises:
            ServerError: a rank did not measure.
        """
        return self._measure(server, self._order(server))

    def _order(self, server: Server) -> Path:
        path = server.log_path().with_suffix(".graph")
        for rank in range(server.world_size):
            _report(path, rank).unlink(missing_ok=True)
        order = {"batch": len(self.prompts), "step": MEASURED_STEP, "path": str(path)}
        server.post("/set_internal_state", {"server_args": {KEY: order}})
        return path

    def _measure(self, server: Server, path: Path) -> float:
        ask(server, self.prompts, STEPS + 1, 0.0)
        name = f"{GPU_DECODE}, batch {len(self.prompts)}"
        ranks = [_read(_report(path, rank), name, server) for rank in range(server.world_size)]
        slowest: list[float] = [max(spans) for spans in zip(*ranks, strict=True)]
        return statistics.median(slowest)


def graph_steps(sizes: Sizes) -> Iterator[GraphStep]:
    """All rows of the GPU's time that are wanted; with the prompts of the greedy decode rows."""
    for batch in sizes.batches if GPU_DECODE in sizes.rows else ():
        yield GraphStep(f"{GPU_DECODE} {{}}, batch {batch}", make_prompts(sizes, batch, PROMPT_TOKENS))


def _report(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.name}.rank{rank}")


def _read(path: Path, name: str, server: Server) -> list[float]:
    """What a rank measured: its report may come after rank 0's answer."""
    ends_s = time.monotonic() + REPORT_WAIT_S
    while not path.exists():
        if time.monotonic() > ends_s:
            raise ServerError(
                f"{name}: {path.name} did not come within {REPORT_WAIT_S:g} s: its rank never decoded the whole batch "
                f"{MEASURED_STEP} times by its graph; see {server.log_path()}, or leave the row out with --rows"
            )
        time.sleep(0.01)
    return [float(each) for each in json.loads(path.read_text())["us"]]
