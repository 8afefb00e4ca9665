"""Bridge of UnquantizedFusedMoEMethod: what its Triton runner computes on standard dispatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sglang_fl.sglang_hooks.operators.bridge import OWN, Bridge, Connection, Method, Obstacle, Owner, first_of, moved

# The methods of SGLang that hand routed_scaling_factor to the runner; with the others the model multiplies itself.
_RUNS_RUNNER = frozenset({"forward_cuda", "forward_hip", "forward_musa", "forward_xpu"})
_WEIGHTS = ("w13_weight", "w2_weight")


def _runs_runner(own: Method) -> bool:
    return getattr(own, "__name__", "") in _RUNS_RUNNER


def _runner(method: Any, layer: Any, own: Method) -> str:
    if method.use_triton_kernels or method.use_flashinfer_cutlass or method.use_flashinfer_trtllm_moe:
        return "the experts run on triton_kernels or FlashInfer"
    if method._aiter_runner is not None:
        return "the experts run on AITER"
    backend = method.runner.runner_backend
    return "" if backend.is_triton() else f"the experts run on {backend.value}"


def _layout(method: Any, layer: Any, own: Method) -> str:
    from sglang.srt.layers.quantization import unquant
    from sglang.srt.utils import use_intel_amx_backend

    if method.load_up_proj_weight_first:
        return "w13 holds up before gate"
    if use_intel_amx_backend(layer) or unquant._is_npu or unquant._use_aiter:
        return "the weights are packed for the platform's own kernel"
    missing = [name for name in _WEIGHTS if layer._parameters.get(name) is None]
    if missing:
        return f"{' and '.join(missing)} is no parameter of the layer"
    w13, w2 = (layer._parameters[name] for name in _WEIGHTS)
    is_plain = w13.ndim == 3 and w2.shape == (w13.shape[0], w13.shape[2], w13.shape[1] // 2)
    return "" if is_plain else f"w13 and w2 have the shapes {list(w13.shape)} and {list(w2.shape)}"


def _activation(method: Any, layer: Any, own: Method) -> str:
    config = method.moe_runner_config
    if not config.is_gated:
        return "the activation is not gated"
    if config.gemm1_alpha is not None or config.gemm1_clamp_limit is not None:
        return "the activation has an alpha or a limit"
    if config.activation == "silu":
        return ""
    # SGLang's Triton runner takes the exact form of GELU, its native method, as the operator, the tanh form.
    if config.activation == "gelu" and not _runs_runner(own):
        return ""
    return f"the activation is {config.activation!r} in the form of SGLang's runner"


def _combination(method: Any, layer: Any, own: Method) -> str:
    config = method.moe_runner_config
    if config.no_combine:
        return "the experts' results are not combined"
    if config.apply_router_weight_on_input and config.top_k != 1:
        return f"the router's weight is applied on input and top_k is {config.top_k}"
    return ""


def _symmetric_memory(method: Any, layer: Any, own: Method) -> str:
    from sglang.srt.server_args import get_global_server_args

    return "the result lives in symmetric memory" if get_global_server_args().enable_symm_mem else ""


def _batch_invariance(method: Any, layer: Any, own: Method) -> str:
    from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled

    return "batch-invariant mode" if is_batch_invariant_mode_enabled() else ""


OBSTACLES: tuple[Obstacle, ...] = (
    _runner,
    _layout,
    _activation,
    _combination,
    _symmetric_memory,
    _batch_invariance,
)


def _obstacle(layer: Any, subject: Any, own: Method) -> str:
    return first_of(OBSTACLES, layer, subject, own)


def _experts(layer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The FusedMoE layer, SGLang's first argument; ``layer`` is only its method."""
    return kwargs["layer"] if "layer" in kwargs else args[0]


def _hidden_dtype(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype | None:
    dispatched = kwargs["dispatch_output"] if "dispatch_output" in kwargs else args[-1]
    dtype: torch.dtype = dispatched.hidden_states.dtype
    return dtype


def _make(connection: Connection) -> Method:
    """The result is SGLang's StandardCombineInput."""
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput, StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    mine, experts, first = connection.owner, connection.subject, connection.first
    own, recover, reads_version = connection.own, connection.recover, connection.reads_version
    # Looked up in every call: a weight update may replace the parameters.
    parameters = experts._parameters
    config = connection.layer.moe_runner_config
    options = {
        "activation": config.activation,
        "apply_router_weight_on_input": config.apply_router_weight_on_input,
        "routed_scaling_factor": config.routed_scaling_factor if _runs_runner(own) else None,
    }

    def is_standard(layer: Any, dispatch_output: Any) -> bool:
        return (
            layer is experts
            and type(dispatch_output) is StandardDispatchOutput
            and dispatch_output.hidden_states_scale is None
            and type(dispatch_output.topk_output) is StandardTopKOutput
        )

    def forward(owner: Owner, layer: Any, dispatch_output: Any) -> Any:
        if owner is not mine:
            return moved(owner, layer, dispatch_output)
        if not is_standard(layer, dispatch_output):
            return own(layer, dispatch_output)
        weights, ids, _ = dispatch_output.topk_output
        w13, w2 = parameters["w13_weight"], parameters["w2_weight"]
        arguments = (layer, dispatch_output.hidden_states, w13, w2, weights, ids)
        w13_bias, w2_bias = parameters.get("w13_weight_bias"), parameters.get("w2_weight_bias")
        try:
            version = dispatch_output.hidden_states._version if reads_version else None
        except RuntimeError:  # inference mode, unlike the first call
            version = None
        try:
            output = first(*arguments, w13_bias=w13_bias, w2_bias=w2_bias, **options)
        except Exception as error:  # noqa: BLE001 - recover raises it again unless another may follow
            output = recover(error, arguments, version, {"w13_bias": w13_bias, "w2_bias": w2_bias, **options})
            if output is OWN:
                return own(layer, dispatch_output)
        return StandardCombineInput(hidden_states=output)

    return forward


# The method belongs to one FusedMoE layer.
FUSED_MOE = Bridge("fused_moe", ("layer", "dispatch_output"), _make, _obstacle, _experts, _hidden_dtype)
