"""Tensors of the self-test: values that depend on the rank, layouts with guards, and what is wrong with a result."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

import torch

# By name, so that a torch without one of them still tests the others.
_DTYPE_NAMES = (
    "float32",
    "bfloat16",
    "float16",
    "float64",
    "int8",
    "uint8",
    "int16",
    "int32",
    "int64",
    "bool",
    "float8_e4m3fn",
    "float8_e5m2",
    "uint16",
    "uint32",
    "uint64",
    "complex64",
)
DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in _DTYPE_NAMES if hasattr(torch, name))

# The largest whole number up to which every sum of whole numbers is exact (floating point) or does not wrap.
_EXACT_TO: dict[torch.dtype, int] = {
    torch.float16: 2**11,
    torch.bfloat16: 2**8,
    torch.int8: 2**7 - 1,
    torch.uint8: 2**8 - 1,
}
_LARGEST_VALUE = 1000
_UNSIGNED = {"uint8", "uint16", "uint32", "uint64"}
_FILLER = 0x5A
_OFFSET_ELEMENTS = 3  # no multiple of a vector: the address is aligned to the element alone


class Layout(Enum):
    """How a tensor's elements lie in memory."""

    CONTIGUOUS = "contiguous"
    OFFSET = "offset"
    STRIDED = "strided"
    TRANSPOSED = "transposed"


def seed_of(*parts: object) -> int:
    """A seed that is the same in every process for the same parts."""
    return zlib.crc32("/".join(map(str, parts)).encode())


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits at all, NaNs included, for what only moves; bool has its two values. On the CPU."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel()
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8).view(torch.bool)
    raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def whole_numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int, rank: int, world_size: int) -> torch.Tensor:
    """int64 numbers that ``dtype`` holds and whose sums over the ranks are exact in any order. On the CPU.

    Integers small enough for the type; in a world too large for that, some ranks contribute zero to an element.
    """
    limit = _EXACT_TO.get(dtype, 2**24)
    largest = max(1, min(_LARGEST_VALUE, limit // world_size))
    smallest = 0 if str(dtype).removeprefix("torch.") in _UNSIGNED else -largest
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(smallest, largest + 1, shape, generator=generator)
    every = -(-world_size // limit)
    if every > 1:
        places = torch.arange(values.numel()).reshape(shape)
        values *= (places + rank) % every == 0
    return values


def wrong_elements(actual: torch.Tensor, expected: torch.Tensor) -> int:
    """Elements whose bytes differ, compared on the device of ``expected``.

    All of them, and at least one, where shape or dtype differ already.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return max(1, expected.numel())
    if expected.numel() == 0:
        return 0
    different = _bytes_of(actual.to(expected.device)) != _bytes_of(expected)
    return int(different.view(-1, expected.element_size()).any(dim=1).sum())


def row_blocks(tensor: torch.Tensor, rows: Sequence[int]) -> list[torch.Tensor]:
    """``rows[0]``, ``rows[1]``, ... rows of ``tensor``, one block after the other."""
    ends = list(accumulate(rows))
    return [tensor[end - count : end] for count, end in zip(rows, ends, strict=True)]


@dataclass(frozen=True)
class Placed:
    """A tensor inside a storage whose other elements must stay as they are.

    Attributes:
        tensor: the view that is handed to an operation.
        storage: flat, the whole of it, on the same device.
        before: a copy of the storage on the CPU.
    """

    tensor: torch.Tensor
    storage: torch.Tensor
    before: torch.Tensor

    def wrong(self, expected: torch.Tensor) -> int:
        """Elements that are not as ``expected`` (on the CPU), and elements beside the tensor that have changed."""
        if self.tensor.shape != expected.shape:
            return max(1, expected.numel())
        wanted = self.before.clone()
        view = self.tensor
        wanted.as_strided(view.size(), view.stride(), view.storage_offset()).copy_(expected)
        return wrong_elements(self.storage, wanted)


def place(values: torch.Tensor, layout: Layout, device: torch.device) -> Placed:
    """``values`` laid out as asked on ``device``, with guard elements around."""
    shape, count = tuple(values.shape), values.numel()
    storage = _filled(2 * count + 2 * _OFFSET_ELEMENTS, values.dtype)
    strides = _contiguous_strides(shape)
    offset = _OFFSET_ELEMENTS if layout is Layout.OFFSET else 0
    if layout is Layout.STRIDED:
        strides = tuple(2 * stride for stride in strides)
    elif layout is Layout.TRANSPOSED:
        strides = tuple(reversed(_contiguous_strides(shape[::-1])))
    storage.as_strided(shape, strides, offset).copy_(values)
    on_device = storage.to(device) if device.type != "cpu" else storage.clone()
    return Placed(on_device.as_strided(shape, strides, offset), on_device, storage)


def place_empty(shape: tuple[int, ...], dtype: torch.dtype, layout: Layout, device: torch.device) -> Placed:
    """As :func:`place`, with the guards' value in the tensor, too."""
    return place(_filled(torch.Size(shape).numel(), dtype).reshape(shape), layout, device)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous()
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)  # one element may have any stride


def _filled(count: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.ones(count, dtype=dtype)
    return torch.full((count * dtype.itemsize,), _FILLER, dtype=torch.uint8).view(dtype)


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    stride = 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(1, size)
    return tuple(reversed(strides))
