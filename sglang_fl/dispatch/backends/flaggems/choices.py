"""How the Triton kernels are launched, by number of tokens and width: data, as measured on one H200.

The first row of a table whose limits hold is taken. Limits of tokens are powers of two, so that the choice is one look
at the number's bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

# Lengths in bits of the numbers of tokens that there can be: a grid has fewer than 2**31 rows.
LARGEST_BITS = 31
UNLIMITED = 2**LARGEST_BITS
_LANES = 32
_MOST_WARPS = 16


@dataclass(frozen=True)
class Gated:
    """Of gated activations.

    Attributes:
        below_tokens: holds for fewer tokens.
        below_width: holds for results of fewer columns.
        block: columns a program.
        warps: warps a program.
        dependent: launched while the kernel before it still runs, where the device can.
    """

    below_tokens: int
    below_width: int
    block: int
    warps: int
    dependent: bool


@dataclass(frozen=True)
class Norm:
    """Of norms, with and without residual.

    Attributes:
        below_tokens: see :class:`Gated`.
        below_width: likewise.
        values: elements a thread, which gives the number of warps.
        rows: rows a program.
        dependent: see :class:`Gated`.
    """

    below_tokens: int
    below_width: int
    values: int
    rows: int
    dependent: bool

    def warps(self, block: int) -> int:
        """Warps of a program that holds ``rows`` rows of ``block`` elements."""
        return min(max(block * self.rows // (_LANES * self.values), 1), _MOST_WARPS)


@dataclass(frozen=True)
class Rotary:
    """Of rotary embedding.

    Attributes:
        below_tokens: see :class:`Gated`.
        below_width: holds for fewer heads of query and key together.
        heads: heads a program, a power of two.
        warps: warps a program.
        dependent: see :class:`Gated`.
    """

    below_tokens: int
    below_width: int
    heads: int
    warps: int
    dependent: bool


GATED = (
    Gated(16, UNLIMITED, block=512, warps=4, dependent=True),
    Gated(256, UNLIMITED, block=1024, warps=8, dependent=True),
    Gated(2048, UNLIMITED, block=2048, warps=8, dependent=True),
    Gated(UNLIMITED, UNLIMITED, block=1024, warps=4, dependent=True),
)
RMS_NORM = (
    Norm(UNLIMITED, 257, values=8, rows=4, dependent=True),
    Norm(256, 2049, values=8, rows=1, dependent=True),
    Norm(2048, 2049, values=32, rows=1, dependent=True),
    Norm(UNLIMITED, 2049, values=16, rows=2, dependent=True),
    Norm(UNLIMITED, UNLIMITED, values=32, rows=1, dependent=True),
)
ADD_RMS_NORM = (
    Norm(UNLIMITED, 2049, values=8, rows=2, dependent=True),
    Norm(UNLIMITED, UNLIMITED, values=32, rows=1, dependent=True),
)
ROTARY = (
    Rotary(64, UNLIMITED, heads=8, warps=2, dependent=True),
    Rotary(2048, UNLIMITED, heads=16, warps=2, dependent=True),
    Rotary(UNLIMITED, UNLIMITED, heads=16, warps=4, dependent=False),
)

_Row = TypeVar("_Row", Gated, Norm, Rotary)
_Bound = TypeVar("_Bound")


def by_bits(table: Sequence[_Row], width: int, bound: Callable[[_Row], _Bound]) -> tuple[_Bound, ...]:
    """For each length in bits of a number of tokens, what ``bound`` makes of the row chosen for it; once for each row.

    Everything that any number of tokens may need is made at once, so that no later call compiles anything.
    """
    made: dict[_Row, _Bound] = {}
    found = []
    for bits in range(LARGEST_BITS + 1):
        row = next(row for row in table if 2**bits <= row.below_tokens and width < row.below_width)
        if row not in made:
            made[row] = bound(row)
        found.append(made[row])
    return tuple(found)
