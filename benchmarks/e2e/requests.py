"""What is asked of a server: timed decode and prefill, and greedy tokens with their logits."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.e2e.tokens import Answer
from sglang_fl.testing.server import Server, ServerError

PROMPT_TOKENS = 64
TOP_LOGITS = 8
LIMIT_S = 180.0
WARM_UP_STEPS = 8
# Below 1, sampling by PyTorch sorts, sums and masks instead of drawing at once.
TOP_P = 0.9
FIRST_ID = 10  # below are special tokens
GPU_DECODE = "gpu decode"
# With which words the timed rows begin.
ROWS = ("decode", "sampled decode", "prefill", GPU_DECODE)


@dataclass(frozen=True)
class Sizes:
    """How much is asked.

    Attributes:
        batches: of decode, by the request's time and by the GPU's.
        rows: which of ROWS.
    """

    vocabulary: int
    batches: tuple[int, ...] = (1, 8, 32)
    sampled_batches: tuple[int, ...] = (8, 32)
    steps: int = 128
    prefill_tokens: int = 4096
    prompts: int = 4
    rows: tuple[str, ...] = ROWS

    @classmethod
    def for_cpu(cls, vocabulary: int, rows: tuple[str, ...] = ROWS) -> Sizes:
        """Little, to show that it works; no times of interest."""
        return cls(vocabulary, (1, 2), (2,), steps=32, prefill_tokens=256, prompts=2, rows=rows)


@dataclass(frozen=True)
class Workload:
    """One row: prompts that are asked for at once; without steps a prefill.

    Attributes:
        name: of the row, {} where the configuration's name goes.
        prompts: token ids.
        steps: decode steps that are timed.
        temperature: 0 is greedy.
        top_p: sampled are the likeliest tokens of this probability together.
    """

    name: str
    prompts: list[list[int]]
    steps: int = 0
    temperature: float = 0.0
    top_p: float = 1.0

    def sample(self, server: Server, tries: int = 1) -> float:
        """Milliseconds of a decode step or of a prefill, by the clock of whoever asks.

        Each request is made ``tries`` times, of which the fastest counts: what else the host does can only slow one
        down.
        """
        first = self._fastest(server, 1, tries)
        return (self._fastest(server, self.steps + 1, tries) - first) / self.steps if self.steps else first

    def warm_up(self, server: Server) -> None:
        """Once, some steps of it."""
        self._ask(server, min(self.steps, WARM_UP_STEPS) + 1)

    def _fastest(self, server: Server, new_tokens: int, tries: int) -> float:
        return min(self._ask(server, new_tokens) for _ in range(tries))

    def _ask(self, server: Server, new_tokens: int) -> float:
        start = time.perf_counter()
        replies = ask(server, self.prompts, new_tokens, self.temperature, self.top_p)
        elapsed_ms = (time.perf_counter() - start) * 1e3
        found = [len(reply["output_ids"]) for reply in replies]
        if found != [new_tokens] * len(self.prompts):
            raise ServerError(
                f"{self.name}: {len(self.prompts)} times {new_tokens} tokens were asked for, {found} came"
            )
        return elapsed_ms


def workloads(sizes: Sizes) -> Iterator[Workload]:
    """All rows of the request's time that are wanted."""
    return (each for each in _workloads(sizes) if each.name.startswith(sizes.rows))


def _workloads(sizes: Sizes) -> Iterator[Workload]:
    for batch in sizes.batches:
        yield Workload(f"decode {{}}, batch {batch}", make_prompts(sizes, batch, PROMPT_TOKENS), sizes.steps)
    for batch in sizes.sampled_batches:
        prompts = make_prompts(sizes, batch, PROMPT_TOKENS)
        yield Workload(f"sampled decode {{}}, batch {batch}", prompts, sizes.steps, 1.0)
        yield Workload(f"sampled decode {{}}, batch {batch}, top-p {TOP_P:g}", prompts, sizes.steps, 1.0, TOP_P)
    count = sizes.prefill_tokens
    yield Workload(f"prefill {{}}, {count} tokens", make_prompts(sizes, 1, count))


def answers(server: Server, sizes: Sizes) -> list[Answer]:
    """Greedy tokens for some prompts, one after another so that each batch is the same in every run."""
    found = []
    for prompt in make_prompts(sizes, sizes.prompts, PROMPT_TOKENS):
        (reply,) = ask(server, [prompt], sizes.steps, 0.0, return_logprob=True, top_logprobs_num=TOP_LOGITS)
        tops = [{int(top[1]): float(top[0]) for top in step} for step in reply["meta_info"]["output_top_logprobs"]]
        found.append(Answer(tuple(reply["output_ids"]), tops))
    return found


def ask(
    server: Server, prompts: list[list[int]], new_tokens: int, temperature: float, top_p: float = 1.0, **more: Any
) -> list[Any]:
    """The replies of /generate to all prompts at once."""
    sampling = {"temperature": temperature, "top_p": top_p, "max_new_tokens": new_tokens, "ignore_eos": True}
    body = {"input_ids": prompts, "sampling_params": sampling, **more}
    replies: list[Any] = server.post("/generate", body, LIMIT_S)
    return replies


def make_prompts(sizes: Sizes, count: int, length: int) -> list[list[int]]:
    """Random token ids, the same in every run."""
    source = random.Random(f"{count} prompts of {length} tokens")
    return [[source.randrange(FIRST_ID, sizes.vocabulary) for _ in range(length)] for _ in range(count)]
