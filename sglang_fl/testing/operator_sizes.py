"""Calls of the operators with the shapes of a model: for tests at size, and for benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from sglang_fl.testing.operator_cases import MAX_POSITION, Call, cos_sin_cache

EXPERTS, TOP_K = 128, 8


@dataclass(frozen=True)
class Model:
    """What of a model's shape the operators see."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int


QWEN_0_5B = Model(896, 4864, 14, 2, 64)
QWEN_14B = Model(5120, 13824, 40, 8, 128)


@dataclass(frozen=True)
class Large:
    """The calls of a model, for some tokens."""

    tokens: int
    dtype: torch.dtype
    model: Model = QWEN_14B

    def rows(self, width: int) -> torch.Tensor:
        """Normal numbers [tokens, width], from the CPU: the same on every device."""
        return torch.randn(self.tokens, width, generator=torch.Generator().manual_seed(5)).to(self.dtype)

    def activation(self, device: torch.device) -> Call:
        """[tokens, 2 * intermediate]."""
        return Call(SimpleNamespace(approximate="tanh"), (self.rows(2 * self.model.intermediate).to(device),))

    def norm(self, device: torch.device) -> Call:
        """[tokens, hidden]."""
        call = self.norm_with_residual(device)
        return Call(call.obj, call.args[:1])

    def norm_with_residual(self, device: torch.device) -> Call:
        """[tokens, hidden] and a residual."""
        hidden = self.model.hidden
        weight = torch.randn(hidden, generator=torch.Generator().manual_seed(6)).to(self.dtype).to(device)
        obj = SimpleNamespace(weight=weight, variance_epsilon=1e-6)
        return Call(obj, (self.rows(hidden).to(device), self.rows(hidden).flip(1).to(device)), handed_over=(0, 1))

    def rotary(self, device: torch.device) -> Call:
        """Query and key in place, each a view of rows as wide as query, key and value together."""
        heads, kv_heads, size = self.model.heads, self.model.kv_heads, self.model.head_size
        width = heads + 2 * kv_heads
        query, key = (self.rows(width * size).to(device).view(self.tokens, width, size) for _ in range(2))
        cache = cos_sin_cache(size, torch.float32, device)
        positions = (torch.arange(self.tokens) * 7 % MAX_POSITION).to(device)
        obj = SimpleNamespace(cos_sin_cache=cache, head_size=size, rotary_dim=size, is_neox_style=True)
        return Call(
            obj,
            (query[:, :heads], key[:, heads : heads + kv_heads], *cache.chunk(2, -1), positions),
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
    "rms_norm": Large.norm_with_residual,
    "gemma_rms_norm": Large.norm_with_residual,
    "rotary_embedding": Large.rotary,
    "topk": Large.gate,
}
