"""The operators and their standard signatures: the contract between bridges above and implementations beneath."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

Normed = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class FLBackendBase(ABC):
    """What a backend may implement. A method that it leaves out is an operator that it does not offer.

    ``obj`` is the framework's layer (SGLang's or vLLM's, which name these attributes alike). ``T`` is the number of
    tokens. Every implementation takes any strides and any number of tokens, zero included, in bfloat16, float16 and
    float32, and gives contiguous results in the dtype of its input unless it says otherwise. What it cannot do it
    refuses with ``NotSupportedError`` before it writes to an input. It enqueues on the current stream, and neither
    synchronises nor reads a tensor's values on the host, so that a graph can capture it.

    Inputs stay unchanged, except those that the contract hands over ("may be reused").
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Name for reports, such as ``ascend``."""

    @abstractmethod
    def is_available(self) -> bool:
        """Whether the backend can be used in this process; cheap, and without a context on a device."""

    @property
    def vendor(self) -> str | None:
        """The vendor's name, for backends of kind VENDOR."""
        return None

    def silu_and_mul(self, obj: Any, x: torch.Tensor) -> torch.Tensor:
        """``silu(x[..., :d]) * x[..., d:]``: x of shape [..., 2 d] gives [..., d]."""
        raise NotImplementedError

    def gelu_and_mul(self, obj: Any, x: torch.Tensor) -> torch.Tensor:
        """``gelu(x[..., :d]) * x[..., d:]``; ``obj.approximate`` is "tanh" or "none"."""
        raise NotImplementedError

    def rms_norm(self, obj: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
        """``x / sqrt(mean(x**2) + obj.variance_epsilon) * obj.weight`` over the last dimension, in float32.

        With ``residual`` (x's shape) the norm is taken of ``x + residual``, and the result is the pair (normed, sum);
        x and residual may then be reused for them. The weight may have another dtype than x.
        """
        raise NotImplementedError

    def gemma_rms_norm(self, obj: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
        """As :meth:`rms_norm` with ``1 + obj.weight`` in the place of the weight."""
        raise NotImplementedError

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
        """Rotate ``query`` and ``key`` by the angles of their positions.

        Args:
            obj: the layer; ``obj.cos_sin_cache`` is the whole cache [max_position, rotary_dim], cos before sin.
            query: [T, heads, rotary_dim], may be a strided view whose last dimension is contiguous.
            key: [T, kv_heads, rotary_dim], likewise.
            cos: [max_position, rotary_dim / 2], a view of the cache, float32 or query's dtype; never written,
                copied or converted as a whole.
            sin: likewise.
            position_ids: [T], int64 or int32.
            rotary_interleaved: pairs are neighbours (2 i, 2 i + 1) in the place of (i, i + rotary_dim / 2).
            inplace: write into query and key and return them; otherwise return new tensors and keep both unchanged.
        """
        raise NotImplementedError

    def mrotary_embedding(
        self, obj: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Multimodal rotary embedding; returns rotated tensors of query's and key's shapes, which may be reused.

        Args:
            obj: gives head_size, rotary_dim, is_neox_style, cos_sin_cache, mrope_section (pairs per axis, or None),
                mrope_interleaved, mrope_interleaved_glm, axis_map.
            positions: [3, T] (time, height, width), or [T].
            query: [T, heads * head_size].
            key: [T, kv_heads * head_size].
        """
        raise NotImplementedError

    def topk(
        self,
        obj: Any,
        router_logits: torch.Tensor,
        top_k: int,
        *,
        renormalize: bool = True,
        scoring_func: str = "softmax",
        correction_bias: torch.Tensor | None = None,
        num_expert_group: int | None = None,
        topk_group: int | None = None,
        routed_scaling_factor: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each token: weights [T, top_k] float32 and ids [T, top_k] int32.

        Args:
            obj: the layer.
            router_logits: [T, experts].
            top_k: experts per token.
            renormalize: weights of a token sum to one.
            scoring_func: "softmax" or "sigmoid", in float32.
            correction_bias: [experts], added to the scores for choosing only; the weights are the scores without it.
            num_expert_group: experts are divided into so many groups, and only the best ``topk_group`` groups are
                chosen from. A group's score is its best expert's, with a bias the sum of its two best.
            topk_group: see num_expert_group.
            routed_scaling_factor: multiplies the weights, after renormalization; None for 1.
        """
        raise NotImplementedError

    def fused_moe(
        self,
        obj: Any,
        hidden_states: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *,
        activation: str = "silu",
        apply_router_weight_on_input: bool = False,
        w13_bias: torch.Tensor | None = None,
        w2_bias: torch.Tensor | None = None,
        routed_scaling_factor: float | None = None,
    ) -> torch.Tensor:
        """The weighted sum of each token's experts: [T, hidden] in hidden_states' dtype, a new tensor.

        Args:
            obj: the layer.
            hidden_states: [T, hidden].
            w13: [experts, 2 * intermediate, hidden], gate before up.
            w2: [experts, hidden, intermediate].
            topk_weights: [T, top_k] float32.
            topk_ids: [T, top_k] int32 or int64; -1 is an expert of another rank and adds nothing.
            activation: "silu" or "gelu" (tanh form), applied to the gate.
            apply_router_weight_on_input: the weight multiplies the token instead of the expert's result; top_k is 1.
            w13_bias: [experts, 2 * intermediate] or None.
            w2_bias: [experts, hidden] or None.
            routed_scaling_factor: multiplies the result; None for 1.
        """
        raise NotImplementedError
