"""What the ranks of the randomised test have: pools made from the seed, so that every rank knows every rank's data."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import log

import torch

from tests.distributed.matrix import DTYPES, Layout, Shape

MIB = 2**20
MAXIMUM_BYTES = 4 * MIB
EMPTY_SHARE, LARGE_SHARE = 0.05, 0.02


def draw_bytes(rng: random.Random) -> int:
    """A size: zero in 5 % of the draws, over 1 MiB (to 4) in 2 %, log-uniform from 1 byte in the rest."""
    kind = rng.random()
    if kind < EMPTY_SHARE:
        return 0
    low, high = (MIB, MAXIMUM_BYTES) if kind < EMPTY_SHARE + LARGE_SHARE else (1, MIB)
    return int(low * (high / low) ** rng.random())


def draw_shape(rng: random.Random, elements: int) -> Shape:
    """A shape of one to three dimensions with about that many elements, and none if there are to be none."""
    dimensions = rng.randint(1, 3)
    shape: list[int] = []
    left = elements
    for _ in range(dimensions - 1):
        length = max(1, min(left, int(2 ** (rng.random() * log(max(left, 1), 2) / 1.5))))
        shape.append(length)
        left //= length
    shape.insert(rng.randint(0, len(shape)), left)
    return tuple(shape)


@dataclass(frozen=True)
class Drawn:
    """What one call is made on."""

    dtype: torch.dtype
    shape: Shape
    layout: Layout

    def __str__(self) -> str:
        return f"{self.dtype}, shape {self.shape}, {self.layout.name.lower()}"


def draw(rng: random.Random, parts: int) -> Drawn:
    """A dtype, a layout and the shape of one of ``parts`` equal parts of a message of the drawn size."""
    dtype = rng.choice(DTYPES)
    elements = draw_bytes(rng) // dtype.itemsize // parts
    return Drawn(dtype, draw_shape(rng, elements), rng.choice(list(Layout)))


@dataclass
class Data:
    """Values for one call of one seed: ``bits`` for what moves, ``summands`` for what is added up.

    Both are cut out of pools of twice the largest size, at a place that depends on call, rank and part.
    """

    bits_pool: torch.Tensor
    summands_pool: torch.Tensor

    @classmethod
    def of_seed(cls, seed: int) -> Data:
        """The pools of a seed: 8 MiB of random bytes, and whole numbers from 1 to 7."""
        generator = torch.Generator().manual_seed(seed)
        bits = torch.randint(0, 256, (2 * MAXIMUM_BYTES,), dtype=torch.uint8, generator=generator)
        return cls(bits, ((bits & 7).clamp(min=1)).to(torch.int16))

    def bits(self, shape: Shape, dtype: torch.dtype, key: int) -> torch.Tensor:
        """Any bit pattern; for bool 0 or 1."""
        count = torch.Size(shape).numel() * dtype.itemsize
        start = self._place(key, count, self.bits_pool.numel()) // 16 * 16
        raw = self.bits_pool[start : start + count]
        if dtype is torch.bool:
            raw = raw & 1
        return raw.view(dtype).reshape(shape)

    def summands(self, shape: Shape, key: int) -> torch.Tensor:
        """Whole numbers from 1 to 7 as int16, whose sums are exact in every dtype."""
        count = torch.Size(shape).numel()
        start = self._place(key, count, self.summands_pool.numel())
        return self.summands_pool[start : start + count].reshape(shape)

    @staticmethod
    def _place(key: int, count: int, available: int) -> int:
        return (key * 2_654_435_761) % 2**32 % max(available - count, 1)
