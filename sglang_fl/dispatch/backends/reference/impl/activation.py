"""Gated activations in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


def silu_and_mul(obj: Any, x: torch.Tensor) -> torch.Tensor:
    """``silu(x[..., :d]) * x[..., d:]``; both steps round to x's dtype, as in SGLang's SiluAndMul.forward_native.

    Args:
        obj: not used.
        x: [..., 2 d], any floating dtype and strides; unchanged.

    Returns:
        [..., d] in x's dtype, contiguous.
    """
    gate, up = x.chunk(2, -1)
    return functional.silu(gate).mul_(up).contiguous()


def gelu_and_mul(obj: Any, x: torch.Tensor) -> torch.Tensor:
    """``gelu(x[..., :d]) * x[..., d:]``; both steps round to x's dtype, as in SGLang's GeluAndMul.forward_native.

    Args:
        obj: ``obj.approximate`` is "tanh" or "none".
        x: [..., 2 d], any floating dtype and strides; unchanged.

    Returns:
        [..., d] in x's dtype, contiguous.

    Raises:
        RuntimeError: by PyTorch, for another ``obj.approximate``.
    """
    gate, up = x.chunk(2, -1)
    return functional.gelu(gate, approximate=obj.approximate).mul_(up).contiguous()
