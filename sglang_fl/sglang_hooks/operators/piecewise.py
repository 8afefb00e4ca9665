"""SGLang's piecewise CUDA graphs trace the layers' Python code with Dynamo, which a bridge does not survive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_fl.sglang_hooks.registration import Hook

TARGET = "sglang.srt.server_args.ServerArgs._handle_piecewise_cuda_graph"
OFF = (
    "piecewise CUDA graphs: off for this server: layer 2, the fused operators, is on, and Dynamo cannot trace its "
    "implementations; decode graphs stay on. SGLANG_FL_OOT_ENABLED=0 keeps piecewise graphs and gives up layer 2"
)
ENFORCED = (
    "sglang_fl: --enforce-piecewise-cuda-graph (enforce_piecewise_cuda_graph) cannot be had together with layer 2, the "
    "fused operators: Dynamo would have to trace their implementations. Drop the flag, which turns piecewise graphs "
    "off for this server, or set SGLANG_FL_OOT_ENABLED=0, which keeps SGLang's own operators."
)


def hook(notice: Callable[[str], None], refuse: Callable[[str], BaseException]) -> Hook:
    """Turns piecewise graphs off where SGLang would use them.

    Args:
        notice: told :data:`OFF`, for the report.
        refuse: makes of :data:`ENFORCED` the error that is raised where the user enforces piecewise graphs.
    """

    def handle_piecewise_cuda_graph(original: Callable[[Any], None], self: Any) -> None:
        original(self)
        if self.disable_piecewise_cuda_graph:
            return
        if self.enforce_piecewise_cuda_graph:
            raise refuse(ENFORCED)
        self.disable_piecewise_cuda_graph = True
        notice(OFF)

    return Hook(TARGET, handle_piecewise_cuda_graph)
