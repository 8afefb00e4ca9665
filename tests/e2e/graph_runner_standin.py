"""An SGLang plugin: a stand-in for SGLang's runner of CUDA graphs on a CPU; a replay is the forward pass again."""

from __future__ import annotations

import time
from multiprocessing import parent_process
from typing import Any

import torch

NAME = "graph_runner_standin"


class Event:
    """As torch.cuda.Event, by the host's clock."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.at_s = 0.0

    def record(self, *_: Any) -> None:
        """Now."""
        self.at_s = time.perf_counter()

    def synchronize(self) -> None:
        """All is done at once on a CPU."""

    def elapsed_time(self, later: Event) -> float:
        """Milliseconds."""
        return (later.at_s - self.at_s) * 1e3


class Graph:
    """The last step of the runner again."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def replay(self) -> None:
        """With the inputs that the step had."""
        self.runner.output = self.runner.model_runner.model.forward(*self.runner.inputs)


class Runner:
    """What SGLang's model runner and the benchmark use of CudaGraphRunner; there are graphs for one and for two."""

    def __init__(self, model_runner: Any) -> None:
        self.model_runner = model_runner
        self.graphs = {batch: Graph(self) for batch in (1, 2)}
        self.raw_bs = 0
        self.inputs: tuple[Any, ...] = ()
        self.output: Any = None

    def can_run(self, forward_batch: Any) -> bool:
        """Whether there is a graph for so many requests."""
        return forward_batch.batch_size in self.graphs

    def replay(self, forward_batch: Any, **_: Any) -> Any:
        """One decode step."""
        self.raw_bs = forward_batch.batch_size
        self.inputs = forward_batch.input_ids, forward_batch.positions, forward_batch
        self.model_runner.attn_backend.init_forward_metadata(forward_batch)
        self.graphs[self.raw_bs].replay()
        return self.output


def load() -> None:
    """SGLang's entry point."""
    if parent_process() is None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    torch.cpu.Event = Event  # type: ignore[attr-defined]
    target = "sglang.srt.model_executor.model_runner.ModelRunner.init_device_graphs"
    HookRegistry.register(target, put_in_place, HookType.AFTER)


def put_in_place(_: Any, model_runner: Any) -> None:
    """After SGLang has found that a CPU has no graphs."""
    model_runner.graph_runner = Runner(model_runner)
