"""Bridges of RotaryEmbedding and MRotaryEmbedding: views of the cache, never a copy or another dtype of it."""

from __future__ import annotations

from typing import Any

import torch

from sglang_fl.sglang_hooks.operators.bridge import OWN, Bridge, Connection, Method

_CACHE = "cos_sin_cache"
# SGLang's code for NPUs sets it on the layer: the angles of this batch, already picked by position.
_PICKED = "sin_cos_cache"


class Angles:
    """Follows a layer's cache, which SGLang replaces: it grows with the context, and changes device and dtype.

    What is derived from it is kept per cache tensor and per dtype of the query. An implementation takes a cache in
    float32 or in the query's dtype, on the query's device; any other is left to SGLang's own method, as is a batch
    whose angles are picked already.

    Attributes:
        cos, sin: views of the cache, [positions, rotary_dim / 2] each; valid where :meth:`fit` says so.
    """

    __slots__ = ("_attributes", "_buffers", "_cache", "_dtype", "_fits", "_half", "cos", "sin")

    def __init__(self, layer: Any) -> None:
        self._attributes = vars(layer)
        # nn.Module's own lookup of a buffer takes longer than all the rest of a bridge.
        self._buffers = layer._buffers
        self._half: int = layer.rotary_dim // 2
        self._cache: torch.Tensor | None = None
        self._dtype: torch.dtype | None = None
        self._fits = False
        self.cos: torch.Tensor | None = None
        self.sin: torch.Tensor | None = None

    def fit(self, query: torch.Tensor) -> bool:
        """Whether the implementation may be called with the layer's present cache and ``query``."""
        if self._buffers[_CACHE] is not self._cache or query.dtype is not self._dtype:
            self._follow(query)
        return self._fits and _PICKED not in self._attributes

    def _follow(self, query: torch.Tensor) -> None:
        cache = self._buffers[_CACHE]
        self._cache, self._dtype = cache, query.dtype
        self._fits = cache.device == query.device and cache.dtype in (torch.float32, query.dtype)
        self.cos, self.sin = cache[:, : self._half], cache[:, self._half :]


def _obstacle(layer: Any, subject: Any, own: Method) -> str:
    cache = layer._buffers.get(_CACHE)
    if cache is None:
        return f"{_CACHE} is no buffer"
    if cache.ndim != 2 or cache.shape[1] != layer.rotary_dim:
        return f"{_CACHE} has the shape {list(cache.shape)}, not [positions, rotary_dim = {layer.rotary_dim}]"
    return ""


def _make_rotary(connection: Connection) -> Method:
    """Rotates query and key in place and returns them, as SGLang's method on CUDA devices does."""
    layer, first, own, recover = connection.layer, connection.first, connection.own, connection.recover
    angles = Angles(layer)
    head_size, rotary_dim, is_interleaved = layer.head_size, layer.rotary_dim, not layer.is_neox_style
    is_partial = rotary_dim != head_size

    def forward(
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        offsets: torch.Tensor | None = None,
        fused_set_kv_buffer_arg: Any = None,
    ) -> Any:
        if fused_set_kv_buffer_arg is not None or positions.ndim != 1 or not angles.fit(query):
            return own(positions, query, key, offsets, fused_set_kv_buffer_arg)
        tokens = positions.numel()
        if not tokens:
            return query, key
        q, k = query.view(tokens, -1, head_size), key.view(tokens, -1, head_size)
        if is_partial:
            q, k = q[..., :rotary_dim], k[..., :rotary_dim]
        places = positions if offsets is None else positions + offsets
        arguments = (layer, q, k, angles.cos, angles.sin, places, is_interleaved, True)
        try:
            rotated = first(*arguments)
        except Exception as error:  # noqa: BLE001 - recover raises it again unless another may follow
            rotated = recover(error, arguments)
            if rotated is OWN:
                return own(positions, query, key, offsets, fused_set_kv_buffer_arg)
        # The contract is in place; an implementation that returns other tensors is as right once they are copied.
        q_out, k_out = rotated
        if q_out is not q:
            q.copy_(q_out)
        if k_out is not k:
            k.copy_(k_out)
        return query, key

    return forward


def _make_mrotary(connection: Connection) -> Method:
    """One section of pairs per axis, or plain positions; query and key of two dimensions."""
    layer, first, own, recover = connection.layer, connection.first, connection.own, connection.recover
    angles = Angles(layer)
    dimensions = (1, 2) if layer.mrope_section else (1,)

    def forward(
        positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, fused_set_kv_buffer_arg: Any = None
    ) -> Any:
        if (
            fused_set_kv_buffer_arg is not None
            or query.ndim != 2
            or positions.ndim not in dimensions
            or not angles.fit(query)
        ):
            return own(positions, query, key, fused_set_kv_buffer_arg)
        try:
            return first(layer, positions, query, key)
        except Exception as error:  # noqa: BLE001 - recover raises it again unless another may follow
            result = recover(error, (layer, positions, query, key))
            return own(positions, query, key, fused_set_kv_buffer_arg) if result is OWN else result

    return forward


ROTARY_EMBEDDING = Bridge(
    "rotary_embedding",
    ("positions", "query", "key", "offsets=None", "fused_set_kv_buffer_arg=None"),
    _make_rotary,
    _obstacle,
)
MROTARY_EMBEDDING = Bridge(
    "mrotary_embedding", ("positions", "query", "key", "fused_set_kv_buffer_arg=None"), _make_mrotary, _obstacle
)
