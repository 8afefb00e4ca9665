"""How a start's answers differ from native's, and whether that is rounding or a fault."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from sglang_fl.bisect.questions import Answer, Answers

# In float32 two right servers differ by some 1e-6; a fault of one per cent in one operator by 1e-3 and more.
LEAST_TOLERANCE = 1e-4
NOISE_FACTOR = 3.0
# One unit in the last place of bfloat16, the coarsest type that logits are computed in.
TIE = 2.0**-7


class Outcome(Enum):
    """How a start compares with native; the value is for people."""

    EQUAL = "equal"
    ROUNDING = "rounding"
    DIFFERS = "DIFFERS"
    FAILED = "FAILED"

    @property
    def is_good(self) -> bool:
        """Whether it counts as native's."""
        return self in (Outcome.EQUAL, Outcome.ROUNDING)


@dataclass(frozen=True)
class Tolerance:
    """The largest root mean square, over all positions, of differences in log probability that counts as rounding.

    noise: what native itself differs by between decoding alone, in a batch, and reading; the same way.
    """

    limit: float
    noise: float

    def describe(self) -> str:
        """One line for the report."""
        return (
            f"log probabilities may differ by {self.limit:.2g} (root mean square over all tokens): the larger of "
            f"{LEAST_TOLERANCE:g} and {NOISE_FACTOR:g} times native's own rounding, {self.noise:.2g} here, between "
            "decoding alone, decoding in a batch, and reading"
        )


@dataclass(frozen=True)
class Comparison:
    """The outcome, how far off (root mean square; NaN where nothing was answered), the first difference in words."""

    outcome: Outcome
    deviation: float
    first: str


def tolerance_of(native: Answers, limit: float | None = None) -> Tolerance:
    """What native's own rounding allows; ``limit`` replaces the result of that."""
    noise = max(_noise_of_batches(native), _noise_of_reading(native))
    return Tolerance(max(LEAST_TOLERANCE, NOISE_FACTOR * noise) if limit is None else limit, noise)


def compare(native: Answers, other: Answers, tolerance: Tolerance) -> Comparison:
    """Compare the answers to the same questions.

    A first different token counts as rounding where both candidates were nearly equal, in native's eyes and in the
    other's; see :func:`_is_tie`.
    """
    pairs = list(zip(native.all(), other.all(), strict=True))
    deviation = _root_mean_square(difference for pair in pairs for difference in _differences(*pair))
    splits = [(pair, place) for pair in pairs if (place := _first_split(*pair)) is not None]
    faults = [_describe_split(*pair, place) for pair, place in splits if not _is_tie(*pair, place, tolerance)]
    if faults:
        return Comparison(Outcome.DIFFERS, deviation, faults[0])
    if not deviation <= tolerance.limit:
        return Comparison(Outcome.DIFFERS, deviation, _first_value(pairs, tolerance))
    if splits:
        (pair, place), *_ = splits
        return Comparison(Outcome.ROUNDING, deviation, f"{_describe_split(*pair, place)}: a tie")
    return Comparison(Outcome.EQUAL, deviation, "")


def _noise_of_batches(native: Answers) -> float:
    pairs = zip(native.alone, native.batched, strict=True)
    return _root_mean_square(difference for pair in pairs for difference in _differences(*pair))


def _noise_of_reading(native: Answers) -> float:
    pairs = zip(native.alone, native.forced, strict=True)
    return _root_mean_square(
        read - decoded
        for alone, forced in pairs
        for decoded, read in zip((*alone.prompt, *alone.given), forced.prompt, strict=True)
    )


def _differences(native: Answer, other: Answer) -> Iterator[float]:
    """Over the positions at which both had the same tokens before them, and the same token to judge."""
    yield from (b - a for a, b in zip(native.prompt, other.prompt, strict=True))
    split = _first_split(native, other)
    end = len(native.given) if split is None else split
    yield from (b - a for a, b in zip(native.given[:end], other.given[:end], strict=True))


def _first_split(native: Answer, other: Answer) -> int | None:
    places = (place for place, (a, b) in enumerate(zip(native.tokens, other.tokens, strict=True)) if a != b)
    return next(places, None)


def _is_tie(native: Answer, other: Answer, place: int, tolerance: Tolerance) -> bool:
    """Both candidates nearly equally likely, in both servers' eyes.

    That is: their logits differ by less than 2^-7 of the larger one. SGLang tells log probabilities, which differ
    from logits by the same number for all tokens of a position: the gap is the same, the size is theirs. Or by less
    than twice the tolerance, which each of both may be off by.
    """
    mine, its = native.tokens[place], other.tokens[place]
    for candidates in (native.candidates[place], other.candidates[place]):
        if mine not in candidates or its not in candidates:
            return False
        gap, size = abs(candidates[mine] - candidates[its]), max(abs(candidates[mine]), abs(candidates[its]))
        if not gap < max(TIE * size, 2 * tolerance.limit):
            return False
    return True


def _describe_split(native: Answer, other: Answer, place: int) -> str:
    mine, its = native.tokens[place], other.tokens[place]
    known = native.candidates[place]
    gap = f"less likely by {known[mine] - known[its]:.2g}" if its in known else f"not among its first {len(known)}"
    return f"{native.label}, token {place + 1}: {its}, native has {mine}; {its} is {gap} there"


def _first_value(pairs: Iterable[tuple[Answer, Answer]], tolerance: Tolerance) -> str:
    for native, other in pairs:
        for place, (a, b) in enumerate(_values(native, other), 2):
            if not abs(b - a) <= tolerance.limit:
                return f"{native.label}, log probability of token {place} of prompt and answer: {b:.6g}, native {a:.6g}"
    raise AssertionError("a root mean square over the limit without a value over it")


def _values(native: Answer, other: Answer) -> list[tuple[float, float]]:
    split = _first_split(native, other)
    end = len(native.given) if split is None else split
    mine, its = (*native.prompt, *native.given[:end]), (*other.prompt, *other.given[:end])
    return list(zip(mine, its, strict=True))


def _root_mean_square(differences: Iterable[float]) -> float:
    """NaN if one is."""
    squares = [difference * difference for difference in differences]
    return math.sqrt(sum(squares) / len(squares)) if squares else 0.0
