"""Calls of the operators with the shapes of a model: for tests at size, and for benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from sglang_fl.testing.operator_cases import MAX_POSITION, Call, cos_sin_cache

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_SIZE, EXPERTS, TOP_K = 5120, 13824, 40, 8, 128, 128, 8


@dataclass(frozen=True)
class Large:
    """The calls of a model of 5120 hidden, 13824 intermediate, 40 and 8 heads of 128, for some tokens."""

    tokens: int
    dtype: torch.dtype

    def rows(self, width: int) -> torch.Tensor:
        """Normal numbers [tokens, width], from the CPU: the same on every device."""
        return torch.randn(self.tokens, width, generator=torch.Generator().manual_seed(5)).to(self.dtype)

    def activation(self, device: torch.device) -> Call:
        """[tokens, 2 * intermediate]."""
        return Call(SimpleNamespace(approximate="tanh"), (self.rows(2 * INTERMEDIATE).to(device),))

    def norm(self, device: torch.device) -> Call:
        """[tokens, hidden] and a residual."""
        weight = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(6)).to(self.dtype).to(device)
        obj = SimpleNamespace(weight=weight, variance_epsilon=1e-6)
        return Call(obj, (self.rows(HIDDEN).to(device), self.rows(HIDDEN).flip(1).to(device)), handed_over=(0, 1))

    def rotary(self, device: torch.device) -> Call:
        """Query and key in place, each a view of rows as wide as query, key and value together."""
        width = HEADS + 2 * KV_HEADS
        query, key = (self.rows(width * HEAD_SIZE).to(device).view(self.tokens, width, HEAD_SIZE) for _ in range(2))
        cache = cos_sin_cache(HEAD_SIZE, torch.float32, device)
        positions = (torch.arange(self.tokens) * 7 % MAX_POSITION).to(device)
        obj = SimpleNamespace(cos_sin_cache=cache, head_size=HEAD_SIZE, rotary_dim=HEAD_SIZE, is_neox_style=True)
        return Call(
            obj,
            (query[:, :HEADS], key[:, HEADS : HEADS + KV_HEADS], *cache.chunk(2, -1), positions),
            handed_over=(0, 1),
        )

    def gate(self, device: torch.device) -> Call:
        """Logits of 128 experts, float32: none are equal."""
        generator = torch.Generator().manual_seed(7)
        logits = torch.rand(self.tokens, EXPERTS, generator=generator).argsort(-1) / 16
        return Call(SimpleNamespace(), (logits.to(self.dtype).to(device), TOP_K))


LARGE: dict[str, Callable[[Large, torch.device], Call]] = {
    "silu_and_mul": Large.activation,
    "gelu_and_mul": Large.activation,
    "rms_norm": Large.norm,
    "gemma_rms_norm": Large.norm,
    "rotary_embedding": Large.rotary,
    "topk": Large.gate,
}
