"""SiluAndMul and GeluAndMul on npu_swiglu and npu_geglu, which take neither strided nor empty tensors."""

from __future__ import annotations

from typing import Any

import torch

from sglang_fl.dispatch.backends.vendor.ascend.kernels import functions
from sglang_fl.dispatch.types import NotSupportedError

# npu_geglu's numbers for the form of gelu.
_APPROXIMATE = {"none": 0, "tanh": 1}


def silu_and_mul_ascend(obj: Any, x: torch.Tensor) -> torch.Tensor:
    """``silu(x[..., :d]) * x[..., d:]``."""
    if not x.numel():
        return _empty_half(x)
    result: torch.Tensor = functions.npu_swiglu(x.contiguous(), dim=-1)
    return result


def gelu_and_mul_ascend(obj: Any, x: torch.Tensor) -> torch.Tensor:
    """``gelu(x[..., :d]) * x[..., d:]`` in the form that ``obj.approximate`` says.

    Raises:
        NotSupportedError: approximate is neither tanh nor none.
    """
    approximate = _APPROXIMATE.get(obj.approximate)
    if approximate is None:
        raise NotSupportedError(f"gelu_and_mul: approximate is {obj.approximate!r}; npu_geglu has tanh and none")
    if not x.numel():
        return _empty_half(x)
    # Without activate_left it is the right half that goes through gelu.
    result: torch.Tensor = functions.npu_geglu(x.contiguous(), dim=-1, approximate=approximate, activate_left=True)[0]
    return result


def supports_gelu(obj: Any) -> str:
    """Why npu_geglu is wrong for this layer; "" if it is right."""
    approximate = getattr(obj, "approximate", None)
    return "" if approximate in _APPROXIMATE else f"approximate is {approximate!r}; npu_geglu has tanh and none"


def _empty_half(x: torch.Tensor) -> torch.Tensor:
    return torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
