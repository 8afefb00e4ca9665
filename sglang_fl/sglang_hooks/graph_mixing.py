"""Decides on NCCL's order between graphs and other calls once SGLang's arguments are known, before its first group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_fl.comm.graph_mixing import LIBRARIES, prepare
from sglang_fl.config import Settings
from sglang_fl.sglang_hooks.registration import Hook, HookKind

TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.init_torch_distributed"


@dataclass(frozen=True)
class Option:
    """With it SGLang's streams, or NCCL's kernels, need the order. ``is_met`` takes SGLang's ServerArgs."""

    words: str
    is_met: Callable[[Any], bool]


def _gathers_beside_the_model(arguments: Any) -> bool:
    from sglang.srt.environ import envs

    wanted: bool = envs.SGLANG_NCCL_ALL_GATHER_IN_OVERLAP_SCHEDULER_SYNC_BATCH.get()
    return wanted and not arguments.disable_overlap_schedule


OPTIONS = (
    Option("--pp-size over 1 receives on another stream than the graphs'", lambda arguments: arguments.pp_size > 1),
    Option("--enable-pdmux runs prefill and decode on two streams", lambda arguments: arguments.enable_pdmux),
    Option(
        "SGLANG_NCCL_ALL_GATHER_IN_OVERLAP_SCHEDULER_SYNC_BATCH gathers on another stream than the graphs'",
        _gathers_beside_the_model,
    ),
    Option(
        "--enable-symm-mem brings NCCL's kernels for registered memory, which rely on the order before NCCL 2.30.7",
        lambda arguments: arguments.enable_symm_mem,
    ),
)


def hooks(settings: Settings, device_type: str, tell: Callable[[str], None]) -> list[Hook]:
    """Before SGLang's first group in each process that has any; ``tell`` gets the decision in words, once.

    None where the device's library keeps no such order: to look at the target imports SGLang's model runner.
    """
    if device_type not in LIBRARIES:
        return []
    told: list[str] = []

    def decide_first(self: Any) -> None:
        arguments = self.server_args
        obstacles = [option.words for option in OPTIONS if option.is_met(arguments)]
        decision = prepare(settings, device_type, arguments.nnodes, obstacles)
        if decision is not None and not told:
            told.append(decision.line())
            tell(told[0])

    return [Hook(TARGET, decide_first, HookKind.BEFORE)]
