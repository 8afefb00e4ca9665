"""The matrix that every operation is tested over: dtypes, shapes, layouts, and data that depends on the rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

Shape = tuple[int, ...]

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
]
# Written out, not asked of the backends: what each of them sums.
_SUMMED_BY_BOTH = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
    }
)
SUMMED = {"torch": _SUMMED_BY_BOTH, "flagcx": _SUMMED_BY_BOTH | {torch.uint32, torch.uint64}}

SHAPES: Sequence[Shape] = [(), (1,), (7,), (4, 3), (2, 3, 5), (0, 4), (33, 65)]
# Where only the shape of a row counts.
ROWS: Sequence[Shape] = [(1,), (1, 3), (1, 3, 5), (1, 65)]

_GUARD = 0x5A
# Types that take any bits: a bool tensor would turn the pattern into 1.
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class Layout(Enum):
    """Where the elements of a tensor lie in its storage."""

    CONTIGUOUS = "contiguous"
    STRIDED = "every second column of a wider tensor"
    TRANSPOSED = "dimensions in the other order"
    OFFSET = "contiguous, three elements into its storage"


LARGE: Shape = (300, 1001)  # 1.2 MB in fp32: beyond what a library sends in one piece
LARGE_DTYPES = frozenset({torch.float32, torch.bool})
LARGE_LAYOUTS = (Layout.CONTIGUOUS, Layout.TRANSPOSED)


def layouts_of(dimensions: int) -> list[Layout]:
    """The layouts that differ for a tensor of that many dimensions."""
    if dimensions == 0:
        return [Layout.CONTIGUOUS, Layout.OFFSET]
    if dimensions == 1:
        return [Layout.CONTIGUOUS, Layout.STRIDED, Layout.OFFSET]
    return list(Layout)


@dataclass(frozen=True)
class Case:
    """One entry of the matrix; ``salt`` makes its data differ from that of every other."""

    dtype: torch.dtype
    shape: Shape
    layout: Layout
    salt: int

    def __str__(self) -> str:
        return f"{self.dtype}, shape {self.shape}, {self.layout.name.lower()}"

    def bits(self, rank: int, shape: Shape | None = None) -> torch.Tensor:
        """Any bit pattern (for bool 0 or 1), other ones on every rank: for what only moves."""
        shape = self.shape if shape is None else shape
        generator = torch.Generator().manual_seed(self.salt * 64 + rank)
        count = torch.Size(shape).numel()
        high = 2 if self.dtype is torch.bool else 256
        raw = torch.randint(0, high, (count * self.dtype.itemsize,), dtype=torch.uint8, generator=generator)
        return raw.view(self.dtype).reshape(shape)

    def summands(self, rank: int, shape: Shape | None = None) -> torch.Tensor:
        """Whole numbers from 1 to 7, whose sum over a few ranks is exact in every dtype; int16."""
        shape = self.shape if shape is None else shape
        count = torch.Size(shape).numel()
        return ((torch.arange(count, dtype=torch.int64) * 3 + rank * 5 + self.salt) % 7 + 1).to(torch.int16).view(shape)


def cases(
    dtypes: Sequence[torch.dtype], minimum_dimensions: int = 0, shapes: Sequence[Shape] = SHAPES
) -> Iterator[Case]:
    """Every dtype in every shape and layout; a large one in two dtypes and layouts."""
    entries = [
        (dtype, shape, layout)
        for dtype in dtypes
        for shape in shapes
        if len(shape) >= minimum_dimensions
        for layout in layouts_of(len(shape))
    ]
    entries += [(dtype, LARGE, layout) for dtype in dtypes if dtype in LARGE_DTYPES for layout in LARGE_LAYOUTS]
    for salt, entry in enumerate(entries):
        yield Case(*entry, salt)


def few_cases(dtypes: Sequence[torch.dtype]) -> Iterator[Case]:
    """One shape in every layout and dtype, for tests whose subject is the group."""
    for number, dtype in enumerate(dtypes):
        for layout in Layout:
            yield Case(dtype, (4, 3), layout, number * 8 + list(Layout).index(layout))


def place(values: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The values in that layout, in a storage of their own that is otherwise filled with a pattern."""
    size = list(values.shape)
    offset = 0
    strides = _contiguous_strides(size)
    if layout is Layout.STRIDED and size:
        strides = [stride * 2 for stride in _contiguous_strides(size)]
    elif layout is Layout.TRANSPOSED:
        strides = _contiguous_strides(size[::-1])[::-1]
    elif layout is Layout.OFFSET:
        offset = 3
    factor = 2 if layout is Layout.STRIDED else 1
    elements = offset + values.numel() * factor + 1
    storage = torch.full((elements * values.element_size(),), _GUARD, dtype=torch.uint8).view(values.dtype)
    return storage.as_strided(size, strides, offset).copy_(values)


def blank(shape: Shape, dtype: torch.dtype, layout: Layout = Layout.CONTIGUOUS) -> torch.Tensor:
    """An output in that layout, filled with zeros."""
    return place(torch.zeros(shape, dtype=torch.uint8).to(dtype), layout)


def _contiguous_strides(size: Sequence[int]) -> list[int]:
    strides, stride = [], 1
    for length in reversed(size):
        strides.append(stride)
        stride *= max(length, 1)
    return strides[::-1]


def same(actual: torch.Tensor | None, expected: torch.Tensor, what: object) -> None:
    """Shape, dtype and every bit are equal."""
    assert actual is not None, what
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, (
        f"{what}: got {actual.dtype} {tuple(actual.shape)}, not {expected.dtype} {tuple(expected.shape)}"
    )
    got, wanted = _flat_bytes(actual), _flat_bytes(expected)
    if torch.equal(got, wanted):
        return
    wrong = (got != wanted).nonzero().view(-1) // max(actual.element_size(), 1)
    where = torch.unique(wrong)
    raise AssertionError(
        f"{what}: {len(where)} of {actual.numel()} elements are wrong, first at {int(where[0])} (flat): got "
        f"{actual.reshape(-1)[where[0]]}, not {expected.reshape(-1)[where[0]]}"
    )


def surroundings_intact(tensor: torch.Tensor, what: object) -> None:
    """Nothing was written outside the elements of a tensor that :func:`place` made."""
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    copy, raw = storage.clone(), _RAW[tensor.element_size()]
    pattern = torch.full((tensor.element_size(),), _GUARD, dtype=torch.uint8).view(raw)
    inside = copy.view(raw).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    inside.copy_(pattern.view(()).expand(tensor.shape))
    assert bool((copy == _GUARD).all()), f"{what}: bytes around the tensor were overwritten"


def summed(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The exact sum of ``Case.summands``, in ``dtype``."""
    return torch.stack(list(parts)).sum(0, dtype=torch.int16).to(dtype)


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
