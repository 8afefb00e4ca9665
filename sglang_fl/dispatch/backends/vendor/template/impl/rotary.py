"""Rotary embedding on the chip."""

from __future__ import annotations

from typing import Any

import torch

from . import sdk


def rotary_embedding_my_chip(
    obj: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor,
    rotary_interleaved: bool = False,
    inplace: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate query and key, [T, heads, rotary_dim], by their positions' rows of cos and sin, float32.

    The library works in place and takes strides, but wants the angles in float32. Only the rows that are needed are
    converted: the cache belongs to all layers, and it is long.
    """
    if not inplace:
        query, key = query.clone(), key.clone()
    if position_ids.numel():
        rows_cos, rows_sin = cos[position_ids].float(), sin[position_ids].float()
        sdk().rotate(query, rows_cos, rows_sin, rotary_interleaved)
        sdk().rotate(key, rows_cos, rows_sin, rotary_interleaved)
    return query, key
