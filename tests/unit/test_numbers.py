"""Whole numbers that people write."""

from __future__ import annotations

import reprlib

import pytest

from sglang_fl.config.numbers import MOST, whole_number


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("7", 7), ("007", 7), (str(MOST), MOST), ("0" * 5000, 0), ("0" * 5000 + "12", 12)],
    ids=reprlib.repr,
)
def test_a_whole_number(text: str, number: int) -> None:
    """Given the digits 0 to 9, with any zeros before them, then they are the number."""
    assert whole_number(text) == number


@pytest.mark.parametrize(
    "text",
    ["", " 1", "+1", "-1", "1.0", "1e3", "1_000", "²", "1²", "٣", str(MOST + 1), "9" * 5000],
    ids=reprlib.repr,
)
def test_what_is_no_whole_number(text: str) -> None:
    """Given another text, digits of other scripts or too large a number, then there is none, and no error."""
    assert whole_number(text) is None


def test_a_limit_of_ones_own() -> None:
    """Given a largest number, then it is one and the next is none."""
    assert [whole_number(text, 12) for text in ("12", "13", "100")] == [12, None, None]
