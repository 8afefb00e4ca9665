"""The reference backend's class: all operators, in plain PyTorch, always available."""

from __future__ import annotations

from typing import Any

import torch

from sglang_fl.dispatch.backends import Backend
from sglang_fl.dispatch.backends.reference.impl import activation, fused_moe, mrotary, normalization, rotary, topk
from sglang_fl.dispatch.ops import Normed


class ReferenceBackend(Backend):
    """PyTorch's own operators, on any device; each method's contract is that of the base class."""

    @property
    def name(self) -> str:
        """Name for reports."""
        return "reference"

    def is_available(self) -> bool:
        """Always: it needs PyTorch alone."""
        return True

    def silu_and_mul(self, obj: Any, x: torch.Tensor) -> torch.Tensor:
        """See :func:`.impl.activation.silu_and_mul`."""
        return activation.silu_and_mul(obj, x)

    def gelu_and_mul(self, obj: Any, x: torch.Tensor) -> torch.Tensor:
        """See :func:`.impl.activation.gelu_and_mul`."""
        return activation.gelu_and_mul(obj, x)

    def rms_norm(self, obj: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
        """See :func:`.impl.normalization.rms_norm`."""
        return normalization.rms_norm(obj, x, residual)

    def gemma_rms_norm(self, obj: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
        """See :func:`.impl.normalization.gemma_rms_norm`."""
        return normalization.gemma_rms_norm(obj, x, residual)

    def rotary_embedding(
        self,
        obj: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        position_ids: torch.Tensor,
        rotary_interleaved: bool = False,
        inplace: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :func:`.impl.rotary.rotary_embedding`."""
        return rotary.rotary_embedding(obj, query, key, cos, sin, position_ids, rotary_interleaved, inplace)

    def mrotary_embedding(
        self, obj: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :func:`.impl.mrotary.mrotary_embedding`."""
        return mrotary.mrotary_embedding(obj, positions, query, key)

    def topk(
        self, obj: Any, router_logits: torch.Tensor, top_k: int, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :func:`.impl.topk.topk`."""
        return topk.topk(obj, router_logits, top_k, **options)

    def fused_moe(
        self,
        obj: Any,
        hidden_states: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        """See :func:`.impl.fused_moe.fused_moe`."""
        return fused_moe.fused_moe(obj, hidden_states, w13, w2, topk_weights, topk_ids, **options)
