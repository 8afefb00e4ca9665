"""SiluAndMul and GeluAndMul on sgl_kernel, which computes in float32 and loads 16 bytes at a time."""

from __future__ import annotations

from typing import Any

import torch

from sglang_fl.dispatch.backends.vendor.cuda.impl.shapes import ALIGNMENT_BYTES, aligned
from sglang_fl.dispatch.backends.vendor.cuda.kernels import kernels
from sglang_fl.dispatch.types import NotSupportedError

# On Hopper sgl_kernel is compiled with fast math: its tanh was 5e-5 off, relative, on an H200.
GELU_DTYPES = (torch.bfloat16, torch.float16)


def silu_and_mul_cuda(obj: Any, x: torch.Tensor) -> torch.Tensor:
    """``silu(x[..., :d]) * x[..., d:]``.

    Raises:
        NotSupportedError: half a row is no multiple of 16 bytes.
    """
    return _gated(kernels.silu_and_mul, x)


def gelu_and_mul_cuda(obj: Any, x: torch.Tensor) -> torch.Tensor:
    """``gelu(x[..., :d]) * x[..., d:]`` in the form that ``obj.approximate`` says.

    Raises:
        NotSupportedError: half a row is no multiple of 16 bytes, another dtype than bfloat16 and float16, or
            approximate is neither tanh nor none.
    """
    approximate = obj.approximate
    if x.dtype not in GELU_DTYPES:
        raise NotSupportedError(f"gelu_and_mul: {x.dtype}; sgl_kernel's tanh is exact to sixteen bits only")
    if approximate == "tanh":
        return _gated(kernels.gelu_tanh_and_mul, x)
    if approximate == "none":
        return _gated(kernels.gelu_and_mul, x)
    raise NotSupportedError(f"gelu_and_mul: approximate is {approximate!r}; sgl_kernel has tanh and none")


def supports_gelu(obj: Any) -> str:
    """Why sgl_kernel is wrong for this layer; "" if it is right."""
    approximate = getattr(obj, "approximate", None)
    return "" if approximate in ("tanh", "none") else f"approximate is {approximate!r}; sgl_kernel has tanh and none"


def _gated(kernel: Any, x: torch.Tensor) -> torch.Tensor:
    columns = x.shape[-1] // 2
    # sgl_kernel's own check looks at the whole row: with an odd number of 16-byte pieces in it, the second half is
    # then read misaligned, which ends the CUDA context.
    if columns * x.element_size() % ALIGNMENT_BYTES:
        raise NotSupportedError(
            f"activation: half a row is {columns} elements of {x.dtype}; sgl_kernel takes multiples of 16 bytes"
        )
    out = torch.empty((*x.shape[:-1], columns), dtype=x.dtype, device=x.device)
    if out.numel():
        kernel(out, aligned(x))
    return out
