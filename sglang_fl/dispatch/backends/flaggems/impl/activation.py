"""SiluAndMul and GeluAndMul on a Triton kernel that reads both halves of a row in place."""

from __future__ import annotations

from typing import Any

import torch

from sglang_fl.dispatch.backends.flaggems.choices import GATED, Gated, by_bits
from sglang_fl.dispatch.backends.flaggems.impl.shapes import compile_options, launches_dependently, rows_of
from sglang_fl.dispatch.types import NotSupportedError
from sglang_fl.triton_launch import UNUSUAL, Launch, bind, specialisation, takes_addresses

# Of a key: by the length in bits of the number of tokens, how to launch, whether by addresses, and the blocks of a row.
_Launches = tuple[tuple[Launch, bool, int], ...]
_launches: dict[Any, _Launches] = {}
# obj.approximate to the kernel's constant.
_GELU_FORMS = {"tanh": "GELU_TANH", "none": "GELU_NONE"}


def silu_and_mul_flaggems(obj: Any, x: torch.Tensor) -> torch.Tensor:
    """``silu(x[..., :d]) * x[..., d:]`` in float32; one launch, no view of a half, no copy of strided rows."""
    return _gated("SILU", x)


def gelu_and_mul_flaggems(obj: Any, x: torch.Tensor) -> torch.Tensor:
    """``gelu(x[..., :d]) * x[..., d:]`` in float32, in the form that ``obj.approximate`` says.

    Raises:
        NotSupportedError: approximate is neither tanh nor none.
    """
    form = _GELU_FORMS.get(obj.approximate)
    if form is None:
        raise NotSupportedError(f"gelu_and_mul: approximate is {obj.approximate!r}; the kernel has tanh and none")
    return _gated(form, x)


def supports_gelu(obj: Any) -> str:
    """Why the kernel is wrong for this layer; "" if it is right."""
    approximate = getattr(obj, "approximate", None)
    return "" if approximate in _GELU_FORMS else f"approximate is {approximate!r}; the kernel has tanh and none"


def _gated(form: str, x: torch.Tensor) -> torch.Tensor:
    columns = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], columns), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    rows = rows_of(x)
    stride, device = rows.stride(0), rows.get_device()
    source, target = rows.data_ptr(), out.data_ptr()
    unusual = (source | target) & 15 or stride & UNUSUAL
    key = (
        *(form, rows.dtype, columns, device),
        unusual and specialisation(source, target, stride),
    )
    launches = _launches.get(key) or _bind(key, form, rows, out)
    count = rows.shape[0]
    launch, by_address, blocks = launches[count.bit_length()]
    if by_address:
        launch(count, blocks, source, target, stride)
    else:
        launch(count, blocks, rows, out, stride)
    return out


def _bind(key: Any, form: str, rows: torch.Tensor, out: torch.Tensor) -> _Launches:
    columns = out.shape[-1]
    made = by_bits(GATED, columns, lambda choice: bind_gated(choice, form, rows, out))
    return _launches.setdefault(key, made)


def bind_gated(choice: Gated, form: str, rows: torch.Tensor, out: torch.Tensor) -> tuple[Launch, bool, int]:
    """How to launch the kernel for tensors like these: launch(rows, blocks, rows, out, stride), whether addresses do
    in the tensors' place, and the blocks.
    """
    from sglang_fl.dispatch.backends.flaggems import triton_kernels as kernels

    columns, device = out.shape[-1], rows.get_device()
    dependent = choice.dependent and launches_dependently(device)
    constants = {
        **{"columns": columns, "block": choice.block, "form": getattr(kernels, form).value},
        "dependent": dependent,
    }
    options = compile_options(choice.warps, dependent)
    launch = bind(kernels.gated_kernel, (rows, out, rows.stride(0)), constants, options, device)
    return launch, takes_addresses(launch), -(-columns // choice.block)
