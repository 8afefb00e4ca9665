"""RMSNorm and GemmaRMSNorm on FlagGems' kernels that keep a row in registers and compute in float32."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from sglang_fl.dispatch.backends.flaggems.impl.shapes import check_offsets, next_power_of_two, rows_of
from sglang_fl.dispatch.backends.flaggems.kernels import loaded
from sglang_fl.dispatch.ops import Normed

# A row is held by one program: above this a thread of 16 warps would hold more than 128 values.
LARGEST_ROW = 65536
_VALUES_PER_WARP = 512
_MOST_WARPS = 16


def rms_norm_flaggems(obj: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
    """The norm of x, or with ``residual`` the pair (norm of the sum, sum), written into contiguous x and residual.

    The sum is kept in float32 for the norm and rounded once, as in SGLang's native method.

    Raises:
        NotSupportedError: x spans 2**31 elements or more.
    """
    return _norm(x, residual, obj.weight, obj.variance_epsilon)


def gemma_rms_norm_flaggems(obj: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
    """As :func:`rms_norm_flaggems` with ``1 + weight`` in float32, which costs one more small launch.

    The sum is not kept from call to call: a weight may be loaded anew in place.
    """
    return _norm(x, residual, torch.add(_one(x.device), obj.weight), obj.variance_epsilon)


def supports_norm(obj: Any) -> str:
    """Why FlagGems is wrong for this layer; "" if it is right."""
    weight = getattr(obj, "weight", None)
    if weight is None:
        return "the layer has no weight, and FlagGems' kernels need one"
    if weight.dim() != 1 or not weight.is_contiguous():
        return f"FlagGems' kernels need a contiguous weight of one dimension, not shape {tuple(weight.shape)}"
    if weight.shape[0] > LARGEST_ROW:
        return f"rows of {weight.shape[0]} are beyond {LARGEST_ROW}, the largest that the kernel holds in registers"
    return ""


@cache
def _one(device: torch.device) -> torch.Tensor:
    # One dimension, so that the sum with a bfloat16 weight is float32.
    return torch.ones(1, dtype=torch.float32, device=device)


def _norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> Normed:
    if residual is not None:
        return _add_norm(x, residual, weight, eps)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    rows = rows_of(x)
    check_offsets("rms_norm", rows)
    count, width = rows.shape
    inverse_rms = torch.empty(count, dtype=torch.float32, device=x.device)
    block = next_power_of_two(width)
    row_stride, column_stride = rows.stride()
    loaded.rms_norm[(count,)](
        *(out, inverse_rms, rows, weight, width, 1, row_stride, column_stride, width, eps, block),
        num_warps=_warps(block),
    )
    return out


def _add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Normed:
    x, residual = x.contiguous(), residual.contiguous()
    if not x.numel():
        return x, residual
    width = x.shape[-1]
    check_offsets("rms_norm", rows_of(x))
    block = next_power_of_two(width)
    loaded.fused_add_rms_norm[(x.numel() // width,)](
        *(x, residual, weight, width, 1, width, 1, width, eps, block),
        num_warps=_warps(block),
    )
    return x, residual


def _warps(block: int) -> int:
    return min(max(block // _VALUES_PER_WARP, 1), _MOST_WARPS)
