"""What every start is asked, and what its answers hold: greedy tokens and log probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Short and long, prose, code and Chinese: different numbers of tokens go through one forward.
PROMPTS = (
    "The capital of France is",
    "Water boils at",
    "列出前5个素数。",
    "def add(left, right):",
    "A machine learning model reads a text, one token after another, and answers with the token that it finds most "
    "likely. The model is split over several devices. Each device holds a part of every matrix, computes its part of "
    "the product, and then all of them add their parts together. That sum is called",
)
NEW_TOKENS = 24
CANDIDATES = 20

Post = Callable[[str, Mapping[str, Any]], Any]
"""POST to a path of the server, a JSON body; the reply's."""


class AnswerError(RuntimeError):
    """The server's reply is not what was asked for."""


@dataclass(frozen=True)
class Answer:
    """What a prompt gave.

    label: which prompt, asked how. tokens: greedy ids. prompt: natural logarithms of the probabilities of the
    prompt's tokens from the second on; given: those of ``tokens``. candidates: for each of ``tokens`` the
    CANDIDATES most likely ids with theirs.
    """

    label: str
    tokens: tuple[int, ...]
    prompt_tokens: tuple[int, ...]
    prompt: tuple[float, ...]
    given: tuple[float, ...]
    candidates: tuple[dict[int, float], ...]


@dataclass(frozen=True)
class Answers:
    """Of one start: each prompt ``alone``, all in one batch, and with ``forced`` answers as part of the prompt."""

    alone: tuple[Answer, ...]
    batched: tuple[Answer, ...]
    forced: tuple[Answer, ...]

    def all(self) -> tuple[Answer, ...]:
        """In the order in which they were asked."""
        return (*self.alone, *self.batched, *self.forced)


def ask(post: Post, prompts: Sequence[str], new_tokens: int, forced: Sequence[Sequence[int]] | None = None) -> Answers:
    """Ask a server everything.

    Args:
        post: reaches the server.
        prompts: texts.
        new_tokens: so many greedy tokens each.
        forced: token ids that are read as prompts, those of native's prompts and answers; None: of this server's own.

    Raises:
        AnswerError: a reply lacks what was asked for.
    """
    alone = tuple(
        _answer(f"prompt {number}", _generate(post, {"text": prompt}, new_tokens))
        for number, prompt in enumerate(prompts, 1)
    )
    replies = _generate(post, {"text": list(prompts)}, new_tokens)
    batched = tuple(_answer(f"prompt {number} in a batch", reply) for number, reply in enumerate(replies, 1))
    sequences = forced if forced is not None else sequences_of(alone)
    read = tuple(
        _answer(f"prompt {number} with native's answer", _generate(post, {"input_ids": list(ids)}, 1))
        for number, ids in enumerate(sequences, 1)
    )
    return Answers(alone, batched, read)


def sequences_of(alone: Sequence[Answer]) -> list[list[int]]:
    """Each prompt's ids and its answer's."""
    return [[*answer.prompt_tokens, *answer.tokens] for answer in alone]


def _generate(post: Post, prompt: Mapping[str, Any], new_tokens: int) -> Any:
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    options = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": CANDIDATES}
    return post("/generate", {**prompt, "sampling_params": sampling, **options})


def _answer(label: str, reply: Any) -> Answer:
    try:
        meta = reply["meta_info"]
        prompt = meta["input_token_logprobs"]
        given = meta["output_token_logprobs"]
        return Answer(
            label,
            tuple(reply["output_ids"]),
            tuple(entry[1] for entry in prompt),
            tuple(_number(entry[0]) for entry in prompt[1:]),
            tuple(_number(entry[0]) for entry in given),
            tuple({entry[1]: _number(entry[0]) for entry in top} for top in meta["output_top_logprobs"]),
        )
    except (KeyError, IndexError, TypeError) as error:
        raise AnswerError(f"{label}: the reply has no tokens with log probabilities: {str(reply)[:500]}") from error


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
