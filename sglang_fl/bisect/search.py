"""Halving: which of a row of items first makes a start differ, and how many starts that takes at most."""

from __future__ import annotations

from collections.abc import Callable


def first_bad(count: int, is_good: Callable[[int], bool], assumed: int = 0) -> int:
    """The place of the first item whose addition makes a difference.

    The first 0 items are known to be good, all ``count`` of them are known to be bad. What is found always holds:
    the items before it were good, with it they were bad.

    Args:
        count: number of items, at least 1.
        is_good: asked whether the first ``n`` items alone are good; once for an ``n``, never for 0 or ``count``.
        assumed: so many items are taken for good; asked only if the answer would rest on it.
    """
    low, high = assumed, count
    while True:
        while high - low > 1:
            middle = (low + high) // 2
            if is_good(middle):
                low = middle
            else:
                high = middle
        if low == 0 or low != assumed or is_good(low):
            return low
        low, high, assumed = 0, low, 0


def most_asked(count: int, assumed: int = 0) -> int:
    """How often :func:`first_bad` asks at most."""
    asked = _halvings(count - assumed)
    return asked if assumed == 0 else asked + 1 + _halvings(assumed)


def _halvings(count: int) -> int:
    return max(count - 1, 0).bit_length()
