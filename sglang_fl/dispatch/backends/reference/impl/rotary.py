"""Rotary embedding in plain PyTorch: rows of the cache are gathered by position, the cache itself is left alone."""

from __future__ import annotations

from typing import Any

import torch


def full_width(
    cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors for every element of a head: of the element itself, and, with its sign, of its partner.

    Args:
        cos: [T, pairs], of the tokens' angles.
        sin: likewise.
        interleaved: pairs are neighbours.
        dtype: that of the heads; the factors are rounded to it, as SGLang's apply_rotary_emb does.

    Returns:
        Two tensors [T, 1, 2 pairs].
    """
    cos, sin = cos.to(dtype), sin.to(dtype)
    if interleaved:
        own, partner = torch.stack((cos, cos), -1).flatten(-2), torch.stack((-sin, sin), -1).flatten(-2)
    else:
        own, partner = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return own.unsqueeze(1), partner.unsqueeze(1)


def partners(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """A new tensor in which the two elements of every pair of x [..., 2 pairs] have changed places."""
    if interleaved:
        return x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2).flip(-1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat((second, first), -1)


def rotate_in_place(x: torch.Tensor, own: torch.Tensor, partner: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate x [T, heads, 2 pairs] by the factors of :func:`full_width`; each step rounds to x's dtype."""
    crossed = partners(x, interleaved).mul_(partner)
    return x.mul_(own).add_(crossed)


def rotate(x: torch.Tensor, own: torch.Tensor, partner: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """As :func:`rotate_in_place`, into a new contiguous tensor."""
    crossed = partners(x, interleaved).mul_(partner)
    return (x * own).add_(crossed).contiguous()


def rotary_embedding(
    obj: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor,
    rotary_interleaved: bool = False,
    inplace: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate query and key by the angles of their positions, step by step as SGLang's apply_rotary_emb rounds.

    Args:
        obj: not used.
        query: [T, heads, rotary_dim], any floating dtype and strides.
        key: [T, kv_heads, rotary_dim], likewise.
        cos: [max_position, rotary_dim / 2], a view of the cache; only the rows of ``position_ids`` are read.
        sin: likewise.
        position_ids: [T], int64 or int32.
        rotary_interleaved: pairs are neighbours (2 i, 2 i + 1) in the place of (i, i + rotary_dim / 2).
        inplace: write into query and key and return them; otherwise return new tensors and keep both unchanged.

    Returns:
        The rotated query and key.
    """
    cos, sin = cos.index_select(0, position_ids), sin.index_select(0, position_ids)
    turn = rotate_in_place if inplace else rotate
    own, partner = full_width(cos, sin, rotary_interleaved, query.dtype)
    rotated = turn(query, own, partner, rotary_interleaved)
    if key.dtype is not query.dtype:
        own, partner = full_width(cos, sin, rotary_interleaved, key.dtype)
    return rotated, turn(key, own, partner, rotary_interleaved)
