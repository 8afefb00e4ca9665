"""RMSNorm and GemmaRMSNorm on npu_rms_norm, npu_add_rms_norm and npu_gemma_rms_norm."""

from __future__ import annotations

from typing import Any

import torch

from sglang_fl.dispatch.backends.vendor.ascend.kernels import functions
from sglang_fl.dispatch.ops import Normed
from sglang_fl.dispatch.types import NotSupportedError


def rms_norm_ascend(obj: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
    """The norm of x, or with ``residual`` the pair (norm of the sum, sum), both new tensors.

    Raises:
        NotSupportedError: weight, x and residual have different dtypes.
    """
    weight, eps = obj.weight, obj.variance_epsilon
    _check_dtypes(x, residual, weight)
    if not x.numel():
        return _empty(x, residual)
    if residual is None:
        normed: torch.Tensor = functions.npu_rms_norm(x.contiguous(), weight, epsilon=eps)[0]
        return normed
    normed, _, total = functions.npu_add_rms_norm(x.contiguous(), residual.contiguous(), weight, epsilon=eps)
    return normed, total


def gemma_rms_norm_ascend(obj: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
    """As :func:`rms_norm_ascend` with ``1 + weight``; the sum is PyTorch's, rounded before its norm is taken."""
    weight, eps = obj.weight, obj.variance_epsilon
    _check_dtypes(x, residual, weight)
    if not x.numel():
        return _empty(x, residual)
    total = x.contiguous() if residual is None else x + residual
    normed: torch.Tensor = functions.npu_gemma_rms_norm(total.contiguous(), weight, epsilon=eps)[0]
    return normed if residual is None else (normed, total.contiguous())


def supports_norm(obj: Any) -> str:
    """Why torch_npu is wrong for this layer; "" if it is right."""
    weight = getattr(obj, "weight", None)
    return "the layer has no weight, and torch_npu needs one" if weight is None else ""


def _empty(x: torch.Tensor, residual: torch.Tensor | None) -> Normed:
    return x.clone() if residual is None else (x, residual)


def _check_dtypes(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor) -> None:
    if x.dtype != weight.dtype or (residual is not None and residual.dtype != x.dtype):
        raise NotSupportedError(
            f"rms_norm: input {x.dtype}, residual {residual.dtype if residual is not None else None}, weight "
            f"{weight.dtype}; torch_npu takes one dtype for all"
        )
