"""A stand-in for torch_npu, for tests alone: it holds calls to the published documentation and computes on the CPU.

Each function has the documented signature (positional-only where releases name a parameter differently), refuses what
its page excludes, and returns the result by its page's formula: computed in float32, rounded once at the end, except
where the page says otherwise. Source: "Ascend Extension for PyTorch, custom APIs", hiascend.com, releases 6.0 to 7.3,
and for npu_mrope aclnnRopeWithSinCosCache of CANN 8.1 to 8.5. It proves that calls are well formed; what the chip
computes, it cannot prove.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

import torch

__sglang_fl_standin__ = True

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class DocumentedLimitError(ValueError):
    """The call is outside what the function's page allows."""


def _require(holds: bool, function: str, what: str) -> None:
    if not holds:
        raise DocumentedLimitError(f"{function}: {what}")


def _float_tensors(function: str, *tensors: torch.Tensor) -> None:
    for tensor in tensors:
        _require(tensor.dtype in _DTYPES, function, f"{tensor.dtype} is none of float16, bfloat16, float32")
        _require(tensor.numel() > 0, function, "an empty tensor")
        _require(tensor.is_contiguous(), function, "a tensor that is not contiguous")


def npu_swiglu(input: torch.Tensor, /, dim: int = -1) -> torch.Tensor:
    """``A * sigmoid(A) * B``, A the first half along dim. 1 to 8 dimensions, not strided, not empty."""
    _float_tensors("npu_swiglu", input)
    _require(input.shape[dim] % 2 == 0, "npu_swiglu", f"dimension {dim} of {input.shape[dim]} cannot be halved")
    first, second = input.float().chunk(2, dim)
    return (first * torch.sigmoid(first) * second).to(input.dtype)


