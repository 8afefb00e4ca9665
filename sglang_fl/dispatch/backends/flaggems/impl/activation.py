"""SiluAndMul and GeluAndMul on FlagGems' gated kernels, which read both halves of a row in place."""

from __future__ import annotations

from typing import Any

import torch

from sglang_fl.dispatch.backends.flaggems.impl.shapes import check_offsets, rows_of
from sglang_fl.dispatch.backends.flaggems.kernels import loaded
from sglang_fl.dispatch.types import NotSupportedError

_COLUMNS_PER_PROGRAM = 1024
_WARPS = 4


def silu_and_mul_flaggems(obj: Any, x: torch.Tensor) -> torch.Tensor:
    """``silu(x[..., :d]) * x[..., d:]`` in float32; one launch, no view of a half, no copy of strided rows.

    Raises:
        NotSupportedError: x spans 2**31 elements or more.
    """
    return _gated(loaded.silu_and_mul, x)


def gelu_and_mul_flaggems(obj: Any, x: torch.Tensor) -> torch.Tensor:
    """``gelu(x[..., :d]) * x[..., d:]`` in float32, in the form that ``obj.approximate`` says.

    Raises:
        NotSupportedError: x spans 2**31 elements or more, or approximate is neither tanh nor none.
    """
    approximate = obj.approximate
    if approximate == "tanh":
        return _gated(loaded.gelu_tanh_and_mul, x)
    if approximate == "none":
        return _gelu_none(x)
    raise NotSupportedError(f"gelu_and_mul: approximate is {approximate!r}; FlagGems has tanh and none")


def supports_gelu(obj: Any) -> str:
    """Why FlagGems is wrong for this layer; "" if it is right."""
    approximate = getattr(obj, "approximate", None)
    return "" if approximate in ("tanh", "none") else f"approximate is {approximate!r}; FlagGems has tanh and none"


def _gated(kernel: Any, x: torch.Tensor) -> torch.Tensor:
    columns = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], columns), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    rows = rows_of(x)
    check_offsets("activation", rows)
    count, (row_stride, column_stride) = rows.shape[0], rows.stride()
    grid = (count, -(-columns // _COLUMNS_PER_PROGRAM))
    kernel[grid](
        *(rows, out, count, columns, row_stride, column_stride, columns, 1, 1, _COLUMNS_PER_PROGRAM),
        num_warps=_WARPS,
    )
    return out


def _gelu_none(x: torch.Tensor) -> torch.Tensor:
    columns = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], columns), dtype=x.dtype, device=x.device)
    if out.numel():
        # FlagGems has the erf form only as a pointwise function of two tensors; it takes their strides.
        loaded.gelu_none_and_mul(x[..., :columns], x[..., columns:], out0=out)
    return out
