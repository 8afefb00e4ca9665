"""Rotary embedding on npu_rotary_mul, multimodal rotary embedding on npu_mrope."""

from __future__ import annotations

from typing import Any

import torch

from sglang_fl.dispatch.backends.vendor.ascend.kernels import functions
from sglang_fl.dispatch.types import NotSupportedError

# npu_rotary_mul's documented limits on heads and head size.
HEADS_BELOW, HEAD_SIZE_BELOW = 1000, 896
_NO_SECTIONS = [0, 0, 0]


def rotary_embedding_ascend(
    obj: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor,
    rotary_interleaved: bool = False,
    inplace: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate query and key; see the standard signature for shapes.

    The rows of this call's positions are taken from the cache and rounded to query's dtype; the cache stays as it is.

    Raises:
        NotSupportedError: not three dimensions, or more heads or larger ones than npu_rotary_mul takes.
    """
    _check(query, key)
    if not query.shape[0]:
        return (query, key) if inplace else (query.clone(), key.clone())
    cosines, sines = (_rows(table, position_ids, query.dtype, rotary_interleaved) for table in (cos, sin))
    mode = "interleave" if rotary_interleaved else "half"
    rotated = [
        functions.npu_rotary_mul(x.contiguous().unsqueeze(0), cosines, sines, rotary_mode=mode).squeeze(0)
        for x in (query, key)
    ]
    if not inplace:
        return rotated[0], rotated[1]
    return query.copy_(rotated[0]), key.copy_(rotated[1])


def mrotary_embedding_ascend(
    obj: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate query and key by sections of their pairs; new tensors.

    Raises:
        NotSupportedError: the cache has another dtype than query and key, which npu_mrope takes alike.
    """
    cache = obj.cos_sin_cache
    if not query.dtype == key.dtype == cache.dtype:
        raise NotSupportedError(
            f"mrotary_embedding: query {query.dtype}, key {key.dtype}, cache {cache.dtype}; npu_mrope takes one dtype"
        )
    if not query.shape[0]:
        return query.clone(), key.clone()
    sections = _NO_SECTIONS if positions.dim() == 1 else list(obj.mrope_section)
    rotated_query, rotated_key = functions.npu_mrope(
        *(positions.contiguous(), query.contiguous(), key.contiguous(), cache, obj.head_size),
        mrope_section=sections,
        rotary_mode="half" if obj.is_neox_style else "interleave",
    )
    return rotated_query, rotated_key


def supports_rotary(obj: Any) -> str:
    """Why npu_rotary_mul is wrong for this layer; "" if it is right: its factors must lie between -1 and 1."""
    scales = {name: value for name, value in vars(obj).items() if "mscale" in name and isinstance(value, int | float)}
    larger = [f"{name} {value}" for name, value in scales.items() if value > 1]
    return f"npu_rotary_mul takes cos and sin from -1 to 1, and the layer has {', '.join(larger)}" if larger else ""


def supports_mrotary(obj: Any) -> str:
    """Why npu_mrope is wrong for this layer; "" if it is right: it takes sections that lie one after the other."""
    if getattr(obj, "mrope_interleaved", False) or getattr(obj, "mrope_interleaved_glm", False):
        return "npu_mrope, as documented since CANN 8.1, has no interleaved sections"
    section = getattr(obj, "mrope_section", None)
    if section is None or len(section) != 3 or sum(section) * 2 != obj.rotary_dim:
        return f"npu_mrope needs three sections that fill rotary_dim {obj.rotary_dim}, not {section}"
    return ""


def _rows(table: torch.Tensor, position_ids: torch.Tensor, dtype: torch.dtype, interleaved: bool) -> torch.Tensor:
    rows = table.index_select(0, position_ids).to(dtype)
    wide = rows.repeat_interleave(2, dim=-1) if interleaved else torch.cat((rows, rows), dim=-1)
    return wide.view(1, wide.shape[0], 1, wide.shape[1])


def _check(query: torch.Tensor, key: torch.Tensor) -> None:
    right = (
        query.dim() == key.dim() == 3
        and query.dtype == key.dtype
        and max(query.shape[1], key.shape[1]) < HEADS_BELOW
        and query.shape[2] < HEAD_SIZE_BELOW
    )
    if not right:
        raise NotSupportedError(
            f"rotary_embedding: query {tuple(query.shape)} {query.dtype}, key {tuple(key.shape)} {key.dtype}; "
            f"npu_rotary_mul takes [T, fewer than {HEADS_BELOW} heads, fewer than {HEAD_SIZE_BELOW}] of one dtype"
        )
