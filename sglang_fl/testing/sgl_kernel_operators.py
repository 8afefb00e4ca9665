"""sgl_kernel's registered operators, by their schemas, on the CPU: for tests of how the NVIDIA backend calls them.

``python -m sglang_fl.testing.sgl_kernel_operators OPERATOR`` registers them, runs the operator's cases and prints as
JSON how many ran, which were refused and what was wrong. A process of its own, because PyTorch's registry is one for
the process. The schemas are those of sglang-kernel 0.4.2 (sm90/common_ops.abi3.so); an operator here refuses what the
CUDA source excludes or would read wrongly, and computes in float32. It proves that calls are well formed and say what
they mean; what the GPU computes, the tests marked gpu prove.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional

from sglang_fl.dispatch.backends.vendor.cuda import register_ops
from sglang_fl.dispatch.registry import OpRegistry
from sglang_fl.dispatch.rules import refusal_of_call
from sglang_fl.dispatch.types import NotSupportedError
from sglang_fl.testing.operator_cases import cases
from sglang_fl.testing.operator_checks import problems

SCHEMAS = (
    "silu_and_mul(Tensor! out, Tensor input) -> ()",
    "gelu_tanh_and_mul(Tensor! out, Tensor input) -> ()",
    "gelu_and_mul(Tensor! out, Tensor input) -> ()",
    "rmsnorm(Tensor! output, Tensor input, Tensor weight, float eps, bool enable_pdl) -> ()",
    "gemma_rmsnorm(Tensor! output, Tensor input, Tensor weight, float eps, bool enable_pdl) -> ()",
    "fused_add_rmsnorm(Tensor! input, Tensor! residual, Tensor weight, float eps, bool enable_pdl) -> ()",
    "gemma_fused_add_rmsnorm(Tensor! input, Tensor! residual, Tensor weight, float eps, bool enable_pdl) -> ()",
    "rotary_embedding(Tensor positions, Tensor! query, Tensor!? key, int head_size, Tensor cos_sin_cache, "
    "bool is_neox) -> ()",
    "topk_softmax(Tensor! topk_weights, Tensor! topk_indices, Tensor gating_output, bool renormalize, "
    "float moe_softcapping, Tensor? correction_bias) -> ()",
    "topk_sigmoid(Tensor! topk_weights, Tensor! topk_indices, Tensor gating_output, bool renormalize, "
    "Tensor? correction_bias) -> ()",
    "moe_fused_gate(Tensor input, Tensor bias, int num_expert_group, int topk_group, int topk, "
    "int num_fused_shared_experts, float routed_scaling_factor, bool apply_routed_scaling_factor_on_output) "
    "-> Tensor[]",
)
_VECTOR_BYTES = 16
_NORM_DTYPES = (torch.bfloat16, torch.float16)


class WrongCallError(ValueError):
    """The kernel would refuse this call, or read or write the wrong memory."""


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise WrongCallError(what)


def _vectors(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        _require(tensor.numel() > 0, "a launch without blocks")
        _require(tensor.data_ptr() % _VECTOR_BYTES == 0, "a tensor that does not begin at a multiple of 16 bytes")


def _contiguous(*tensors: torch.Tensor) -> None:
    _require(all(tensor.is_contiguous() for tensor in tensors), "a tensor that is not contiguous")
    _vectors(*tensors)


def _gated(activate: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    def kernel(out: torch.Tensor, input: torch.Tensor) -> None:
        _contiguous(out, input)
        _require(out.shape[-1] * 2 == input.shape[-1] and out.dtype == input.dtype, "out is not half of input")
        _require(out.shape[-1] * out.element_size() % _VECTOR_BYTES == 0, "half a row is no multiple of 16 bytes")
        gate, up = input.float().chunk(2, -1)
        out.copy_(activate(gate) * up)

    return kernel


def _norm(offset: int) -> Callable[..., None]:
    def kernel(output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, eps: float, enable_pdl: bool) -> None:
        _vectors(output, input, weight)
        _require(input.dim() == output.dim() == 2 and weight.dim() == 1, "rows and a weight of one dimension")
        _require(input.stride(1) == output.stride(1) == 1, "a last dimension that is not contiguous")
        step_bytes = input.stride(0) * input.element_size() if input.shape[0] > 1 else 0
        _require(input.is_contiguous() or step_bytes % _VECTOR_BYTES == 0, "rows that are not aligned")
        _require(input.dtype == output.dtype == weight.dtype, "the weight is read in the input's dtype")
        _require(input.dtype in _NORM_DTYPES, "sgl_kernel's norms are not compiled for float32")
        wide = input.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        output.copy_(wide * scale * (weight.float() + offset))

    return kernel


def _add_norm(offset: int) -> Callable[..., None]:
    def kernel(input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, pdl: bool) -> None:
        _contiguous(input, residual)
        _require(input.dim() == residual.dim() == 2, "input and residual have two dimensions")
        _require(input.dtype == residual.dtype == weight.dtype, "input, residual and weight differ in dtype")
        total = input.float() + residual.float()
        _require(input.dtype in _NORM_DTYPES, "sgl_kernel's norms are not compiled for float32")
        scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps)
        residual.copy_(total)
        input.copy_(total * scale * (weight.float() + offset))

    return kernel


def _rotary(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    _require(positions.dtype == torch.int64 and positions.dim() == 1, "positions are not int64 of one dimension")
    _require(query.dtype == key.dtype == cos_sin_cache.dtype, "the cache is read in the query's dtype")
    _require(query.stride(-2) == key.stride(-2), "one stride between heads is used for query and key")
    _require(query.stride(-1) == key.stride(-1) == 1 and cos_sin_cache.is_contiguous(), "a strided last dimension")
    _require(query.shape[-1] == key.shape[-1] == head_size and query.shape[1] % key.shape[1] == 0, "heads do not fit")
    cos, sin = (table.unsqueeze(1) for table in cos_sin_cache[positions].chunk(2, -1))
    for x in (query, key):
        first, second = x.chunk(2, -1) if is_neox else (x[..., ::2], x[..., 1::2])
        turned = (first * cos - second * sin, second * cos + first * sin)
        x.copy_(torch.cat(turned, -1) if is_neox else torch.stack(turned, -1).flatten(-2))


def _write_topk(
    weights: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor, choice: torch.Tensor, renormalize: bool
) -> None:
    _require(weights.dtype == torch.float32 and ids.dtype == torch.int32, "weights float32, ids int32")
    chosen = choice.topk(ids.shape[1], -1)[1]
    values = scores.gather(-1, chosen)
    weights.copy_(values / values.sum(-1, keepdim=True) if renormalize else values)
    ids.copy_(chosen)


def _softmax(weights: Any, ids: Any, gating: torch.Tensor, renormalize: bool, cap: float, bias: Any) -> None:
    _contiguous(gating)
    _require(cap == 0.0, "a soft cap is another function")
    scores = torch.softmax(gating.float() if bias is None else gating.float() + bias, -1)
    _write_topk(weights, ids, scores, scores, renormalize)


def _sigmoid(weights: Any, ids: Any, gating: torch.Tensor, renormalize: bool, bias: torch.Tensor | None) -> None:
    _contiguous(gating)
    experts = gating.shape[1]
    _require(bias is None or bias.dtype == torch.float32, "the bias is not float32")
    _require(bias is None or (experts <= 512 and experts & (experts - 1) == 0), "a bias through memory")
    scores = torch.sigmoid(gating.float())
    _write_topk(weights, ids, scores, scores if bias is None else scores + bias, renormalize)


def _fused_gate(
    input: torch.Tensor, bias: torch.Tensor, groups: int, topk_group: int, k: int, shared: int, factor: float, on: bool
) -> list[torch.Tensor]:
    _contiguous(input, bias)
    _require(input.dtype == bias.dtype == torch.float32, "the bias is read, and scores are kept, in the input's dtype")
    experts = input.shape[1]
    _require(experts & (experts - 1) == 0 and experts % groups == 0, "experts are no power of two, or not in groups")
    _require(8 <= experts // groups <= 32 and shared == 0 and not on, "8 to 32 experts a group, none shared")
    scores = torch.sigmoid(input)
    choice = scores + bias
    best = choice.view(len(input), groups, -1).topk(2, -1)[0].sum(-1).topk(topk_group, -1)[1]
    kept = torch.zeros(len(input), groups, dtype=torch.bool).scatter_(1, best, True)
    choice = choice.masked_fill(~kept.repeat_interleave(experts // groups, -1), -torch.inf)
    weights, ids = torch.empty(len(input), k), torch.empty(len(input), k, dtype=torch.int32)
    _write_topk(weights, ids, scores, choice, True)
    return [weights, ids]


_KERNELS: dict[str, Callable[..., Any]] = {
    "silu_and_mul": _gated(functional.silu),
    "gelu_tanh_and_mul": _gated(lambda gate: functional.gelu(gate, approximate="tanh")),
    "gelu_and_mul": _gated(functional.gelu),
    "rmsnorm": _norm(0),
    "gemma_rmsnorm": _norm(1),
    "fused_add_rmsnorm": _add_norm(0),
    "gemma_fused_add_rmsnorm": _add_norm(1),
    "rotary_embedding": _rotary,
    "topk_softmax": _softmax,
    "topk_sigmoid": _sigmoid,
    "moe_fused_gate": _fused_gate,
}


def register() -> Any:
    """Register the operators, and make ``import sgl_kernel`` work; the library keeps them registered."""
    library: Any = torch.library.Library("sgl_kernel", "DEF")  # type: ignore[no-untyped-call]
    for schema in SCHEMAS:
        library.define(schema)
    for name, kernel in _KERNELS.items():
        library.impl(name, kernel, "CPU")
    utils = ModuleType("sgl_kernel.utils")
    vars(utils)["is_arch_support_pdl"] = lambda: True
    sys.modules.update({"sgl_kernel": ModuleType("sgl_kernel"), "sgl_kernel.utils": utils})
    return library


def run(op_name: str) -> dict[str, Any]:
    """The cases of an operator: how many ran, which were refused, what was wrong."""
    registry = OpRegistry()
    register_ops.register_builtins(registry)
    impl = registry.implementations(op_name)[0]
    ran, refused, found = 0, [], []
    for case in cases(op_name):
        call = case.build(torch.device("cpu"))
        if refusal_of_call(impl, (call.obj, *call.args), call.kwargs):
            refused.append(str(case))
            continue
        try:
            found += problems(case, impl.fn, roundings=0)
        except NotSupportedError:
            refused.append(str(case))
        else:
            ran += 1
    return {"ran": ran, "refused": refused, "problems": found}


if __name__ == "__main__":
    kept = register()
    sys.stdout.write(json.dumps(run(sys.argv[1])) + "\n")
