"""Mixture of experts in plain PyTorch: one form that counts on the host, for the CPU, and one that a graph can hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from sglang_fl.dispatch.types import NotSupportedError

# Weights are gathered per block of tokens; so many bytes of them at a time bound the memory that this takes.
_GATHERED_WEIGHT_BYTES = 256 * 1024**2
_LARGEST_BLOCK = 256


def _gelu_tanh(gate: torch.Tensor) -> torch.Tensor:
    return functional.gelu(gate, approximate="tanh")


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": functional.silu, "gelu": _gelu_tanh}


@dataclass(frozen=True)
class _Experts:
    """What every expert does with its tokens."""

    w13: torch.Tensor
    w2: torch.Tensor
    w13_bias: torch.Tensor | None
    w2_bias: torch.Tensor | None
    activation: Callable[[torch.Tensor], torch.Tensor]

    def one(self, tokens: torch.Tensor, expert: int) -> torch.Tensor:
        """Expert number ``expert`` of tokens [n, hidden]."""
        gate_up = functional.linear(tokens, self.w13[expert])
        if self.w13_bias is not None:
            gate_up.add_(self.w13_bias[expert])
        gate, up = gate_up.chunk(2, -1)
        out = functional.linear(self.activation(gate).mul_(up), self.w2[expert])
        return out if self.w2_bias is None else out.add_(self.w2_bias[expert])

    def blocks(self, tokens: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Block b of tokens [blocks, block, hidden] by the expert whose number experts [blocks] holds."""
        gate_up = torch.bmm(tokens, self.w13[experts].transpose(1, 2))
        if self.w13_bias is not None:
            gate_up.add_(self.w13_bias[experts].unsqueeze(1))
        gate, up = gate_up.chunk(2, -1)
        out = torch.bmm(self.activation(gate).mul_(up), self.w2[experts].transpose(1, 2))
        return out if self.w2_bias is None else out.add_(self.w2_bias[experts].unsqueeze(1))


