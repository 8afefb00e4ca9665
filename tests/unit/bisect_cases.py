"""Answers made by hand, for the tests of bisect."""

from __future__ import annotations

from sglang_fl.bisect.questions import Answer, Answers

TOKENS = (5, 6, 7)
SECOND = 9


def answer(label: str = "prompt 1", gap: float = 1.0, shift: float = 0.0) -> Answer:
    """Three tokens; ``SECOND`` is the runner-up of each, less likely by ``gap``; all values moved by ``shift``."""
    given = tuple(-2.0 + shift for _ in TOKENS)
    candidates = tuple({token: -2.0 + shift, SECOND: -2.0 - gap + shift} for token in TOKENS)
    return Answer(label, TOKENS, (1, 2, 3), (-3.0 + shift, -4.0 + shift), given, candidates)


def reading(of: Answer, shift: float = 0.0) -> Answer:
    """The same sequence read as a prompt."""
    values = tuple(value + shift for value in (*of.prompt, *of.given))
    return Answer("prompt 1 with native's answer", (8,), (1, 2, 3, *TOKENS), values, (values[-1],), ({8: values[-1]},))


def answers(one: Answer, batched: Answer | None = None, read_shift: float = 0.0) -> Answers:
    """One prompt, three times."""
    return Answers((one,), (batched or one,), (reading(one, read_shift),))
