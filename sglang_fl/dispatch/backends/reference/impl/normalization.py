"""Root-mean-square norms in plain PyTorch, in float32 inside."""

from __future__ import annotations

from typing import Any

import torch

from sglang_fl.dispatch.ops import Normed


def _scaled_to_unit_mean_square(x: torch.Tensor, epsilon: float) -> torch.Tensor:
    # A new tensor, so that callers may go on in place.
    return x * x.pow(2).mean(-1, keepdim=True).add_(epsilon).rsqrt_()


def rms_norm(obj: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
    """Norm of x, or of ``x + residual`` with that sum, as in SGLang's RMSNorm.forward_native.

    The sum is taken in float32, and its norm before it is rounded to x's dtype.

    Args:
        obj: ``obj.weight`` [hidden], any floating dtype; ``obj.variance_epsilon``.
        x: [..., hidden], any floating dtype and strides; unchanged.
        residual: like x, or None; unchanged.

    Returns:
        The norm, contiguous in x's dtype; with residual the pair (norm, sum). A float32 sum is a tensor of its own.
    """
    dtype = x.dtype
    x = x.contiguous().float()
    if residual is None:
        return _scaled_to_unit_mean_square(x, obj.variance_epsilon).mul_(obj.weight).to(dtype)
    x = x + residual if dtype is torch.float32 else x.add_(residual)
    return _scaled_to_unit_mean_square(x, obj.variance_epsilon).mul_(obj.weight).to(dtype), x.to(dtype)


def gemma_rms_norm(obj: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
    """As :func:`rms_norm` with ``1 + obj.weight``, as in SGLang's GemmaRMSNorm.forward_native.

    There the sum is rounded to x's dtype before its norm is taken.

    Args:
        obj: ``obj.weight`` [hidden], any floating dtype; ``obj.variance_epsilon``.
        x: [..., hidden], any floating dtype and strides; unchanged.
        residual: like x, or None; unchanged.

    Returns:
        The norm, contiguous in x's dtype; with residual the pair (norm, sum).
    """
    dtype = x.dtype
    total = x.contiguous() if residual is None else x.contiguous() + residual
    weight = obj.weight.float() + 1.0
    normed = _scaled_to_unit_mean_square(total.float(), obj.variance_epsilon).mul_(weight).to(dtype)
    return normed if residual is None else (normed, total)
