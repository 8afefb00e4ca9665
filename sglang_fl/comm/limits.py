"""The one check of time limits, wherever they are given: that of the settings."""

from __future__ import annotations

from numbers import Real

from sglang_fl.config.value_types import InvalidValueError, Seconds


def checked_limit(name: str, given: object) -> float:
    """``given`` as seconds; ``name`` is what the caller calls it.

    Raises:
        ValueError: it is no number, less than a millisecond or endless; says what is allowed.
    """
    problem = f"{name} is {given!r}; allowed is {Seconds.allowed}"
    if isinstance(given, bool) or not isinstance(given, Real):
        raise ValueError(problem)
    try:
        return Seconds().from_text(repr(float(given)))
    except InvalidValueError:
        raise ValueError(problem) from None
