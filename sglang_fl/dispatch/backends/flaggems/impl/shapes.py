"""What the kernels share: a tensor as rows, sizes of blocks, and which devices take a dependent launch."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

# Programmatic dependent launch came with this compute capability.
_DEPENDENT_LAUNCH = (9, 0)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """``x`` as [rows, last dimension] of contiguous rows: a view where its strides allow one, otherwise a copy."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def next_power_of_two(number: int) -> int:
    """The least power of two that is not below ``number`` (at least 1)."""
    return 1 << (number - 1).bit_length()


@cache
def launches_dependently(device: int) -> bool:
    """Whether CUDA device ``device`` and Triton can launch a kernel while the one before it runs; -1 is the CPU."""
    if device < 0 or torch.cuda.get_device_capability(device) < _DEPENDENT_LAUNCH:
        return False
    from triton.language.extra import cuda

    return hasattr(cuda, "gdc_wait") and hasattr(cuda, "gdc_launch_dependents")


def compile_options(warps: int, dependent: bool) -> dict[str, Any]:
    """Triton's options; that of a dependent launch only where there is one, as older versions do not know it."""
    return {"num_warps": warps, "launch_pdl": True} if dependent else {"num_warps": warps}
