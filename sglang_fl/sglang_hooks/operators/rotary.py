"""Bridges of RotaryEmbedding and MRotaryEmbedding: views of the cache, never a copy or another dtype of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_fl.sglang_hooks.operators.bridge import OWN, Bridge, Connection, Method, Owner, moved

_CACHE = "cos_sin_cache"
# SGLang's code for NPUs sets it on the layer: the angles of this batch, already picked by position.
_PICKED = "sin_cos_cache"


class Angles:
    """Follows a layer's cache, which SGLang replaces: it grows with the context, and changes device and dtype.

    Views are taken once per cache tensor. An implementation takes a cache in float32 or in the query's dtype, on the
    query's device; any other is left to SGLang's own method, and so is a batch whose angles are picked already.

    Attributes:
        ready: a cache that is right for every query, so that nothing needs asking while the layer has it; or None.
        cos, sin: views of the cache that :meth:`fit` saw last, [positions, rotary_dim / 2] each.
    """

    __slots__ = ("_attributes", "_half", "_may_be_picked", "_seen", "cos", "ready", "sin")

    def __init__(self, layer: Any, own: Method) -> None:
        self._half: int = layer.rotary_dim // 2
        self._attributes = vars(layer)
        # SGLang's method for CUDA devices knows no picked angles.
        self._may_be_picked = getattr(own, "__name__", "") != "forward_cuda"
        self._seen: torch.Tensor | None = None
        self.ready: torch.Tensor | None = None
        self.cos: torch.Tensor | None = None
        self.sin: torch.Tensor | None = None

    def fit(self, cache: torch.Tensor, query: torch.Tensor) -> bool:
        """Whether the implementation may be called with ``cache``, the layer's present one, for this query."""
        if cache is not self._seen:
            self._seen = cache
            self.cos, self.sin = cache[:, : self._half], cache[:, self._half :]
        if cache.device != query.device or cache.dtype not in (torch.float32, query.dtype):
            return False
        if self._may_be_picked:
            return _PICKED not in self._attributes
        self.ready = cache if cache.dtype == torch.float32 else None
        return True


def _obstacle(layer: Any, subject: Any, own: Method) -> str:
    cache = layer._buffers.get(_CACHE)
    if cache is None:
        return f"{_CACHE} is no buffer"
    if cache.ndim != 2 or cache.shape[1] != layer.rotary_dim:
        return f"{_CACHE} has the shape {list(cache.shape)}, not [positions, rotary_dim = {layer.rotary_dim}]"
    return ""


def _require_shapes(layer: Any, expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> None:
    # copy_ would spread a smaller result over all tokens or heads.
    for name, right, given in zip(("query", "key"), expected, found, strict=True):
        if right.shape != given.shape:
            raise RuntimeError(
                f"rotary_embedding for {type(layer).__name__}: the implementation returned a {name} of the shape "
                f"{list(given.shape)}, right is {list(right.shape)}. The log names it where the class was bound."
            )


def _make_rotary(connection: Connection) -> Method:
    """Rotates query and key in place and returns them, as SGLang's method on CUDA devices does."""
    mine, layer, first = connection.owner, connection.layer, connection.first
    own, recover = connection.own, connection.recover
    angles = Angles(layer, own)
    # nn.Module's own lookup of a buffer takes longer than all the rest of a bridge.
    buffers = layer._buffers
    head_size, rotary_dim, is_interleaved = layer.head_size, layer.rotary_dim, not layer.is_neox_style
    is_partial = rotary_dim != head_size

    def forward(
        owner: Owner,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        offsets: torch.Tensor | None = None,
        fused_set_kv_buffer_arg: Any = None,
    ) -> Any:
        if owner is not mine:
            return moved(owner, positions, query, key, offsets, fused_set_kv_buffer_arg)
        cache, shape = buffers[_CACHE], positions.shape
        if (
            fused_set_kv_buffer_arg is not None
            or len(shape) != 1
            or (cache is not angles.ready and not angles.fit(cache, query))
        ):
            return own(positions, query, key, offsets, fused_set_kv_buffer_arg)
        tokens = shape[0]
        try:
            q, k = query.view(tokens, -1, head_size), key.view(tokens, -1, head_size)
        except RuntimeError:
            if tokens:
                raise
            return query, key  # no heads can be told apart in a tensor of no token
        if is_partial:
            q, k = q[..., :rotary_dim], k[..., :rotary_dim]
        places = positions if offsets is None else positions + offsets
        try:
            rotated = first(layer, q, k, angles.cos, angles.sin, places, is_interleaved, True)
        except Exception as error:  # noqa: BLE001 - recover raises it again unless another may follow
            rotated = recover(error, (layer, q, k, angles.cos, angles.sin, places, is_interleaved, True), None)
            if rotated is OWN:
                return own(positions, query, key, offsets, fused_set_kv_buffer_arg)
        # The contract is in place; an implementation that returns other tensors is as right once they are copied.
        q_out, k_out = rotated
        if q_out is not q or k_out is not k:
            _require_shapes(layer, (q, k), (q_out, k_out))
            q.copy_(q_out)
            k.copy_(k_out)
        return query, key

    return forward


def _make_mrotary(connection: Connection) -> Method:
    """One section of pairs per axis, or plain positions; query and key of two dimensions."""
    mine, layer, first = connection.owner, connection.layer, connection.first
    own, recover = connection.own, connection.recover
    angles = Angles(layer, own)
    buffers = layer._buffers
    dimensions = (1, 2) if layer.mrope_section else (1,)

    def forward(
        owner: Owner,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        fused_set_kv_buffer_arg: Any = None,
    ) -> Any:
        if owner is not mine:
            return moved(owner, positions, query, key, fused_set_kv_buffer_arg)
        cache = buffers[_CACHE]
        if (
            fused_set_kv_buffer_arg is not None
            or query.ndim != 2
            or positions.ndim not in dimensions
            or (cache is not angles.ready and not angles.fit(cache, query))
        ):
            return own(positions, query, key, fused_set_kv_buffer_arg)
        try:
            return first(layer, positions, query, key)
        except Exception as error:  # noqa: BLE001 - recover raises it again unless another may follow
            result = recover(error, (layer, positions, query, key), None)
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
