"""What each operator's result must be, in float64, and how far from it a right implementation can be.

With ``u`` the unit roundoff of the result's dtype (half its epsilon) and ``v`` that of float32 (2**-24), an
implementation that computes in float32 and rounds once, at the end, is off by at most ``u |y|``, its last rounding,
and by what float32 loses inside: ``v`` times a count of operations times the size of the terms that were added, where a
sum of n terms in any order counts n (Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, 4.2). An
implementation that rounds ``roundings`` times more on the way, as SGLang's native methods do for some operators, is
off by ``u`` times the size of the terms for each of them. Results smaller than the least normal number of their dtype
are rounded to a multiple of its least subnormal number, which is added to every bound.

A function here takes what the operator takes, by its signature in :mod:`sglang_fl.dispatch.ops`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

# Elementary functions of fast-math device code lose more than one unit: CUDA's guide gives __expf an error of
# 2 + floor(1.173 |x|) units, 20 for the arguments used here.
_ELEMENTARY = 32
# Greatest slopes of silu (1.0998) and gelu (1.1290).
_GREATEST_SLOPE = 1.13


@dataclass(frozen=True)
class Expected:
    """One result.

    Attributes:
        name: such as "normed".
        value: float64; for ids the integers.
        bound: greatest right error, element by element; 0 for what must be equal.
        dtype: dtype of the result.
    """

    name: str
    value: torch.Tensor
    bound: torch.Tensor
    dtype: torch.dtype


def unit_roundoff(dtype: torch.dtype) -> float:
    """Greatest relative error of rounding to ``dtype``: 2**-8 for bfloat16, 2**-11 for float16, 2**-24 for float32."""
    return float(torch.finfo(dtype).eps) / 2


_FLOAT32 = unit_roundoff(torch.float32)


def _expected(
    name: str, value: torch.Tensor, dtype: torch.dtype, inside: torch.Tensor, terms: torch.Tensor | None = None
) -> Expected:
    # ``terms``: what further roundings to dtype apply to, already times their number.
    info = torch.finfo(dtype)
    last = unit_roundoff(dtype) * (value.abs() if terms is None else value.abs() + terms)
    slack = 1 + 8 * unit_roundoff(dtype)  # second order: roundings of what was already rounded
    return Expected(name, value, last * slack + inside + float(info.tiny) * float(info.eps), dtype)


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.float64)


def _gated(x: torch.Tensor, activate: Callable[[torch.Tensor], torch.Tensor], roundings: int) -> list[Expected]:
    # The float32 loss is bounded by the size of gate and up: gelu subtracts nearly equal numbers for negative gates.
    gate, up = _double(x).chunk(2, -1)
    value = activate(gate) * up
    return [_expected("result", value, x.dtype, _ELEMENTARY * _FLOAT32 * (gate * up).abs(), roundings * value.abs())]


def _silu(gate: torch.Tensor) -> torch.Tensor:
    return gate / (1 + torch.exp(-gate))


def _gelu(gate: torch.Tensor) -> torch.Tensor:
    return gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2)))


def _gelu_tanh(gate: torch.Tensor) -> torch.Tensor:
    return 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))


def silu_and_mul(obj: Any, x: torch.Tensor, *, roundings: int) -> list[Expected]:
    """``silu(gate) * up``; a further rounding may be that of silu."""
    return _gated(x, _silu, roundings)


def gelu_and_mul(obj: Any, x: torch.Tensor, *, roundings: int) -> list[Expected]:
    """``gelu(gate) * up``; a further rounding may be that of gelu."""
    return _gated(x, _gelu_tanh if obj.approximate == "tanh" else _gelu, roundings)


def _norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float, roundings: int
) -> list[Expected]:
    total = _double(x) if residual is None else _double(x) + _double(residual)
    value = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + epsilon) * weight
    # The mean of n squares loses n units, its root half of that, the five other steps one each.
    inside = (total.shape[-1] / 2 + 8) * _FLOAT32 * value.abs()
    normed = _expected("normed", value, x.dtype, inside, roundings * value.abs())
    if residual is None:
        return [normed]
    return [normed, _expected("sum", total, x.dtype, _FLOAT32 * total.abs())]


def rms_norm(obj: Any, x: torch.Tensor, residual: torch.Tensor | None = None, *, roundings: int) -> list[Expected]:
    """The norm by its definition, and with residual the sum."""
    return _norm(x, residual, _double(obj.weight), obj.variance_epsilon, roundings)


def gemma_rms_norm(
    obj: Any, x: torch.Tensor, residual: torch.Tensor | None = None, *, roundings: int
) -> list[Expected]:
    """The norm with 1 + weight. A sum that is rounded before its norm is taken counts as two roundings.

    It changes the element itself by u, and the root of the mean square by at most u.
    """
    further = 0 if residual is None else roundings
    return _norm(x, residual, 1 + _double(obj.weight), obj.variance_epsilon, further)


def _rotated(
    name: str, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, roundings: int
) -> Expected:
    # x [T, heads, 2 pairs], cos and sin [T, pairs]. Further roundings: of cos and sin, and of the products.
    cos, sin = _double(cos).unsqueeze(1), _double(sin).unsqueeze(1)
    wide = _double(x)
    first, second = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)

    def joined(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.stack((one, other), -1).flatten(-2) if interleaved else torch.cat((one, other), -1)

    value = joined(first * cos - second * sin, second * cos + first * sin)
    terms = joined((first * cos).abs() + (second * sin).abs(), (second * cos).abs() + (first * sin).abs())
    return _expected(name, value, x.dtype, 4 * _FLOAT32 * terms, roundings * terms)


def rotary_embedding(
    obj: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor,
    rotary_interleaved: bool = False,
    inplace: bool = True,
    *,
    roundings: int,
) -> list[Expected]:
    """Both rotated by the angles that the cache holds for their positions."""
    rows = cos[position_ids.long()], sin[position_ids.long()]
    return [
        _rotated("query", query, *rows, rotary_interleaved, roundings),
        _rotated("key", key, *rows, rotary_interleaved, roundings),
    ]


def axis_of_pair(obj: Any) -> torch.Tensor:
    """Which position (0 time, 1 height, 2 width) turns each pair: [rotary_dim / 2] int64.

    Sources: SGLang's triton_mrope_fused for the two interleaved forms, Qwen2-VL's paper for the sections.
    """
    if obj.mrope_interleaved_glm and obj.mrope_interleaved:
        axes: torch.Tensor = obj.axis_map.cpu()
        return axes
    pairs = range(obj.rotary_dim // 2)
    if obj.mrope_interleaved:
        section = obj.mrope_section
        return torch.tensor([pair % 3 if pair % 3 and pair < 3 * section[pair % 3] else 0 for pair in pairs])
    return torch.tensor([axis for axis, count in enumerate(obj.mrope_section) for _ in range(count)])


def mrotary_embedding(
    obj: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *, roundings: int
) -> list[Expected]:
    """Every pair rotated by the angle of its axis' position; what lies behind rotary_dim is unchanged."""
    tokens, pairs = positions.shape[-1], obj.rotary_dim // 2
    each = positions.long().expand(3, tokens)
    axes = axis_of_pair(obj).to(positions.device) if positions.ndim == 2 else each.new_zeros(pairs)
    position = each[axes].t()  # [T, pairs]
    columns = torch.arange(pairs, device=positions.device).expand(tokens, pairs)
    cos, sin = obj.cos_sin_cache[position, columns], obj.cos_sin_cache[position, columns + pairs]

    def whole(name: str, x: torch.Tensor) -> Expected:
        heads = x.reshape(tokens, x.shape[1] // obj.head_size, obj.head_size)
        turned = _rotated(name, heads[..., : obj.rotary_dim], cos, sin, not obj.is_neox_style, roundings)
        kept = _double(heads[..., obj.rotary_dim :])
        value = torch.cat((turned.value, kept), -1).reshape(x.shape)
        bound = torch.cat((turned.bound, torch.zeros_like(kept)), -1).reshape(x.shape)
        return Expected(name, value, bound, x.dtype)

    return [whole("query", query), whole("key", key)]


def topk(
    obj: Any,
    router_logits: torch.Tensor,
    top_k: int,
    *,
    renormalize: bool = True,
    scoring_func: str = "softmax",
    correction_bias: torch.Tensor | None = None,
    num_expert_group: int | None = None,
    topk_group: int | None = None,
    routed_scaling_factor: float | None = None,
    roundings: int,
) -> list[Expected]:
    """Weights and ids in the order of the ids: SGLang's native functions give them in no order."""
    logits = _double(router_logits)
    scores = logits.softmax(-1) if scoring_func == "softmax" else logits.sigmoid()
    choice = scores if correction_bias is None else scores + _double(correction_bias)
    if num_expert_group is not None and topk_group is not None:
        grouped = choice.unflatten(-1, (num_expert_group, logits.shape[1] // num_expert_group))  # type: ignore[no-untyped-call]
        best = grouped.sort(-1, descending=True)[0]
        of_group = best[..., 0] if correction_bias is None else best[..., :2].sum(-1)
        worst_kept = of_group.sort(-1, descending=True)[0][..., topk_group - 1 : topk_group]
        choice = grouped.masked_fill((of_group < worst_kept).unsqueeze(-1), -math.inf).flatten(-2)
    ids = choice.sort(-1, descending=True)[1][:, :top_k].sort(-1)[0]
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * (1.0 if routed_scaling_factor is None else routed_scaling_factor)
    # Two elementary functions at most, the sums of the softmax and of the renormalization.
    inside = (logits.shape[1] + top_k + 2 * _ELEMENTARY) * _FLOAT32 * weights.abs()
    return [
        _expected("weights", weights, torch.float32, inside, roundings * weights.abs()),
        Expected("ids", ids, torch.zeros_like(ids), torch.int32),
    ]


_MOE_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": _silu, "gelu": _gelu_tanh}


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
    roundings: int,
) -> list[Expected]:
    """Every expert of every token by its definition; the bound follows each rounding through the expert.

    ``roundings`` is how often each of the expert's four steps (input or its weighting, first product, gate, second
    product) may be rounded to the dtype.
    """
    dtype, unit = hidden_states.dtype, unit_roundoff(hidden_states.dtype)
    present = (topk_ids >= 0).unsqueeze(-1)
    ids = topk_ids.clamp(min=0).long()
    weights = _double(topk_weights.masked_fill(topk_ids < 0, 0.0)).unsqueeze(-1)
    x = _double(hidden_states).unsqueeze(1).expand(-1, ids.shape[1], -1)
    x_error = torch.zeros_like(x)
    if apply_router_weight_on_input:
        x, weights = x * weights, torch.ones_like(weights)
        x_error = roundings * unit * x.abs()

    def product(
        matrix: torch.Tensor, bias: torch.Tensor | None, inputs: torch.Tensor, errors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = _double(matrix)[ids]
        offset = torch.zeros_like(chosen[..., 0]) if bias is None else _double(bias)[ids]
        value = torch.einsum("tkoi,tki->tko", chosen, inputs) + offset
        size = torch.einsum("tkoi,tki->tko", chosen.abs(), inputs.abs()) + offset.abs()
        # With a bias, the product before it may be rounded too.
        rounded = value.abs() if bias is None else value.abs() + (value - offset).abs()
        carried = torch.einsum("tkoi,tki->tko", chosen.abs(), errors)
        return value, carried + roundings * unit * rounded + (inputs.shape[-1] + 1) * _FLOAT32 * size

    gate_up, gate_up_error = product(w13, w13_bias, x, x_error)
    (gate, up), (gate_error, up_error) = gate_up.chunk(2, -1), gate_up_error.chunk(2, -1)
    active = _MOE_ACTIVATIONS[activation](gate)
    active_error = _GREATEST_SLOPE * gate_error + roundings * unit * active.abs() + _ELEMENTARY * _FLOAT32 * gate.abs()
    inner = active * up
    inner_error = active_error * (up.abs() + up_error) + active.abs() * up_error + roundings * unit * inner.abs()
    out, out_error = product(w2, w2_bias, inner, inner_error)
    scale = 1.0 if routed_scaling_factor is None else routed_scaling_factor
    value = scale * (out * weights).masked_fill(~present, 0.0).sum(1)
    # The weighting of each expert's result and the sum over experts, in float32 or rounded as the steps before.
    size = (out.abs() * weights.abs()).masked_fill(~present, 0.0).sum(1)
    carried = (out_error * weights.abs()).masked_fill(~present, 0.0).sum(1)
    inside = abs(scale) * (carried + (ids.shape[1] + 2) * _FLOAT32 * size)
    return [_expected("result", value, dtype, inside, None)]


FORMULAS: Mapping[str, Callable[..., list[Expected]]] = {
    "silu_and_mul": silu_and_mul,
    "gelu_and_mul": gelu_and_mul,
    "rms_norm": rms_norm,
    "gemma_rms_norm": gemma_rms_norm,
    "rotary_embedding": rotary_embedding,
    "mrotary_embedding": mrotary_embedding,
    "topk": topk,
    "fused_moe": fused_moe,
}

NATIVE_ROUNDINGS: Mapping[str, int] = {
    "silu_and_mul": 1,
    "gelu_and_mul": 1,
    "rms_norm": 0,
    "gemma_rms_norm": 2,
    "rotary_embedding": 2,
    "mrotary_embedding": 2,
    "topk": 0,
    "fused_moe": 1,
}
"""Further roundings of SGLang 0.5.11's forward_native, read from its source; 0 asks for float32 all the way."""
