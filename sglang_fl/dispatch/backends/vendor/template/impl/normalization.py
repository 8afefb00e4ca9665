"""Normalizations on the chip."""

from __future__ import annotations

from typing import Any

import torch

from sglang_fl.dispatch.types import NotSupportedError

from . import sdk


def rms_norm_my_chip(
    obj: Any, x: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Root mean square norm over the last dimension; with a residual, of the sum, which is returned as well.

    Raises:
        NotSupportedError: the weight has another dtype, which the library does not know. Nothing is written before.
    """
    if obj.weight.dtype != x.dtype:
        raise NotSupportedError(f"the weight is {obj.weight.dtype}, the input {x.dtype}; my_chip_sdk wants one dtype")
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    if residual is None:
        if x.numel():
            sdk().rms_norm(output, x.contiguous(), obj.weight, obj.variance_epsilon)
        return output
    total = torch.empty_like(output)
    if x.numel():
        sdk().add_rms_norm(output, total, x.contiguous(), residual.contiguous(), obj.weight, obj.variance_epsilon)
    return output, total
