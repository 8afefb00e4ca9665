"""Data that depends on the rank and the element, and the right results, computed without any library.

A rank's data is a table of 10007 elements, repeated. That length is prime, so that a block or a chunk at a
wrong place shows; and a reduction of whole buffers is the reduction of the tables, repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch

from sglang_fl.comm.backends.flagcx.types import DataType, ReduceOp

PERIOD = 10007


@dataclass(frozen=True)
class ElementType:
    """One of the ten dtypes: FlagCX's name of it, and torch's."""

    data_type: DataType
    torch_dtype: torch.dtype

    @property
    def name(self) -> str:
        return self.data_type.name

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return self.torch_dtype.itemsize

    @property
    def is_float(self) -> bool:
        return self.torch_dtype.is_floating_point

    @property
    def is_signed(self) -> bool:
        return self.torch_dtype.is_signed

    def rounding(self, op: ReduceOp, world_size: int) -> float:
        """Relative error allowed: none, except where an average is not exact (2 units in the last place)."""
        if op is not ReduceOp.AVG or not self.is_float or world_size & (world_size - 1) == 0:
            return 0.0
        return 2 * torch.finfo(self.torch_dtype).eps


ELEMENT_TYPES = tuple(ElementType(data_type, getattr(torch, data_type.name.lower())) for data_type in DataType)

# Largest integer and smallest power of two of the summands: every sum of four ranks is exact in the type that
# the library has to add in (float32 for the two half types, the type itself for the others).
_SUMMANDS = {
    DataType.FLOAT16: (1023, -4, 3),
    DataType.BFLOAT16: (127, -6, 7),
    DataType.FLOAT32: (1 << 15, -3, 3),
    DataType.FLOAT64: (1 << 30, -8, 8),
}
# The same where the half types are added in themselves, step by step.
_SUMMANDS_WITHOUT_ROUNDING = {
    **_SUMMANDS,
    DataType.FLOAT16: (127, -2, 0),
    DataType.BFLOAT16: (15, -2, 0),
}
_FACTORS = torch.tensor([0.5, -0.5, 1, -1, 1.5, -1.5, 2, -2, 3], dtype=torch.float64)  # products stay exact


def _generator(element: ElementType, op: ReduceOp, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * element.data_type + 100 * op + rank)


def _float_values(element: ElementType, op: ReduceOp, rank: int, rounds_once: bool) -> torch.Tensor:
    """float64 values that the element type holds exactly."""
    generator = _generator(element, op, rank)
    if op is ReduceOp.PROD:
        return _FACTORS[torch.randint(len(_FACTORS), (PERIOD,), generator=generator)]
    largest, low, high = (_SUMMANDS if rounds_once else _SUMMANDS_WITHOUT_ROUNDING)[element.data_type]
    mantissa = torch.randint(1, largest + 1, (PERIOD,), generator=generator)
    mantissa *= 1 - 2 * torch.randint(2, (PERIOD,), generator=generator)
    exponent = torch.randint(low, high + 1, (PERIOD,), generator=generator)
    return torch.ldexp(mantissa.double(), exponent)


def _integer_values(element: ElementType, op: ReduceOp, world_size: int, rank: int) -> torch.Tensor:
    """int64 values over the whole range, so that sums and products wrap; uint64 as its bit pattern."""
    bits = 8 * element.size
    lowest = -(1 << (bits - 1)) if element.is_signed or bits == 64 else 0
    highest = lowest + (1 << bits) - 1
    if op is ReduceOp.AVG:  # only a sum that does not wrap has an average
        lowest = -((1 << (bits - 1)) // world_size) if element.is_signed else 0
        highest = ((1 << (bits - element.is_signed)) - 1) // world_size
    flip = 0
    if highest >= 1 << 63:  # torch draws from int64 only
        lowest, highest, flip = lowest - (1 << 63), highest - (1 << 63), torch.iinfo(torch.int64).min
    values = torch.randint(lowest, highest, (PERIOD,), generator=_generator(element, op, rank)) ^ flip
    return values | 1 if op is ReduceOp.PROD else values  # even factors would soon make all products zero


def _values(element: ElementType, op: ReduceOp, world_size: int, rank: int, rounds_once: bool) -> torch.Tensor:
    if element.is_float:
        return _float_values(element, op, rank, rounds_once)
    return _integer_values(element, op, world_size, rank)


def _reduce_integers(element: ElementType, op: ReduceOp, values: list[torch.Tensor]) -> torch.Tensor:
    if op is ReduceOp.SUM:
        return reduce(torch.add, values)
    if op is ReduceOp.PROD:
        return reduce(torch.mul, values)
    if op is ReduceOp.AVG:  # toward zero, as NCCL divides
        return _divide(element, reduce(torch.add, values), len(values))
    choose = torch.maximum if op is ReduceOp.MAX else torch.minimum
    if element.torch_dtype is not torch.uint64:
        return reduce(choose, values)
    flip = torch.iinfo(torch.int64).min  # the order of unsigned numbers
    return reduce(choose, [value ^ flip for value in values]) ^ flip


def _divide(element: ElementType, values: torch.Tensor, divisor: int) -> torch.Tensor:
    if element.torch_dtype is not torch.uint64:
        return torch.div(values, divisor, rounding_mode="trunc")
    half = (values >> 1) & torch.iinfo(torch.int64).max  # int64 holds the bit pattern of an unsigned number
    quotient = half // divisor * 2
    return quotient + (values - quotient * divisor) // divisor


def _reduce_floats(op: ReduceOp, values: list[torch.Tensor]) -> torch.Tensor:
    if op is ReduceOp.AVG:
        return reduce(torch.add, values) / len(values)
    functions = {
        ReduceOp.SUM: torch.add,
        ReduceOp.PROD: torch.mul,
        ReduceOp.MAX: torch.maximum,
        ReduceOp.MIN: torch.minimum,
    }
    return reduce(functions[op], values)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as one row of bytes."""
    return tensor.contiguous().view(-1).view(torch.uint8)


