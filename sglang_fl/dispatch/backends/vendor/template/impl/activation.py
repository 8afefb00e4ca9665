"""Activations on the chip."""

from __future__ import annotations

from typing import Any

import torch

from . import sdk


def silu_and_mul_my_chip(obj: Any, x: torch.Tensor) -> torch.Tensor:
    """``silu(x[..., :d]) * x[..., d:]``: x of shape [..., 2 d] gives [..., d]. The library wants contiguous tensors."""
    output = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
    if output.numel():
        sdk().silu_and_mul(output, x.contiguous())
    return output
