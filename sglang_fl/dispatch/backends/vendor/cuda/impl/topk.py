"""The experts of each token on sgl_kernel's gates: softmax, sigmoid, and sigmoid with bias and groups."""

from __future__ import annotations

from typing import Any

import torch

from sglang_fl.dispatch.backends.vendor.cuda.impl.shapes import aligned
from sglang_fl.dispatch.backends.vendor.cuda.kernels import kernels
from sglang_fl.dispatch.types import NotSupportedError

# The gates keep a token in the registers of one warp for so many experts, a power of two; beyond, they go through
# memory and take every score below -1 for one that was chosen already.
_MOST_EXPERTS_OF_A_WARP = 512
# The limits that moe_fused_gate states for itself.
_LEAST_EXPERTS_OF_A_GROUP = 8
_MOST_EXPERTS_OF_A_GROUP = 32
_MOST_GROUPS = 32
_NO_SOFT_CAP = 0.0


def topk_cuda(
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [T, top_k] float32 and ids [T, top_k] int32.

    Raises:
        NotSupportedError: softmax with a bias (the kernel adds it before the softmax) or groups; sigmoid with a bias
            where experts are no power of two up to 512; groups without bias or renormalization, or without
            8 to 32 experts each.
    """
    groups = num_expert_group or 1
    if top_k > router_logits.shape[1]:
        raise NotSupportedError(f"topk: {top_k} of {router_logits.shape[1]} experts")
    if groups > 1:
        _check_groups(router_logits.shape[1], groups, scoring_func, correction_bias, renormalize)
        return _grouped(router_logits, top_k, groups, topk_group or 1, correction_bias, routed_scaling_factor)
    weights, ids = _empty(router_logits, top_k)
    if not ids.numel():
        return weights, ids
    if scoring_func == "softmax" and correction_bias is None:
        kernels.topk_softmax(weights, ids, aligned(router_logits), renormalize, _NO_SOFT_CAP, None)
    elif scoring_func == "sigmoid" and (correction_bias is None or _in_one_warp(router_logits.shape[1])):
        bias = None if correction_bias is None else correction_bias.float()
        kernels.topk_sigmoid(weights, ids, aligned(router_logits), renormalize, bias)
    else:
        raise NotSupportedError(
            f"topk: {scoring_func} with{'out' if correction_bias is None else ''} a bias over "
            f"{router_logits.shape[1]} experts; sgl_kernel is right for softmax without a bias, and for sigmoid, "
            f"with a bias for a power of two up to {_MOST_EXPERTS_OF_A_WARP}"
        )
    return (weights if routed_scaling_factor is None else weights.mul_(routed_scaling_factor)), ids


def _empty(router_logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape, device = (router_logits.shape[0], top_k), router_logits.device
    return torch.empty(shape, dtype=torch.float32, device=device), torch.empty(shape, dtype=torch.int32, device=device)


def _in_one_warp(experts: int) -> bool:
    return experts <= _MOST_EXPERTS_OF_A_WARP and experts & (experts - 1) == 0


def _grouped(
    router_logits: torch.Tensor,
    top_k: int,
    groups: int,
    topk_group: int,
    bias: torch.Tensor | None,
    factor: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if not router_logits.shape[0] or bias is None:
        return _empty(router_logits, top_k)
    logits = aligned(router_logits.float())
    weights, ids = kernels.moe_fused_gate(logits, bias.float(), groups, topk_group, top_k, 0, 1.0, False)
    return (weights if factor is None else weights.mul_(factor)), ids


def _check_groups(experts: int, groups: int, scoring_func: str, bias: torch.Tensor | None, renormalize: bool) -> None:
    right = (
        scoring_func == "sigmoid"
        and bias is not None
        and renormalize
        and experts & (experts - 1) == 0
        and experts % groups == 0
        and groups <= _MOST_GROUPS
        and _LEAST_EXPERTS_OF_A_GROUP <= experts // groups <= _MOST_EXPERTS_OF_A_GROUP
    )
    if not right:
        raise NotSupportedError(
            f"topk: {scoring_func}, {experts} experts in {groups} groups with{'out' if bias is None else ''} a bias, "
            f"renormalize {renormalize}; sgl_kernel's moe_fused_gate is sigmoid with a bias, renormalized, over a "
            f"power of two of experts, {_LEAST_EXPERTS_OF_A_GROUP} to {_MOST_EXPERTS_OF_A_GROUP} a group"
        )
