"""RMSNorm and GemmaRMSNorm on sgl_kernel, which reads the weight as if it had the input's dtype."""

from __future__ import annotations

from typing import Any

import torch

from sglang_fl.dispatch.backends.vendor.cuda.impl.shapes import ALIGNMENT_BYTES, aligned, aligned_rows
from sglang_fl.dispatch.backends.vendor.cuda.kernels import kernels
from sglang_fl.dispatch.ops import Normed
from sglang_fl.dispatch.types import NotSupportedError

# What sgl_kernel's norms are compiled for.
DTYPES = (torch.bfloat16, torch.float16)


def rms_norm_cuda(obj: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
    """The norm of x, or with ``residual`` the pair (norm of the sum, sum), written into contiguous x and residual.

    Raises:
        NotSupportedError: weight, x and residual have different dtypes, or another than bfloat16 and float16.
    """
    if residual is None:
        return _norm(kernels.rmsnorm, x, obj.weight, obj.variance_epsilon)
    return _add_norm(kernels.fused_add_rmsnorm, x, residual, obj.weight, obj.variance_epsilon)


def gemma_rms_norm_cuda(obj: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
    """As :func:`rms_norm_cuda` with ``1 + weight``, added in float32 by the kernel."""
    if residual is None:
        return _norm(kernels.gemma_rmsnorm, x, obj.weight, obj.variance_epsilon)
    return _add_norm(kernels.gemma_fused_add_rmsnorm, x, residual, obj.weight, obj.variance_epsilon)


def supports_norm(obj: Any) -> str:
    """Why sgl_kernel is wrong for this layer; "" if it is right."""
    weight = getattr(obj, "weight", None)
    if weight is None:
        return "the layer has no weight, and sgl_kernel needs one"
    if weight.dim() != 1 or not weight.is_contiguous():
        return f"sgl_kernel needs a contiguous weight of one dimension, not shape {tuple(weight.shape)}"
    if weight.data_ptr() % ALIGNMENT_BYTES:
        return "the weight does not begin at a multiple of 16 bytes, which sgl_kernel needs"
    return ""


def _norm(kernel: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    _check_dtypes(x, weight)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        kernel(out.view(-1, out.shape[-1]), aligned_rows(x), weight, eps, kernels.launch_pdl)
    return out


def _add_norm(
    kernel: Any, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_dtypes(x, weight)
    _check_dtypes(residual, weight)
    x, residual = aligned(x), aligned(residual)
    if x.numel():
        width = x.shape[-1]
        kernel(x.view(-1, width), residual.view(-1, width), weight, eps, kernels.launch_pdl)
    return x, residual


def _check_dtypes(x: torch.Tensor, weight: torch.Tensor) -> None:
    if x.dtype != weight.dtype or x.dtype not in DTYPES:
        raise NotSupportedError(
            f"rms_norm: input {x.dtype}, weight {weight.dtype}; sgl_kernel takes bfloat16 or float16, one for both"
        )
