"""Choice of experts in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_fl.dispatch.types import NotSupportedError

_SCORING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
}


def _only_best_groups(
    scores: torch.Tensor, num_expert_group: int, topk_group: int, biased: bool, worst: float
) -> torch.Tensor:
    # As in SGLang's grouped_topk_gpu (a group counts as its best expert) and biased_grouped_topk_impl (as the sum of
    # its two best); the experts of the groups that were not chosen get the score ``worst``.
    tokens, experts = scores.shape
    grouped = scores.view(tokens, num_expert_group, experts // num_expert_group)
    group_scores = grouped.topk(2, -1)[0].sum(-1) if biased else grouped.amax(-1)
    chosen = group_scores.topk(topk_group, -1, sorted=False)[1]
    left_out = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, chosen, False)
    return grouped.masked_fill(left_out.unsqueeze(-1), worst).view(tokens, experts)


def _check_groups(experts: int, num_expert_group: int, topk_group: int | None, biased: bool) -> int:
    if topk_group is None or not 1 <= topk_group <= num_expert_group:
        raise ValueError(
            f"topk: num_expert_group={num_expert_group} with topk_group={topk_group}; topk_group must be 1 to "
            f"{num_expert_group}"
        )
    if experts % num_expert_group or (biased and experts // num_expert_group < 2):
        need = "groups of at least two experts" if biased else "groups of equal size"
        raise ValueError(f"topk: {experts} experts cannot be divided into {num_expert_group} groups; need {need}")
    return topk_group


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token, in the order in which SGLang's native functions give them.

    Sources: fused_topk_torch_native, grouped_topk_gpu and biased_grouped_topk_impl of SGLang's layers/moe/topk.py.
    Without groups and bias the experts come in falling order of weight; in the other cases in no order. Among equal
    scores torch.topk chooses; which one is not specified, and may differ between devices.

    Args:
        obj: not used.
        router_logits: [T, experts], any floating dtype and strides; unchanged. Scored in float32.
        top_k: experts per token.
        renormalize: weights of a token sum to one.
        scoring_func: "softmax" or "sigmoid".
        correction_bias: [experts], added to the scores for choosing only.
        num_expert_group: choose only from the best ``topk_group`` of so many groups; None: from all.
        topk_group: see num_expert_group.
        routed_scaling_factor: multiplies the weights, after renormalization; None for 1.

    Returns:
        Weights [T, top_k] float32 and ids [T, top_k] int32.

    Raises:
        NotSupportedError: another scoring_func.
        ValueError: groups that do not fit.
    """
    score = _SCORING.get(scoring_func)
    if score is None:
        raise NotSupportedError(f"topk: scoring_func={scoring_func!r}; the reference knows {', '.join(_SCORING)}")
    scores = score(router_logits.float())
    biased = correction_bias is not None
    choice = scores if correction_bias is None else scores + correction_bias
    if num_expert_group is not None:
        kept_groups = _check_groups(scores.shape[1], num_expert_group, topk_group, biased)
        worst = float("-inf") if biased else 0.0
        choice = _only_best_groups(choice.contiguous(), num_expert_group, kept_groups, biased, worst)
    weights, ids = choice.topk(top_k, -1, sorted=not biased and num_expert_group is None)
    if biased:
        weights = scores.gather(1, ids)
    if renormalize:
        weights.div_(weights.sum(-1, keepdim=True))
    if routed_scaling_factor is not None:
        weights.mul_(routed_scaling_factor)
    return weights, ids.to(torch.int32)
