"""The experts of each token on npu_moe_gating_top_k_softmax and npu_moe_gating_top_k."""

from __future__ import annotations

from typing import Any

import torch

from sglang_fl.dispatch.backends.vendor.ascend.kernels import functions
from sglang_fl.dispatch.types import NotSupportedError

_MOST_CHOSEN = 1024
# The only form that npu_moe_gating_top_k's page of version 7.0 promises: DeepSeek-V3's.
GROUPED_EXPERTS, GROUPS, GROUPS_CHOSEN, MOST_CHOSEN_GROUPED = 256, 8, 4, 32
_SIGMOID, _SUM_OF_TWO_BEST, _NORM_FIRST = 1, 1, 0


def topk_ascend(
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
        NotSupportedError: anything but softmax without bias and groups, and sigmoid with a bias over 256 experts in
            8 groups of which 4 are chosen, renormalized.
    """
    plain = scoring_func == "softmax" and correction_bias is None and (num_expert_group or 1) == 1
    if not plain:
        return _grouped(
            *(router_logits, top_k, renormalize, scoring_func, correction_bias, num_expert_group, topk_group),
            routed_scaling_factor,
        )
    if top_k > min(router_logits.shape[1], _MOST_CHOSEN):
        raise NotSupportedError(f"topk: {top_k} of {router_logits.shape[1]} experts; at most {_MOST_CHOSEN}")
    if not router_logits.shape[0]:
        return _empty(router_logits, top_k)
    weights, ids, _ = functions.npu_moe_gating_top_k_softmax(router_logits.float().contiguous(), k=top_k)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return (weights if routed_scaling_factor is None else weights * routed_scaling_factor), ids


def _empty(router_logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape, device = (router_logits.shape[0], top_k), router_logits.device
    return torch.empty(shape, dtype=torch.float32, device=device), torch.empty(shape, dtype=torch.int32, device=device)


def _grouped(
    router_logits: torch.Tensor,
    top_k: int,
    renormalize: bool,
    scoring_func: str,
    bias: torch.Tensor | None,
    groups: int | None,
    topk_group: int | None,
    factor: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    form = (scoring_func, router_logits.shape[1], groups, topk_group)
    if form != ("sigmoid", GROUPED_EXPERTS, GROUPS, GROUPS_CHOSEN) or bias is None or not renormalize:
        raise NotSupportedError(
            f"topk: {form[0]}, {form[1]} experts, {topk_group} of {groups} groups, "
            f"{'no' if bias is None else 'a'} bias, renormalize {renormalize}; npu_moe_gating_top_k is documented for "
            f"sigmoid with a bias, {GROUPED_EXPERTS} experts, {GROUPS_CHOSEN} of {GROUPS} groups, renormalized"
        )
    if top_k > MOST_CHOSEN_GROUPED:
        raise NotSupportedError(f"topk: {top_k}; npu_moe_gating_top_k chooses at most {MOST_CHOSEN_GROUPED}")
    if not router_logits.shape[0]:
        return _empty(router_logits, top_k)
    weights, ids, _ = functions.npu_moe_gating_top_k(
        router_logits.float(),
        top_k,
        bias=bias.float(),
        k_group=GROUPS_CHOSEN,
        group_count=GROUPS,
        group_select_mode=_SUM_OF_TWO_BEST,
        renorm=_NORM_FIRST,
        norm_type=_SIGMOID,
        routed_scaling_factor=1.0 if factor is None else float(factor),
    )
    return weights, ids
