"""An SGLang plugin of the benchmark's own, loaded by every server that it starts, those without sglang_fl too.

Where SGLang fills a model without a checkpoint with numbers too small to matter, it gives weights that do;
top log probabilities are the logits themselves; on request it replays the graph of a decode step for its GPU time;
and, where asked for, faults can be switched on while it serves.
It stands alone: the servers find it as a distribution that :mod:`benchmarks.e2e.servers` writes.
"""

from __future__ import annotations

import json
import os
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

NAME = "sglang_e2e_benchmark"
REPORT_VARIABLE = "SGLANG_E2E_BENCHMARK_REPORT"
SWITCH_VARIABLE = "SGLANG_E2E_BENCHMARK_SWITCH"
# SGLang alone has no DP attention on a CPU: sglang_fl's hooks for a CPU make it run, without any layer of the plugin.
CPU_HOOKS_VARIABLE = "SGLANG_E2E_BENCHMARK_CPU_HOOKS"
SEED = 1


def load() -> None:
    """SGLang's entry point, called in each of its processes; only those that run a model need anything."""
    if parent_process() is None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from .weights import remember_kernels

    remember_kernels()
    target = "sglang.srt.model_loader.weight_utils.initialize_dummy_weights"
    HookRegistry.register(target, initialize_weights, HookType.REPLACE)
    target = "sglang.srt.layers.sampler.Sampler._attach_logprobs_to_output"
    HookRegistry.register(target, give_logits, HookType.BEFORE)
    from .graphs import take_order

    target = "sglang.srt.managers.scheduler.Scheduler.set_internal_state"
    HookRegistry.register(target, take_order, HookType.AROUND)
    if CPU_HOOKS_VARIABLE in os.environ:
        from sglang_fl.sglang_hooks import cpu, registration

        registration.register(cpu.hooks())
    if SWITCH_VARIABLE in os.environ:
        from .controls import follow_switch

        target = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
        HookRegistry.register(target, follow_switch, HookType.BEFORE)


def initialize_weights(model: Any, *_: Any, **__: Any) -> None:
    """In the place of SGLang's function; writes what was done to the file that REPORT_VARIABLE names, ``.rankN``."""
    import torch

    from .weights import fill

    report: dict[str, Any] = {"weights": fill(model, SEED), "controls": {}}
    if SWITCH_VARIABLE in os.environ:
        from .controls import install

        report["controls"] = install(model, Path(os.environ[SWITCH_VARIABLE]))
    path = Path(f"{os.environ[REPORT_VARIABLE]}.rank{torch.distributed.get_rank()}")
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(report))
    partial.rename(path)


def give_logits(
    sampler: Any, logits_output: Any, logprobs: Any, top_logprobs_nums: Any, token_ids: Any, info: Any, *more: Any
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Greedy requests that ask for log probabilities get logits; reached by no other request."""
    if not info.is_all_greedy:
        return None
    logits = logits_output.next_token_logits.float().clone()
    return (sampler, logits_output, logits, top_logprobs_nums, token_ids, info, *more), {}
