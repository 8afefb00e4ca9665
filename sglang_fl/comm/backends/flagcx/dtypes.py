"""torch dtypes as FlagCX's numbers; importing this module does not import torch."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from sglang_fl.comm.backends.flagcx.types import DataType

if TYPE_CHECKING:
    import torch

# By torch's names, so that a torch without one of them still gets the others.
NAMES: dict[str, DataType] = {
    "int8": DataType.INT8,
    "uint8": DataType.UINT8,
    "int32": DataType.INT32,
    "uint32": DataType.UINT32,
    "int64": DataType.INT64,
    "uint64": DataType.UINT64,
    "float16": DataType.FLOAT16,
    "float32": DataType.FLOAT32,
    "float64": DataType.FLOAT64,
    "bfloat16": DataType.BFLOAT16,
}


@lru_cache(maxsize=1)
def torch_data_types() -> dict[torch.dtype, DataType]:
    """torch dtype -> FlagCX number, for the dtypes that FlagCX reduces; all others can move as ``UINT8`` bytes."""
    import torch

    return {getattr(torch, name): number for name, number in NAMES.items() if hasattr(torch, name)}
