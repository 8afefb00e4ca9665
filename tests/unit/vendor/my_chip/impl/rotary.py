"""Rotary embedding."""

import torch


def rotary_embedding_my_chip(obj, query, key, cos, sin, position_ids, rotary_interleaved=False, inplace=True):
    """NeoX only, out of place only: enough for a backend of a test."""
    assert not rotary_interleaved
    assert not inplace
    cos, sin = cos[position_ids][:, None], sin[position_ids][:, None]

    def rotate(x):
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    return rotate(query), rotate(key)
