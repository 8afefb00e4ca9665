"""Bridge of TopK: the choice of experts is the operator's, everything around it stays SGLang's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sglang_fl.sglang_hooks.operators.bridge import Bridge, Method, OwnMethodError

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


class TopKBridge(Bridge):
    """``TopK`` with the standard output format.

    SGLang's own functions record the choice for its capturers and mask padded tokens. Where they do not mask, which
    is everywhere but on CUDA devices, padded calls are SGLang's own method's, and so are those with a map from logical
    to physical experts.
    """

    __slots__ = ("_config", "_masks_padding", "_options", "_output", "_post_process", "_recorder", "_top_k")
    op_name = "topk"

    def __init__(self, layer: Any, subject: Any, fn: Method, own: Method) -> None:
        super().__init__(layer, subject, fn, own)
        from sglang.srt.layers.moe import topk

        config = layer.topk_config
        self._config = config
        self._top_k: int = config.top_k
        self._options = standard_options(config)
        self._masks_padding: bool = topk._is_cuda
        self._post_process = topk._post_process_topk_ids
        self._recorder = topk.get_global_expert_distribution_recorder
        self._output = topk.StandardTopKOutput

    @classmethod
    def obstacle(cls, layer: Any, subject: Any, own: Method) -> str:
        """The first of :data:`OBSTACLES` that applies."""
        reasons = (check(layer.topk_config) for check in OBSTACLES)
        return next(filter(None, reasons), "")

    @classmethod
    def input_dtype(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype | None:
        """That of the router's logits; hidden_states are not read."""
        logits = kwargs.get("router_logits", args[1] if len(args) > 1 else None)
        return None if logits is None else logits.dtype

    def __call__(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        *,
        num_token_non_padded: torch.Tensor | None = None,
        expert_location_dispatch_info: Any = None,
    ) -> Any:
        """router_logits: [tokens, experts]; the result is SGLang's StandardTopKOutput."""
        is_padded = num_token_non_padded is not None and not self._masks_padding
        if is_padded or expert_location_dispatch_info is not None:
            return self._run_own(hidden_states, router_logits, num_token_non_padded, expert_location_dispatch_info)
        config = self._config
        try:
            weights, ids = self.fn(
                self.layer, router_logits, self._top_k, correction_bias=config.correction_bias, **self._options
            )
        except OwnMethodError:
            return self._run_own(hidden_states, router_logits, num_token_non_padded, None)
        ids, weights = self._post_process(
            topk_ids=ids,
            topk_weights=weights,
            topk_config=config,
            router_logits=router_logits,
            layer_id=self.layer.layer_id,
            num_token_non_padded=num_token_non_padded,
        )
        self._recorder().on_select_experts(topk_ids=ids)
        return self._output(weights, ids, router_logits)

    def _run_own(self, hidden_states: Any, router_logits: Any, padding: Any, location: Any) -> Any:
        return self.own(
            hidden_states, router_logits, num_token_non_padded=padding, expert_location_dispatch_info=location
        )


def standard_options(config: Any) -> dict[str, Any]:
    """SGLang's TopKConfig as the keyword arguments of the operator, without the bias, which may be replaced.

    SGLang scores groups by softmax without a bias and by sigmoid with one, whatever ``scoring_func`` says.
    """
    scoring_func = config.scoring_func
    if config.use_grouped_topk:
        scoring_func = "softmax" if config.correction_bias is None else "sigmoid"
    factor = config.routed_scaling_factor if config.apply_routed_scaling_factor_on_output else None
    return {
        "renormalize": config.renormalize,
        "scoring_func": scoring_func,
        "num_expert_group": config.num_expert_group if config.use_grouped_topk else None,
        "topk_group": config.topk_group if config.use_grouped_topk else None,
        "routed_scaling_factor": factor,
    }
