"""Multimodal rotary embedding in plain PyTorch: each pair of a head takes its angle from one of three axes."""

from __future__ import annotations

from typing import Any

import torch

from sglang_fl.dispatch.backends.reference.impl.rotary import full_width, rotate_in_place
from sglang_fl.dispatch.types import NotSupportedError


def _of_axes(obj: Any, rows: torch.Tensor) -> torch.Tensor:
    # rows [3, T, 2, pairs]: cos and sin of each axis; the result [T, 2, pairs] has each pair's own axis.
    if not obj.mrope_interleaved:
        sections = torch.split(rows, obj.mrope_section, -1)
        return torch.cat([section[axis] for axis, section in enumerate(sections)], -1)
    if obj.mrope_interleaved_glm:
        return rows.gather(0, obj.axis_map.expand(1, *rows.shape[1:])).squeeze(0)
    chosen = rows[0]
    for axis in (1, 2):
        pairs = slice(axis, 3 * obj.mrope_section[axis], 3)
        chosen[..., pairs] = rows[axis, ..., pairs]
    return chosen


def _rotate_heads(
    x: torch.Tensor, head_size: int, rotary_dim: int, own: torch.Tensor, partner: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    heads = x.reshape(x.shape[0], x.shape[1:].numel() // head_size, head_size)
    rotate_in_place(heads[..., :rotary_dim], own, partner, interleaved)
    return heads.reshape(x.shape)


def mrotary_embedding(
    obj: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate query and key by the angles of their three positions; written over query and key where strides allow.

    Rounds step by step as SGLang's MRotaryEmbedding.forward_native. With ``mrope_interleaved_glm`` the axes are those
    of ``obj.axis_map``, as in SGLang's triton_mrope_fused; forward_native of SGLang 0.5.11 leaves that map out.

    Args:
        obj: head_size, rotary_dim, is_neox_style, cos_sin_cache [max_position, rotary_dim], mrope_section (pairs of
            time, height and width), mrope_interleaved, mrope_interleaved_glm, axis_map [rotary_dim / 2] int64.
        positions: [3, T] or [T], int64 or int32.
        query: [T, heads * head_size], any floating dtype and strides.
        key: [T, kv_heads * head_size], likewise.

    Returns:
        The rotated query and key, in their shapes.

    Raises:
        NotSupportedError: positions of three axes for a layer without mrope_section.
    """
    if positions.ndim == 2 and not obj.mrope_section:
        raise NotSupportedError(
            f"mrotary_embedding: positions {tuple(positions.shape)} have an axis for each section, but the layer has "
            "no mrope_section; pass positions of shape [T]"
        )
    rows = obj.cos_sin_cache[positions].view(*positions.shape, 2, obj.rotary_dim // 2)
    cos, sin = (rows if positions.ndim == 1 else _of_axes(obj, rows)).unbind(-2)
    interleaved = not obj.is_neox_style
    own, partner = full_width(cos, sin, interleaved, query.dtype)
    rotated = _rotate_heads(query, obj.head_size, obj.rotary_dim, own, partner, interleaved)
    if key.dtype is not query.dtype:
        own, partner = full_width(cos, sin, interleaved, key.dtype)
    return rotated, _rotate_heads(key, obj.head_size, obj.rotary_dim, own, partner, interleaved)
