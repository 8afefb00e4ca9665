"""Bridges of RotaryEmbedding and MRotaryEmbedding: views of the cache, never a copy or another dtype of it."""

from __future__ import annotations

from typing import Any

import torch

from sglang_fl.sglang_hooks.operators.bridge import Bridge, Method, OwnMethodError

_CACHE = "cos_sin_cache"
# SGLang's code for NPUs sets it on the layer: the angles of this batch, already picked by position.
_PICKED = "sin_cos_cache"


class _Rotary(Bridge):
    """Follows the layer's cache, which SGLang replaces: it grows with the context, and changes device and dtype.

    What is derived from it is kept per cache tensor and per dtype of the query. An implementation takes a cache in
    float32 or in the query's dtype, on the query's device; any other is left to SGLang's own method, as is a batch
    whose angles are picked already.
    """

    __slots__ = ("_attributes", "_buffers", "_cache", "_dtype", "_fits")

    def __init__(self, layer: Any, subject: Any, fn: Method, own: Method) -> None:
        super().__init__(layer, subject, fn, own)
        self._attributes = vars(layer)
        # nn.Module's own lookup of a buffer takes longer than all the rest of a bridge.
        self._buffers = layer._buffers
        self._cache: torch.Tensor | None = None
        self._dtype: torch.dtype | None = None
        self._fits = False

    @classmethod
    def obstacle(cls, layer: Any, subject: Any, own: Method) -> str:
        """The cache is a buffer of cos and sin side by side."""
        cache = layer._buffers.get(_CACHE)
        if cache is None:
            return f"{_CACHE} is no buffer"
        if cache.ndim != 2 or cache.shape[1] != layer.rotary_dim:
            return f"{_CACHE} has the shape {list(cache.shape)}, not [positions, rotary_dim = {layer.rotary_dim}]"
        return ""

    def _fits_now(self, query: torch.Tensor) -> bool:
        """Whether the implementation may be called with the layer's present cache and ``query``."""
        if self._buffers[_CACHE] is not self._cache or query.dtype is not self._dtype:
            self._follow(query)
        return self._fits and _PICKED not in self._attributes

    def _follow(self, query: torch.Tensor) -> None:
        cache = self._buffers[_CACHE]
        self._cache, self._dtype = cache, query.dtype
        self._fits = cache.device == query.device and cache.dtype in (torch.float32, query.dtype)


class RotaryEmbeddingBridge(_Rotary):
    """``RotaryEmbedding`` and what only computes its cache in another way.

    query and key are rotated in place and returned, as SGLang's CUDA method does.
    """

    __slots__ = ("_cos", "_head_size", "_interleaved", "_rotary_dim", "_sin")
    op_name = "rotary_embedding"

    def __init__(self, layer: Any, subject: Any, fn: Method, own: Method) -> None:
        super().__init__(layer, subject, fn, own)
        self._head_size: int = layer.head_size
        self._rotary_dim: int = layer.rotary_dim
        self._interleaved: bool = not layer.is_neox_style
        self._cos: torch.Tensor | None = None
        self._sin: torch.Tensor | None = None

    def __call__(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        offsets: torch.Tensor | None = None,
        fused_set_kv_buffer_arg: Any = None,
    ) -> Any:
        """positions: [tokens]; query, key: [tokens, heads * head_size] or [tokens, heads, head_size]."""
        if fused_set_kv_buffer_arg is not None or positions.ndim != 1 or not self._fits_now(query):
            return self.own(positions, query, key, offsets, fused_set_kv_buffer_arg)
        tokens = positions.numel()
        if not tokens:
            return query, key
        try:
            self._rotate(positions if offsets is None else positions + offsets, query, key, tokens)
        except OwnMethodError:
            return self.own(positions, query, key, offsets, fused_set_kv_buffer_arg)
        return query, key

    def _rotate(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, tokens: int) -> None:
        q, k = query.view(tokens, -1, self._head_size), key.view(tokens, -1, self._head_size)
        if self._rotary_dim != self._head_size:
            q, k = q[..., : self._rotary_dim], k[..., : self._rotary_dim]
        rotated = self.fn(self.layer, q, k, self._cos, self._sin, positions, self._interleaved, True)
        # The contract is in place; an implementation that returns other tensors is as right once they are copied.
        for target, result in zip((q, k), rotated, strict=True):
            if result is not target:
                target.copy_(result)

    def _follow(self, query: torch.Tensor) -> None:
        super()._follow(query)
        half = self._rotary_dim // 2
        cache = self._buffers[_CACHE]
        self._cos, self._sin = cache[:, :half], cache[:, half:]


class MRotaryEmbeddingBridge(_Rotary):
    """``MRotaryEmbedding`` and its YaRN form."""

    __slots__ = ("_has_sections",)
    op_name = "mrotary_embedding"

    def __init__(self, layer: Any, subject: Any, fn: Method, own: Method) -> None:
        super().__init__(layer, subject, fn, own)
        self._has_sections = bool(layer.mrope_section)

    def __call__(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        fused_set_kv_buffer_arg: Any = None,
    ) -> Any:
        """positions: [3, tokens] or [tokens]; query, key: [tokens, heads * head_size]."""
        if (
            fused_set_kv_buffer_arg is not None
            or query.ndim != 2
            or not (positions.ndim == 1 or (self._has_sections and positions.ndim == 2))
            or not self._fits_now(query)
        ):
            return self.own(positions, query, key, fused_set_kv_buffer_arg)
        try:
            return self.fn(self.layer, positions, query, key)
        except OwnMethodError:
            return self.own(positions, query, key, fused_set_kv_buffer_arg)
