"""Bridge of TopK: the choice of experts is the operator's, everything around it stays SGLang's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from sglang_fl.sglang_hooks.operators.bridge import OWN, Bridge, Connection, Method, Owner, first_of, moved

SCORING_FUNCTIONS = ("softmax", "sigmoid")


def _output_format(config: Any) -> str:
    """Another than the standard output format, as ``TopK.forward_cuda`` decides it; "" for the standard one."""
    from sglang.srt.layers.moe import get_moe_runner_backend
    from sglang.srt.layers.moe.topk import TopKOutputFormat

    if config.output_format is not None:
        is_standard = config.output_format == TopKOutputFormat.STANDARD
        return "" if is_standard else f"the output format is {config.output_format.name}"
    backend = get_moe_runner_backend()
    others = (
        backend.is_triton_kernels(),
        backend.is_flashinfer_trtllm(),
        backend.is_flashinfer_mxfp4(),
        backend.is_flashinfer_trtllm_routed(),
    )
    return f"the runner of the experts is {backend.value}, with a routing of its own" if any(others) else ""


def _fused_shared_experts(config: Any) -> str:
    count = config.num_fused_shared_experts
    return f"{count} shared experts are fused into the choice" if count else ""


def _custom_routing(config: Any) -> str:
    return "the model has a routing function of its own" if config.custom_routing_function is not None else ""


def _scoring(config: Any) -> str:
    is_known = config.use_grouped_topk or config.scoring_func in SCORING_FUNCTIONS
    return "" if is_known else f"scoring_func is {config.scoring_func!r}"


def _bias(config: Any) -> str:
    # SGLang's methods differ here by platform: its CUDA kernels ignore a bias on softmax scores, and renormalise
    # grouped scores with a bias whatever the flag says.
    if config.correction_bias is None:
        return ""
    if not config.use_grouped_topk:
        return "" if config.scoring_func == "sigmoid" else "softmax scores with a correction bias"
    return "" if config.renormalize else "groups with a correction bias that are not renormalised"


def _scaling(config: Any) -> str:
    if not config.apply_routed_scaling_factor_on_output:
        return ""
    is_plain = config.use_grouped_topk and config.renormalize and config.routed_scaling_factor is not None
    return "" if is_plain else "routed_scaling_factor is applied where the scores are neither grouped nor renormalised"


def _symmetric_memory(config: Any) -> str:
    from sglang.srt.server_args import get_global_server_args

    return "the result lives in symmetric memory" if get_global_server_args().enable_symm_mem else ""


OBSTACLES: tuple[Callable[[Any], str], ...] = (
    _output_format,
    _fused_shared_experts,
    _custom_routing,
    _scoring,
    _bias,
    _scaling,
    _symmetric_memory,
)


def _obstacle(layer: Any, subject: Any, own: Method) -> str:
    return first_of(OBSTACLES, layer.topk_config)


def _logits_dtype(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype | None:
    """hidden_states are not read."""
    logits = kwargs["router_logits"] if "router_logits" in kwargs else args[1]
    dtype: torch.dtype = logits.dtype
    return dtype


def _make(connection: Connection) -> Method:
    """The result is SGLang's StandardTopKOutput.

    SGLang's own functions record the choice for its capturers and mask padded tokens. Where they do not mask, which
    is everywhere but on CUDA devices, padded calls are SGLang's own method's, and so are those with a map from logical
    to physical experts.
    """
    from sglang.srt.layers.moe import topk

    mine, layer, first = connection.owner, connection.layer, connection.first
    own, recover = connection.own, connection.recover
    config, layer_id, top_k = layer.topk_config, layer.layer_id, layer.topk_config.top_k
    options = standard_options(config)
    choose = partial(first, **options) if options else first
    masks_padding: bool = topk._is_cuda

    def forward(
        owner: Owner,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        *,
        num_token_non_padded: torch.Tensor | None = None,
        expert_location_dispatch_info: Any = None,
    ) -> Any:
        if owner is not mine:
            return moved(
                owner,
                hidden_states,
                router_logits,
                num_token_non_padded=num_token_non_padded,
                expert_location_dispatch_info=expert_location_dispatch_info,
            )
        if expert_location_dispatch_info is not None or (num_token_non_padded is not None and not masks_padding):
            return run_own(hidden_states, router_logits, num_token_non_padded, expert_location_dispatch_info)
        # The bias may be replaced.
        bias = config.correction_bias
        try:
            chosen = choose(layer, router_logits, top_k, correction_bias=bias)
        except Exception as error:  # noqa: BLE001 - recover raises it again unless another may follow
            chosen = recover(error, (layer, router_logits, top_k), None, {"correction_bias": bias, **options})
            if chosen is OWN:
                return run_own(hidden_states, router_logits, num_token_non_padded, None)
        weights, ids = chosen
        ids, weights = topk._post_process_topk_ids(
            topk_ids=ids,
            topk_weights=weights,
            topk_config=config,
            router_logits=router_logits,
            layer_id=layer_id,
            num_token_non_padded=num_token_non_padded,
        )
        topk.get_global_expert_distribution_recorder().on_select_experts(topk_ids=ids)
        return topk.StandardTopKOutput(weights, ids, router_logits)

    def run_own(hidden_states: Any, router_logits: Any, padding: Any, location: Any) -> Any:
        return own(hidden_states, router_logits, num_token_non_padded=padding, expert_location_dispatch_info=location)

    return forward


# What the operator takes for granted where a parameter is left out.
_DEFAULTS = {
    "renormalize": True,
    "scoring_func": "softmax",
    "num_expert_group": None,
    "topk_group": None,
    "routed_scaling_factor": None,
}


def standard_options(config: Any) -> dict[str, Any]:
    """SGLang's TopKConfig as keyword arguments of the operator: what differs from its defaults, without the bias.

    SGLang scores groups by softmax without a bias and by sigmoid with one, whatever ``scoring_func`` says.
    """
    scoring_func = config.scoring_func
    if config.use_grouped_topk:
        scoring_func = "softmax" if config.correction_bias is None else "sigmoid"
    factor = config.routed_scaling_factor if config.apply_routed_scaling_factor_on_output else None
    options = {
        "renormalize": config.renormalize,
        "scoring_func": scoring_func,
        "num_expert_group": config.num_expert_group if config.use_grouped_topk else None,
        "topk_group": config.topk_group if config.use_grouped_topk else None,
        "routed_scaling_factor": factor,
    }
    return {name: value for name, value in options.items() if value != _DEFAULTS[name]}


TOPK = Bridge(
    "topk",
    (
        "hidden_states",
        "router_logits",
        "*",
        "num_token_non_padded=None",
        "expert_location_dispatch_info=None",
    ),
    _make,
    _obstacle,
    input_dtype=_logits_dtype,
)
