"""Where layer 1 is switched on in SGLang: in a process that runs a model, after SGLang has set its device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_fl.aten.layer import Outcome, capturing, has_part_for_graphs, switch_on
from sglang_fl.config import Settings
from sglang_fl.sglang_hooks.registration import Hook, HookKind

# Sets the device first of all, then makes the groups; weights are loaded and graphs captured after it. A second model
# runner in the process, of a draft model for example, calls it again.
AFTER_DEVICE = "sglang.srt.model_executor.model_runner.ModelRunner.init_torch_distributed"

# Captures the graphs of decoding, after calls that warm them up.
CAPTURE = "sglang.srt.model_executor.cuda_graph_runner.CudaGraphRunner.capture"


def hooks(settings: Settings, report: Callable[[Outcome], None]) -> list[Hook]:
    """The hooks that switch the layer on, or on and off around a capture; ``report`` gets the outcome, once.

    In the HTTP server and the detokenizer there is no model runner, so FlagGems is not imported there.
    """
    reported = False

    def switch_on_after_device(result: Any, self: Any) -> None:
        nonlocal reported
        outcome = switch_on(settings)
        if not reported:
            reported = True
            report(outcome)

    found = [Hook(AFTER_DEVICE, switch_on_after_device, HookKind.AFTER)]
    return [*found, Hook(CAPTURE, _capture)] if has_part_for_graphs(settings) else found


def _capture(original: Callable[..., None], self: Any) -> None:
    with capturing():
        original(self)
