"""Makes each replay of a graph that SGLang captured one recorded call, watched like any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_fl.comm.replays import GraphReplays
from sglang_fl.sglang_hooks.registration import Hook

# Every graph runner of SGLang's, for decoding, prefill, pieces, breaks and drafts, replays through this class.
GRAPH_CLASS = "torch.cuda.graphs.CUDAGraph"


def hooks(replays: GraphReplays) -> list[Hook]:
    """Hooks around capture and replay; a graph without a group's call costs its replay one look-up."""

    def capture_begin(
        original: Callable[..., None], self: Any, pool: Any = None, capture_error_mode: str = "global"
    ) -> None:
        replays.capture_begin(original, self, pool=pool, capture_error_mode=capture_error_mode)

    def capture_end(original: Callable[..., None], self: Any) -> None:
        replays.capture_end(original, self)

    def replay(original: Callable[..., None], self: Any) -> None:
        replays.replay(original, self)

    return [Hook(f"{GRAPH_CLASS}.{hook.__name__}", hook) for hook in (capture_begin, capture_end, replay)]
