"""Activation."""

import torch


def silu_and_mul_my_chip(obj, x):
    """On whatever torch has."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
