"""What the kernels need of a tensor: rows in memory that begin at a multiple of 16 bytes."""

from __future__ import annotations

import torch

ALIGNMENT_BYTES = 16
_MISALIGNED = ALIGNMENT_BYTES - 1


def aligned(x: torch.Tensor) -> torch.Tensor:
    """``x`` if it is contiguous and begins at a multiple of 16 bytes, otherwise a copy that does."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() & _MISALIGNED else x


def aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` as [rows, last dimension], each beginning at a multiple of 16 bytes: a view if it can be, or a copy."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if rows.is_contiguous():
        return aligned(rows)
    if rows.stride(1) != 1 or (rows.stride(0) * rows.element_size() | rows.data_ptr()) & _MISALIGNED:
        return rows.contiguous()
    return rows