def npu_geglu(
    self: torch.Tensor, /, dim: int = -1, approximate: int = 1, activate_left: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(A * Gelu(B), Gelu(B))``, with activate_left ``(Gelu(A) * B, Gelu(A))``; approximate 0 none, 1 tanh."""
    _float_tensors("npu_geglu", self)
    _require(approximate in (0, 1), "npu_geglu", f"approximate is {approximate}, not 0 or 1")
    left, right = self.float().chunk(2, dim)
    active, other = (left, right) if activate_left else (right, left)
    gelu = torch.nn.functional.gelu(active, approximate="tanh" if approximate else "none")
    return (gelu * other).to(self.dtype), gelu.to(self.dtype)


def _norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    reciprocal = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
    return x * reciprocal * gamma, reciprocal


def _check_norm(function: str, x: torch.Tensor, gamma: torch.Tensor) -> None:
    _float_tensors(function, x, gamma)
    _require(gamma.dtype == x.dtype, function, f"gamma is {gamma.dtype}, the input {x.dtype}")
    _require(gamma.shape == x.shape[-gamma.dim() :], function, f"gamma {tuple(gamma.shape)}, input {tuple(x.shape)}")


def npu_rms_norm(self: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-06) -> tuple[torch.Tensor, torch.Tensor]:
    """(the norm, the reciprocal of the root mean square); gamma in the input's dtype, as its last dimension."""
    _check_norm("npu_rms_norm", self, gamma)
    y, reciprocal = _norm(self.float(), gamma.float(), epsilon)
    return y.to(self.dtype), reciprocal


def npu_add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-06
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(norm of x1 + x2, the reciprocal of the root mean square, x1 + x2); x2 of x1's shape and dtype."""
    _check_norm("npu_add_rms_norm", x1, gamma)
    _float_tensors("npu_add_rms_norm", x2)
    _require(x1.shape == x2.shape and x1.dtype == x2.dtype, "npu_add_rms_norm", "x1 and x2 differ in shape or dtype")
    total = x1.float() + x2.float()
    y, reciprocal = _norm(total, gamma.float(), epsilon)
    return y.to(x1.dtype), reciprocal, total.to(x1.dtype)


def npu_gemma_rms_norm(
    self: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-06
) -> tuple[torch.Tensor, torch.Tensor]:
    """As npu_rms_norm with ``1 + gamma``."""
    _check_norm("npu_gemma_rms_norm", self, gamma)
    y, reciprocal = _norm(self.float(), 1 + gamma.float(), epsilon)
    return y.to(self.dtype), reciprocal


def _rotated_pairs(x: torch.Tensor, rotary_mode: str) -> torch.Tensor:
    if rotary_mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def npu_rotary_mul(
    input: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    /,
    rotary_mode: str = "half",
) -> torch.Tensor:
    """``r1 * input + r2 * rotate(input)`` for input BSND and r1, r2 1S1D, BS1D or BSND, from -1 to 1."""
    name = "npu_rotary_mul"
    _float_tensors(name, input, r1, r2)
    _require(rotary_mode in ("half", "interleave"), name, f"rotary_mode is {rotary_mode!r}")
    _require(input.dim() == r1.dim() == r2.dim() == 4, name, "input, r1 and r2 have four dimensions")
    batch, length, heads, width = input.shape
    _require(width < 896 and width % 2 == 0, name, f"a head size of {width} is not even or not below 896")
    _require(batch < 1000 and heads < 1000, name, f"{batch} by {heads} heads: each is below 1000")
    allowed = ((1, length, 1, width), (batch, length, 1, width), (batch, length, heads, width))
    _require(tuple(r1.shape) in allowed and r1.shape == r2.shape, name, f"r1 {tuple(r1.shape)}, r2 {tuple(r2.shape)}")
    _require(r1.dtype == r2.dtype == input.dtype, name, "input, r1 and r2 differ in dtype")
    _require(bool((r1.abs() <= 1).all() and (r2.abs() <= 1).all()), name, "r1 and r2 lie from -1 to 1")
    wide = input.float()
    return (r1.float() * wide + r2.float() * _rotated_pairs(wide, rotary_mode)).to(input.dtype)


def npu_mrope(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    head_size: int,
    *,
    mrope_section: Sequence[int] | None = None,
    rotary_mode: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and key [T, heads * head_size], rotated by rows of the cache, whose pairs are divided among three axes.

    Positions [T] go with sections of zeros, positions [3, T] with sections that fill half of the rotary dimension.
    """
    name = "npu_mrope"
    _float_tensors(name, query, key, cos_sin_cache)
    _require(query.dtype == key.dtype == cos_sin_cache.dtype, name, "query, key and cache differ in dtype")
    _require(query.dim() == key.dim() == 2, name, "query and key have two dimensions")
    _require(positions.dtype in (torch.int32, torch.int64), name, f"positions are {positions.dtype}")
    _require(positions.is_contiguous(), name, "positions that are not contiguous")
    _require(rotary_mode in ("half", "interleave"), name, f"rotary_mode is {rotary_mode!r}")
    sections = list(mrope_section or [])
    _require(len(sections) == 3, name, f"mrope_section is {mrope_section}")
    half = cos_sin_cache.shape[1] // 2
    cos, sin = cos_sin_cache.float()[positions].chunk(2, -1)
    if positions.dim() == 2:
        _require(positions.shape[0] == 3 and sum(sections) == half, name, f"sections {sections} for {half} pairs")
        cos, sin = (
            torch.cat([t[i] for i, t in enumerate(torch.split_with_sizes(x, sections, -1))], -1) for x in (cos, sin)
        )
    else:
        _require(sections == [0, 0, 0], name, f"sections {sections} with positions of one axis")
    rotary_dim = 2 * half
    out = []
    for x in (query, key):
        heads = x.float().view(x.shape[0], -1, head_size)
        turning = heads[..., :rotary_dim]
        wide = [
            (torch.cat((t, t), -1) if rotary_mode == "half" else t.repeat_interleave(2, -1)).unsqueeze(1)
            for t in (cos, sin)
        ]
        turned = turning * wide[0] + _rotated_pairs(turning, str(rotary_mode)) * wide[1]
        out.append(torch.cat((turned, heads[..., rotary_dim:]), -1).view(x.shape).to(x.dtype))
    return out[0], out[1]


def npu_moe_gating_top_k_softmax(
    x: torch.Tensor, finished: torch.Tensor | None = None, k: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(the k greatest of softmax(x) in x's dtype, their experts int32, row indices int32); k up to 1024."""
    name = "npu_moe_gating_top_k_softmax"
    _float_tensors(name, x)
    _require(x.dim() in (2, 3) and finished is None, name, "x has two or three dimensions")
    _require(0 < k <= min(x.shape[-1], 1024), name, f"k is {k} of {x.shape[-1]}")
    values, ids = torch.softmax(x.float(), -1).topk(k, -1)
    rows = torch.arange(ids.numel(), dtype=torch.int32).view(k, -1).t()
    return values.to(x.dtype), ids.to(torch.int32), rows


def npu_moe_gating_top_k(
    x: torch.Tensor,
    k: int,
    *,
    bias: torch.Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 1,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(weights in x's dtype, experts int32, empty): sigmoid, and the best experts of the best groups by their bias.

    Release 7.0: 256 experts, 4 of 8 groups, a bias, k up to 32; a group counts by the sum of its two best.
    """
    name = "npu_moe_gating_top_k"
    _float_tensors(name, x)
    _require(x.dim() == 2 and x.shape[1] == 256, name, f"x is {tuple(x.shape)}, not [rows, 256]")
    _require(1 <= k <= 32, name, f"k is {k}")
    _require(bias is not None and bias.shape == x.shape[1:] and bias.dtype == x.dtype, name, "bias is not as x's rows")
    _require((k_group, group_count) == (4, 8), name, f"{k_group} of {group_count} groups")
    _require((group_select_mode, renorm, norm_type, out_flag) == (1, 0, 1, False), name, "a mode that it has not")
    scores = torch.sigmoid(x.float())
    choice = scores + bias.float() if bias is not None else scores
    groups = choice.view(x.shape[0], group_count, -1).topk(2, -1)[0].sum(-1).topk(k_group, -1)[1]
    kept = torch.zeros(x.shape[0], group_count, dtype=torch.bool).scatter_(1, groups, True)
    choice = choice.masked_fill(~kept.repeat_interleave(x.shape[1] // group_count, -1), -torch.inf)
    ids = choice.topk(k, -1)[1]
    weights = scores.gather(-1, ids)
    weights = weights / (weights.sum(-1, keepdim=True) + eps) * routed_scaling_factor
    return weights.to(x.dtype), ids.to(torch.int32), x.new_empty(0)


@contextmanager
def installed() -> Iterator[ModuleType]:
    """``import torch_npu`` gives the stand-in, inside of the context."""
    before = sys.modules.get("torch_npu")
    module = sys.modules[__name__]
    sys.modules["torch_npu"] = module
    try:
        yield module
    finally:
        if before is None:
            del sys.modules["torch_npu"]
        else:
            sys.modules["torch_npu"] = before
