"""The experts of each token: FlagGems' softmax gate, and its grouped choice over scores made in float32 before."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from sglang_fl.dispatch.backends.flaggems.impl.shapes import next_power_of_two
from sglang_fl.dispatch.backends.flaggems.kernels import loaded
from sglang_fl.dispatch.types import NotSupportedError

# The softmax kernel looks at so many experts and no further.
_MOST_EXPERTS = 1024
# FlagGems' own limit for either kernel.
_MOST_CHOSEN = 32
_MOST_GROUPS = 32
# grouped_topk makes a block of top_k elements, and a block's size is a power of two.
_POWERS_OF_TWO = (1, 2, 4, 8, 16, 32)
_ELEMENTS_PER_PROGRAM = 1024
_EXPERTS_OF_ONE_WARP = 128


def topk_flaggems(
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

    Softmax without bias and groups is one kernel. It adds 1e-8 to its denominators: the weights are within 3e-6 of
    the formula for up to 256 experts. Everything else is scored by PyTorch in float32 and chosen by ``grouped_topk``.

    Raises:
        NotSupportedError: groups without a bias (FlagGems scores a group by its two best, the contract by its best),
            a group of one expert, more than 1024 experts or 32 groups, top_k above 32 or, where ``grouped_topk``
            chooses, no power of two, an unknown scoring function.
    """
    groups = num_expert_group or 1
    if groups == 1 and correction_bias is None and scoring_func == "softmax":
        return _softmax_topk(router_logits, top_k, renormalize, routed_scaling_factor)
    _check_grouped(router_logits.shape[1], top_k, groups, correction_bias, scoring_func)
    if not router_logits.shape[0]:
        return _empty(router_logits, top_k)
    scores = _scores(router_logits, scoring_func)
    bias = correction_bias if correction_bias is not None else scores.new_zeros(scores.shape[1])
    factor = 1.0 if routed_scaling_factor is None else routed_scaling_factor
    weights, ids = loaded.grouped_topk(scores, groups, topk_group or 1, top_k, renormalize, factor, bias)
    return weights, ids


def _empty(router_logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape, device = (router_logits.shape[0], top_k), router_logits.device
    return torch.empty(shape, dtype=torch.float32, device=device), torch.empty(shape, dtype=torch.int32, device=device)


def _scores(router_logits: torch.Tensor, scoring_func: str) -> torch.Tensor:
    if scoring_func == "softmax":
        return torch.softmax(router_logits, dim=-1, dtype=torch.float32)
    return torch.sigmoid(router_logits.float()).contiguous()


def _softmax_topk(
    router_logits: torch.Tensor, top_k: int, renormalize: bool, factor: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, experts = router_logits.shape
    if experts > _MOST_EXPERTS or top_k > min(_MOST_CHOSEN, experts):
        raise NotSupportedError(
            f"topk: {top_k} of {experts} experts; FlagGems' softmax gate chooses at most {_MOST_CHOSEN} "
            f"of at most {_MOST_EXPERTS}"
        )
    weights, ids = _empty(router_logits, top_k)
    if not tokens:
        return weights, ids
    columns = max(next_power_of_two(experts), 32)
    one_row = experts > _EXPERTS_OF_ONE_WARP
    rows = 1 if one_row else _ELEMENTS_PER_PROGRAM // columns
    loaded.topk_softmax[(-(-tokens // rows),)](
        *(router_logits.contiguous(), None, weights, ids, torch.empty_like(ids), tokens, top_k, experts, 0, experts),
        *(renormalize, _int32(), rows, columns),
        num_warps=1 if one_row else 4,
    )
    return (weights if factor is None else weights.mul_(factor)), ids


@cache
def _int32() -> Any:
    import triton.language as tl

    return tl.int32


def _check_grouped(experts: int, top_k: int, groups: int, bias: torch.Tensor | None, scoring_func: str) -> None:
    right = (
        scoring_func in ("softmax", "sigmoid")
        and (bias is not None or groups == 1)
        and groups <= _MOST_GROUPS
        and experts % groups == 0
        and experts // groups > 1
        and top_k in _POWERS_OF_TWO
        and top_k <= experts
    )
    if not right:
        raise NotSupportedError(
            f"topk: {scoring_func}, top_k {top_k} of {experts} experts in {groups} groups "
            f"{'without' if bias is None else 'with'} a bias; FlagGems' grouped_topk is right for softmax and sigmoid, "
            f"a bias with groups, up to {_MOST_GROUPS} equal groups of two or more, and top_k in {_POWERS_OF_TWO}"
        )