class RepeatedTable:
    """Bytes of a table of PERIOD elements, readable from any element on as if it were repeated for ever."""

    def __init__(self, table: torch.Tensor, size: int) -> None:
        self._table = table
        self._size = size
        self._repeated = table

    def block(self, start: int, count: int) -> torch.Tensor:
        """Bytes of elements ``start`` to ``start + count``."""
        first = start % PERIOD * self._size
        end = first + count * self._size
        if end > self._repeated.numel():
            self._repeated = self._table.repeat(end // self._table.numel() + 1)
        return self._repeated[first:end]


class Sources:
    """What every rank sends for one element type, and, with an operation, what the reduction of it is.

    Without an operation the data are random bytes: what only moves must arrive bit by bit, whatever it means.
    """

    def __init__(self, element: ElementType, op: ReduceOp | None, world_size: int, device: torch.device) -> None:
        """Make the tables on ``device``; on one that is no CPU the half types may be added step by step."""
        ranks = range(world_size)
        self.reduced: RepeatedTable | None = None
        if op is None:
            tables = [self._random_bytes(element, rank) for rank in ranks]
        else:
            rounds_once = device.type == "cpu" or world_size == 2
            values = [_values(element, op, world_size, rank, rounds_once) for rank in ranks]
            tables = [as_bytes(value.to(element.torch_dtype)) for value in values]
            result = _reduce_floats(op, values) if element.is_float else _reduce_integers(element, op, values)
            result_bytes = as_bytes(result.to(element.torch_dtype)).to(device)
            self.reduced = RepeatedTable(result_bytes, element.size)
        self.of_rank = [RepeatedTable(table.to(device), element.size) for table in tables]

    def reduction(self, start: int, count: int) -> torch.Tensor:
        """Bytes of elements ``start`` to ``start + count`` of the reduction over all ranks."""
        assert self.reduced is not None
        return self.reduced.block(start, count)

    @staticmethod
    def _random_bytes(element: ElementType, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(7000 + 10 * element.data_type + rank)
        return torch.randint(256, (PERIOD * element.size,), generator=generator, dtype=torch.uint8)