def _by_counting(experts: _Experts, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    # As SGLang's moe_forward_native: sorted by expert, one matrix product for each expert that has tokens.
    flat = ids.reshape(-1)
    order = flat.argsort()
    elsewhere, *counts = torch.bincount(flat + 1, minlength=experts.w13.shape[0] + 1).tolist()
    tokens = x.index_select(0, order // ids.shape[1])
    outputs = [tokens.new_zeros(elsewhere, x.shape[1])] if elsewhere else []
    start = elsewhere
    for expert, count in enumerate(counts):
        if count:
            outputs.append(experts.one(tokens[start : start + count], expert))
            start += count
    if not outputs:
        return tokens
    return torch.empty_like(tokens).index_copy_(0, order, torch.cat(outputs))


def _by_blocks(experts: _Experts, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    # Every shape follows from shapes, never from values: each expert's tokens are padded to whole blocks, and the
    # number of blocks is the most that any routing can need. The last row stands for the experts of other ranks.
    flat = ids.reshape(-1).to(torch.int64)
    pairs, number = flat.numel(), experts.w13.shape[0]
    if not pairs:
        return x.new_empty(0, x.shape[1])
    block = min(_LARGEST_BLOCK, 1 << (-(-pairs // number) - 1).bit_length())
    block_count = pairs // block + min(number, pairs)
    elsewhere = block_count * block

    counts = flat.new_zeros(number + 1).scatter_add_(0, flat + 1, torch.ones_like(flat))
    blocks_needed = (counts[1:] + (block - 1)) // block
    block_ends = blocks_needed.cumsum(0)
    expert_of_block = torch.searchsorted(block_ends, torch.arange(block_count, device=x.device), right=True)
    expert_of_block.clamp_(max=number - 1)

    sorted_ids, order = flat.sort(stable=True)
    first_slots = functional.pad((block_ends - blocks_needed) * block, (1, 0))
    first_pairs = counts.cumsum(0) - counts
    rank = torch.arange(pairs, device=x.device) - first_pairs[sorted_ids + 1]
    slots = torch.where(sorted_ids < 0, elsewhere, first_slots[sorted_ids + 1] + rank)

    padded = x.new_zeros(elsewhere + 1, x.shape[1]).index_copy_(0, slots, x.index_select(0, order // ids.shape[1]))
    out = torch.zeros_like(padded)
    in_blocks = padded[:-1].view(block_count, block, x.shape[1])
    out_blocks = out[:-1].view(block_count, block, x.shape[1])
    bytes_each = experts.w13[0].numel() * experts.w13.element_size()
    step = max(1, _GATHERED_WEIGHT_BYTES // max(1, bytes_each))
    for start in range(0, block_count, step):
        some = slice(start, start + step)
        out_blocks[some] = experts.blocks(in_blocks[some], expert_of_block[some])
    return out.index_select(0, torch.empty_like(slots).index_copy_(0, order, slots))


def _check(
    hidden_states: torch.Tensor, topk_ids: torch.Tensor, activation: str, apply_router_weight_on_input: bool
) -> None:
    if activation not in _ACTIVATIONS:
        raise NotSupportedError(f"fused_moe: activation={activation!r}; the reference knows {', '.join(_ACTIVATIONS)}")
    if topk_ids.shape[0] != hidden_states.shape[0]:
        raise ValueError(f"fused_moe: {hidden_states.shape[0]} tokens, but topk_ids has {topk_ids.shape[0]} rows")
    if apply_router_weight_on_input and topk_ids.shape[1] != 1:
        raise ValueError(f"fused_moe: apply_router_weight_on_input with top_k={topk_ids.shape[1]}; it needs top_k=1")


def fused_moe(
    obj: Any,
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    routed_scaling_factor: float | None = None,
) -> torch.Tensor:
    """The weighted sum of each token's experts.

    Each expert's steps round to hidden_states' dtype, and the sum is taken in that of topk_weights, as in SGLang's
    moe_forward_native. On the CPU the tokens per expert are counted on the host; on other devices every shape follows
    from shapes alone, so that a graph can capture it, at the price of padding and of a copy of the weights in use.

    Args:
        obj: not used.
        hidden_states: [T, hidden], any floating dtype and strides; unchanged.
        w13: [experts, 2 * intermediate, hidden], gate before up.
        w2: [experts, hidden, intermediate].
        topk_weights: [T, top_k] float32.
        topk_ids: [T, top_k] int32 or int64; -1 is an expert of another rank and adds nothing, whatever its weight.
        activation: "silu" or "gelu" (tanh form), applied to the gate.
        apply_router_weight_on_input: the weight multiplies the token instead of the expert's result; top_k is 1.
        w13_bias: [experts, 2 * intermediate] or None.
        w2_bias: [experts, hidden] or None.
        routed_scaling_factor: multiplies the result; None for 1.

    Returns:
        [T, hidden] in hidden_states' dtype, a new tensor.

    Raises:
        NotSupportedError: another activation.
        ValueError: shapes that do not fit, or apply_router_weight_on_input with more than one expert per token.
    """
    _check(hidden_states, topk_ids, activation, apply_router_weight_on_input)
    dtype = hidden_states.dtype
    if apply_router_weight_on_input:
        hidden_states = (hidden_states * topk_weights).to(dtype)
    experts = _Experts(w13, w2, w13_bias, w2_bias, _ACTIVATIONS[activation])
    on_host = hidden_states.device.type == "cpu"
    results = (_by_counting if on_host else _by_blocks)(experts, hidden_states, topk_ids)
    weighted = results.view(*topk_ids.shape, hidden_states.shape[1]).to(topk_weights.dtype)
    if not apply_router_weight_on_input:
        weights = topk_weights.masked_fill(topk_ids < 0, 0.0)
        weighted = weighted.mul_(weights.unsqueeze(-1))
    total = weighted.sum(1)
    if routed_scaling_factor is not None:
        total.mul_(routed_scaling_factor)
    return total.to(dtype)
