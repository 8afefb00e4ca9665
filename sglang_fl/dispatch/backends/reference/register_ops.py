"""Register the reference implementations. The functions themselves are registered: they are available everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_fl.dispatch.backends.reference.impl import activation, fused_moe, mrotary, normalization, rotary, topk
from sglang_fl.dispatch.types import BackendImplKind, BackendPriority, OpImpl

_OPERATORS: dict[str, Callable[..., Any]] = {
    "silu_and_mul": activation.silu_and_mul,
    "gelu_and_mul": activation.gelu_and_mul,
    "rms_norm": normalization.rms_norm,
    "gemma_rms_norm": normalization.gemma_rms_norm,
    "rotary_embedding": rotary.rotary_embedding,
    "mrotary_embedding": mrotary.mrotary_embedding,
    "topk": topk.topk,
    "fused_moe": fused_moe.fused_moe,
}


def register_builtins(registry: Any) -> None:
    """Register every operator of :class:`sglang_fl.dispatch.ops.FLBackendBase`."""
    registry.register_many(
        [
            OpImpl(
                op_name=op_name,
                impl_id="reference",
                kind=BackendImplKind.REFERENCE,
                fn=function,
                priority=BackendPriority.REFERENCE,
            )
            for op_name, function in _OPERATORS.items()
        ]
    )
