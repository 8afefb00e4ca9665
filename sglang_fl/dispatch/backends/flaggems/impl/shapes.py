"""What the kernels share: a tensor as rows, and the range of their 32-bit offsets."""

from __future__ import annotations

import torch

from sglang_fl.dispatch.types import NotSupportedError

# Triton passes a stride below this as 32 bits, and row times stride is then computed in 32 bits.
OFFSET_LIMIT = 2**31


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """``x`` as [rows, last dimension]: a view where its strides allow one, otherwise a copy."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def check_offsets(what: str, rows: torch.Tensor) -> None:
    """Refuse rows whose offsets do not fit the kernels' 32 bits.

    Raises:
        NotSupportedError: the last row ends at 2**31 elements or later.
    """
    if (rows.shape[0] - 1) * rows.stride(0) + rows.shape[1] >= OFFSET_LIMIT:
        raise NotSupportedError(
            f"{what}: {rows.shape[0]} rows of stride {rows.stride(0)} reach beyond 2**31 elements, "
            "which FlagGems' kernels count in 32 bits"
        )


def next_power_of_two(number: int) -> int:
    """The least power of two that is not below ``number`` (at least 1)."""
    return 1 << (number - 1).bit_length()
