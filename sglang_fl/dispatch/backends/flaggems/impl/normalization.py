"""RMSNorm and GemmaRMSNorm on a Triton kernel that keeps rows in registers and computes in float32."""

from __future__ import annotations

from typing import Any

import torch

from sglang_fl.dispatch.backends.flaggems.choices import ADD_RMS_NORM, RMS_NORM, Norm, by_bits
from sglang_fl.dispatch.backends.flaggems.impl.shapes import (
    compile_options,
    launches_dependently,
    next_power_of_two,
    rows_of,
)
from sglang_fl.dispatch.ops import Normed
from sglang_fl.triton_launch import UNUSUAL, Launch, bind, specialisation, takes_addresses

# A row is held by one program: above this a thread of 16 warps would hold more than 128 values.
LARGEST_ROW = 65536

# Of a key: by the length in bits of the number of rows, how to launch, whether by addresses, and the rows of a program.
_Launches = tuple[tuple[Launch, bool, int], ...]
_launches: dict[Any, _Launches] = {}


def rms_norm_flaggems(obj: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
    """The norm of x, or with ``residual`` the pair (norm of the sum, sum), written into contiguous x and residual.

    The sum is kept in float32 for the norm and rounded once, as in SGLang's native method.
    """
    return _norm(x, residual, obj.weight, obj.variance_epsilon, False)


def gemma_rms_norm_flaggems(obj: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
    """As :func:`rms_norm_flaggems` with ``1 + weight``, added in float32 by the kernel."""
    return _norm(x, residual, obj.weight, obj.variance_epsilon, True)


def supports_norm(obj: Any) -> str:
    """Why the kernel is wrong for this layer; "" if it is right."""
    weight = getattr(obj, "weight", None)
    if weight is None:
        return "the layer has no weight, and the kernel needs one"
    if weight.dim() != 1 or not weight.is_contiguous():
        return f"the kernel needs a contiguous weight of one dimension, not shape {tuple(weight.shape)}"
    if weight.shape[0] > LARGEST_ROW:
        return f"rows of {weight.shape[0]} are beyond {LARGEST_ROW}, the largest that the kernel holds in registers"
    return ""


def _norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, one_plus_weight: bool
) -> Normed:
    if residual is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if out.numel():
            _launch(rows_of(x), None, weight, out, eps, one_plus_weight)
        return out
    x, residual = x.contiguous(), residual.contiguous()
    if x.numel():
        _launch(rows_of(x), residual, weight, x, eps, one_plus_weight)
    return x, residual


def _launch(
    rows: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    one_plus_weight: bool,
) -> None:
    count, width = rows.shape
    stride = rows.stride(0)
    # Without a residual the kernel gets x in its place, and does not look at it.
    other = rows if residual is None else residual
    addresses = (rows.data_ptr(), other.data_ptr(), weight.data_ptr(), out.data_ptr())
    unusual = (addresses[0] | addresses[1] | addresses[2] | addresses[3]) & 15 or stride & UNUSUAL
    key = (
        *(residual is None, one_plus_weight, width, rows.dtype, other.dtype, weight.dtype, rows.get_device()),
        unusual and specialisation(*addresses, stride),
    )
    arguments = (rows, other, weight, out, stride, count, eps)
    launches = _launches.get(key) or _bind(key, residual is not None, one_plus_weight, arguments)
    launch, by_address, rows_a_program = launches[count.bit_length()]
    if by_address:
        launch(-(-count // rows_a_program), 1, *addresses, stride, count, eps)
    else:
        launch(-(-count // rows_a_program), 1, *arguments)


def _bind(key: Any, with_residual: bool, one_plus_weight: bool, arguments: tuple[Any, ...]) -> _Launches:
    table = ADD_RMS_NORM if with_residual else RMS_NORM
    width = arguments[0].shape[1]
    made = by_bits(table, width, lambda choice: bind_norm(choice, with_residual, one_plus_weight, arguments))
    return _launches.setdefault(key, made)


def bind_norm(
    choice: Norm, with_residual: bool, one_plus_weight: bool, arguments: tuple[Any, ...]
) -> tuple[Launch, bool, int]:
    """How to launch the kernel for arguments like these: launch(programs, 1, *arguments), whether addresses do in the
    tensors' place, and the rows of a program.

    ``arguments``: x, residual, weight, result, x's row stride, number of rows, epsilon.
    """
    from sglang_fl.dispatch.backends.flaggems import triton_kernels as kernels

    width, device = arguments[0].shape[1], arguments[0].get_device()
    block = next_power_of_two(width)
    dependent = choice.dependent and launches_dependently(device)
    constants = {
        **{"width": width, "block": block, "rows": choice.rows, "with_residual": with_residual},
        **{"one_plus_weight": one_plus_weight, "dependent": dependent},
    }
    options = compile_options(choice.warps(block), dependent)
    launch = bind(kernels.rms_norm_kernel, arguments, constants, options, device)
    return launch, takes_addresses(launch), choice.rows
