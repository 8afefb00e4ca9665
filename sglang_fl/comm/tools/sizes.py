"""Sizes in bytes as people write them: 8, 4K, 64M, 1G, all powers of 1024."""

from __future__ import annotations

import argparse
import reprlib

from sglang_fl.config.numbers import MOST, whole_number
from sglang_fl.config.value_types import InvalidValueError, Seconds

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def parse_size(text: str) -> int:
    """Bytes.

    Raises:
        ValueError: no whole number, another unit than K, M and G, or 2**63 bytes and more.
    """
    upper = text.strip().upper().removesuffix("B").removesuffix("I")
    number = upper.rstrip("KMG")
    unit = upper[len(number) :]
    units = whole_number(number, MOST // _UNITS[unit]) if unit in _UNITS else None
    if units is None:
        raise ValueError(
            f"{reprlib.repr(text)} is no size; write bytes, or a whole number with K, M or G, such as 64K, and fewer "
            f"than 2**63 bytes"
        )
    return units * _UNITS[unit]


def seconds(text: str) -> float:
    """A time limit on a command line.

    Raises:
        argparse.ArgumentTypeError: no number of seconds from a millisecond to a year.
    """
    try:
        return Seconds().from_text(text)
    except InvalidValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no time limit; allowed is {error.allowed}") from error


def scan(smallest: int, largest: int, factor: int | None, step: int | None) -> list[int]:
    """``smallest`` to ``largest`` bytes, by multiplication or by addition.

    Raises:
        ValueError: there is no way from one to the other.
    """
    if not 0 < smallest <= largest:
        raise ValueError(f"sizes from {smallest} to {largest}: the first must be at least 1 and at most the second")
    if (factor is not None and factor < 2) or (step is not None and step < 1):
        raise ValueError(f"factor {factor}, step {step}: a factor is at least 2, a step at least 1 byte")
    if step is not None:
        return list(range(smallest, largest + 1, step))
    sizes = [smallest]
    while (following := sizes[-1] * (factor or 2)) <= largest:
        sizes.append(following)
    return sizes
