"""Whole numbers that people write: in settings, on command lines, in other programs' variables."""

from __future__ import annotations

MOST = 2**63 - 1  # that PyTorch, C and files count with


def whole_number(text: str, most: int = MOST) -> int | None:
    """The number that ``text`` writes in the digits 0 to 9 alone; None if it is none, or more than ``most``.

    ``int`` alone refuses what ``str.isdigit`` takes, such as '²', and any text of more than 4300 digits.
    """
    if not (text.isascii() and text.isdecimal()):
        return None
    digits = text.lstrip("0") or "0"
    if len(digits) > len(str(most)):
        return None
    number = int(digits)
    return number if number <= most else None
