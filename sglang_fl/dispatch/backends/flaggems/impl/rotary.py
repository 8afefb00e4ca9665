"""Rotary embedding on FlagGems' kernels, over the whole cache as it is: float32 tables, no gather, no conversion."""

from __future__ import annotations

from typing import Any

import torch

from sglang_fl.dispatch.backends.flaggems.impl.shapes import next_power_of_two
from sglang_fl.dispatch.backends.flaggems.kernels import loaded
from sglang_fl.dispatch.types import NotSupportedError

_LEAST_BLOCK = 16
# The in-place kernel loads a head and its rotated partner, then stores the head, with nothing between that makes the
# warps of a program wait for each other. One warp a program: loads come before stores.
_WARPS_IN_PLACE = 1
_WARPS = 4


def rotary_embedding_flaggems(
    obj: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor,
    rotary_interleaved: bool = False,
    inplace: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate query and key, computed in float32; see the standard signature for shapes.

    Raises:
        NotSupportedError: query or key is not [T, heads, rotary_dim] of one dtype, or the tables are not contiguous
            in their last dimension or too narrow.
    """
    _check(query, key, cos, sin)
    out_query = query if inplace else torch.empty(query.shape, dtype=query.dtype, device=query.device)
    out_key = key if inplace else torch.empty(key.shape, dtype=key.dtype, device=key.device)
    tokens, heads, width = query.shape
    if not tokens:
        return out_query, out_key
    tail = (
        *(position_ids.stride(0), cos.stride(0), sin.stride(0), None, heads, key.shape[1], width),
        *(max(next_power_of_two(width), _LEAST_BLOCK), rotary_interleaved, cos.shape[0]),
    )
    inputs = (query, key, cos, sin, position_ids, *query.stride(), *key.stride())
    if inplace:
        loaded.rotary_in_place[(tokens,)](*inputs, *tail, num_warps=_WARPS_IN_PLACE)
    else:
        outputs = (*out_query.stride(), *out_key.stride())
        loaded.rotary[(tokens,)](out_query, out_key, *inputs, *outputs, *tail, num_warps=_WARPS)
    return out_query, out_key


def _check(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    width = query.shape[-1]
    if query.dim() != 3 or key.dim() != 3 or key.shape[-1] != width or query.dtype != key.dtype:
        raise NotSupportedError(
            f"rotary_embedding: query {tuple(query.shape)} {query.dtype} and key {tuple(key.shape)} {key.dtype}; "
            "FlagGems takes [T, heads, rotary_dim] of one dtype"
        )
    if cos.shape[-1] * 2 != width or cos.stride(-1) != 1 or sin.stride(-1) != 1:
        raise NotSupportedError(
            f"rotary_embedding: tables of shape {tuple(cos.shape)} and strides {cos.stride()}, {sin.stride()} for "
            f"a rotary_dim of {width}; FlagGems takes [positions, rotary_dim / 2], contiguous in the last dimension"
        )
