"""The GPU's own time of a decode step: the graph that SGLang captured for it, replayed back to back between events.

Armed through SGLang's ``set_internal_state``, which reaches the schedulers of all ranks before any later request. The
decode step of the wanted batch then runs as always, and behind it, on the same stream and with the inputs that it has
just had, its graph is replayed some more. All ranks count the same steps, so the collectives in it meet. A replay
writes again what the step wrote, into places of that step's own requests; the state of a recurrent layer advances
with each, so that nothing may be read from their answers. Before and after, SGLang's method is called as ever.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

# In the place of a name of SGLang's server arguments: batch, step and path.
KEY = "sglang_e2e_benchmark_graph"
# Replays before the first event, events after it, and replays between two.
WARM_UP = 20
SPANS = 5
REPLAYS = 20


def take_order(original: Any, scheduler: Any, request: Any) -> Any:
    """Around ``Scheduler.set_internal_state``: any other request is SGLang's own.

    Args:
        original: SGLang's method.
        scheduler: of this rank; all ranks get the request.
        request: its ``server_args`` may have ``KEY``: ``{"batch": requests, "step": number, "path": file}``.
    """
    order = request.server_args.get(KEY)
    if order is None:
        return original(scheduler, request)
    import torch
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    model_runner = scheduler.tp_worker.model_runner
    path = Path(f"{order['path']}.rank{torch.distributed.get_rank()}")
    device = torch.get_device_module(model_runner.device)
    follow(order, model_runner.graph_runner, device, path)
    return SetInternalStateReqOutput(updated=True, server_args={})


def follow(order: Mapping[str, Any], runner: Any, device: Any, path: Path) -> None:
    """Wait for the decode step of the order; where it has no graph, write why at once.

    Args:
        order: ``batch`` requests, and which ``step`` of all that decode so many; the first is 1.
        runner: SGLang's runner of graphs, or None.
        device: torch.cuda, or another accelerator's module.
        path: of this rank; gets ``{"us": [...]}``, microseconds a replay, or ``{"absent": reason}``.
    """
    reason = why_not(runner, order["batch"])
    if reason:
        _write(path, {"absent": reason})
    else:
        Wait(runner, device, order["batch"], order["step"], path).begin()


def why_not(runner: Any, batch: int) -> str:
    """Why a decode step of ``batch`` requests has no graph that can be replayed; empty where it has one."""
    if runner is None:
        return "no graph here: SGLang decodes without graphs"
    if batch not in runner.graphs:
        return f"no graph here: SGLang captured none for batch {batch}, but for {', '.join(map(str, runner.graphs))}"
    if not hasattr(runner.graphs[batch], "replay"):
        return f"no graph here: what {type(runner).__name__} keeps cannot be replayed"
    return ""


@dataclass
class Wait:
    """Until the step comes; in the place of the runner's ``replay`` so long."""

    runner: Any
    device: Any
    batch: int
    step: int
    path: Path
    seen: int = 0

    def begin(self) -> None:
        """From the next replay on."""
        own = self.runner.replay

        def replay(*arguments: Any, **named: Any) -> Any:
            output = own(*arguments, **named)
            self.seen += self.runner.raw_bs == self.batch
            if self.seen == self.step:
                self.runner.replay = own
                _write(self.path, {"us": measure(self.runner.graphs[self.batch], self.device)})
            return output

        self.runner.replay = replay


def measure(graph: Any, device: Any) -> list[float]:
    """Microseconds a replay, of each span; on the current stream, waiting for the last event only."""
    marks = [device.Event(enable_timing=True) for _ in range(SPANS + 1)]
    for _ in range(WARM_UP):
        graph.replay()
    marks[0].record()
    for mark in marks[1:]:
        for _ in range(REPLAYS):
            graph.replay()
        mark.record()
    marks[-1].synchronize()
    return [first.elapsed_time(second) * 1e3 / REPLAYS for first, second in pairwise(marks)]


def _write(path: Path, content: Mapping[str, Any]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(content))
    partial.rename(path)
