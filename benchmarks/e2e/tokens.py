"""Whether two runs gave the same tokens, or differ only where native's own logits leave it open.

At the first step at which the tokens of a prompt differ, both runs have read the same. There both candidates'
logits in native must differ by less than LIMIT of the larger, and so must the two runs' logits of each of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LIMIT = 2.0**-7
# Fewer different tokens in all answers than this fraction prove nothing: a model that repeats itself hides faults.
LEAST_DISTINCT = 1 / 16


@dataclass(frozen=True)
class Answer:
    """Greedy tokens for one prompt, and of each step the largest logits by token id."""

    ids: Sequence[int]
    tops: Sequence[Mapping[int, float]]


@dataclass(frozen=True)
class Difference:
    """The first step of a prompt at which two runs chose different tokens.

    Attributes:
        gap: between the candidates in native, as a fraction of the larger; infinite where one is not in its top.
        shift: between the runs, the larger of both candidates', likewise.
    """

    prompt: int
    step: int
    native_token: int
    token: int
    gap: float
    shift: float

    @property
    def is_open(self) -> bool:
        """Whether native's logits leave it open which token is right."""
        return self.gap < LIMIT and self.shift < LIMIT


def compare(native: Sequence[Answer], other: Sequence[Answer]) -> list[Difference]:
    """The first difference of each prompt that has one.

    Raises:
        ValueError: the runs answered different numbers of prompts or tokens.
    """
    if [len(answer.ids) for answer in native] != [len(answer.ids) for answer in other]:
        raise ValueError("both runs must answer the same prompts with the same number of tokens")
    found = (_first(prompt, *pair) for prompt, pair in enumerate(zip(native, other, strict=True)))
    return [difference for difference in found if difference is not None]


def largest_shift(native: Sequence[Answer], other: Sequence[Answer]) -> float:
    """The largest distance of a logit in both tops, as a fraction of the larger, where both runs have read the same."""
    largest = 0.0
    for prompt, (mine, its) in enumerate(zip(native, other, strict=True)):
        difference = _first(prompt, mine, its)
        steps = len(mine.ids) if difference is None else difference.step + 1
        for own_top, top in zip(mine.tops[:steps], its.tops[:steps], strict=True):
            largest = max([largest, *(distance(own_top[token], top[token]) for token in own_top.keys() & top.keys())])
    return largest


def distance(left: float | None, right: float | None) -> float:
    """|left - right| / the larger of both magnitudes; infinite where one is unknown."""
    if left is None or right is None:
        return math.inf
    larger = max(abs(left), abs(right))
    return abs(left - right) / larger if larger else 0.0


def weakness(answers: Sequence[Answer]) -> str:
    """Why the answers prove nothing; empty where they do."""
    if not all(math.isfinite(value) for answer in answers for top in answer.tops for value in top.values()):
        return "logits are no finite numbers"
    ids = [token for answer in answers for token in answer.ids]
    if len(set(ids)) < LEAST_DISTINCT * len(ids):
        return f"{len(ids)} tokens are only {len(set(ids))} different ones"
    return ""


def _first(prompt: int, native: Answer, other: Answer) -> Difference | None:
    for step, (native_token, token) in enumerate(zip(native.ids, other.ids, strict=True)):
        if native_token == token:
            continue
        own, its = native.tops[step], other.tops[step]
        return Difference(
            prompt,
            step,
            native_token,
            token,
            gap=distance(own.get(native_token), own.get(token)),
            shift=max(distance(own.get(each), its.get(each)) for each in (native_token, token)),
        )
    return None
