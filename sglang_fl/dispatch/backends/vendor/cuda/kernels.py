"""sgl_kernel's operators by name, with the arguments that the calls here are written for; imported at first use."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from sglang_fl.dispatch.backends.vendor.cuda.availability import MODULE, STAND_IN_MARKER
from sglang_fl.dispatch.types import NotSupportedError

# Argument names of the registered schemas, read from sglang-kernel 0.4.2 (common_ops.abi3.so).
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "silu_and_mul": ("out", "input"),
    "gelu_and_mul": ("out", "input"),
    "gelu_tanh_and_mul": ("out", "input"),
    "rmsnorm": ("output", "input", "weight", "eps", "enable_pdl"),
    "gemma_rmsnorm": ("output", "input", "weight", "eps", "enable_pdl"),
    "fused_add_rmsnorm": ("input", "residual", "weight", "eps", "enable_pdl"),
    "gemma_fused_add_rmsnorm": ("input", "residual", "weight", "eps", "enable_pdl"),
    "rotary_embedding": ("positions", "query", "key", "head_size", "cos_sin_cache", "is_neox"),
    "topk_softmax": (
        *("topk_weights", "topk_indices", "gating_output", "renormalize", "moe_softcapping"),
        "correction_bias",
    ),
    "topk_sigmoid": ("topk_weights", "topk_indices", "gating_output", "renormalize", "correction_bias"),
    "moe_fused_gate": (
        *("input", "bias", "num_expert_group", "topk_group", "topk", "num_fused_shared_experts"),
        *("routed_scaling_factor", "apply_routed_scaling_factor_on_output"),
    ),
}


class SglKernels:
    """``kernels.rmsnorm`` is that registered operator, checked on first use; afterwards it is one attribute.

    The registered operators are called and not sgl_kernel's Python functions above them, which hand some calls to
    FlashInfer, where that is installed, and so to a compiler at run time.

    Attributes:
        launch_pdl: whether kernels are launched with programmatic dependent launch, as sgl_kernel decides it.
    """

    launch_pdl: bool

    def __getattr__(self, name: str) -> Any:
        """Load operator ``name``; only called while it is not loaded.

        Raises:
            NotSupportedError: sgl_kernel does not import, is the stand-in, or has not that operator with these
                arguments.
        """
        if name == "launch_pdl":
            self.launch_pdl = bool(_module(f"{MODULE}.utils").is_arch_support_pdl())
            return self.launch_pdl
        if name not in ARGUMENTS:
            raise AttributeError(name)
        operator = _operator(name)
        setattr(self, name, operator)
        return operator


def _module(name: str) -> Any:
    try:
        module = importlib.import_module(MODULE)
        wanted = importlib.import_module(name)
    except (Exception, SystemExit) as error:  # third-party code: whatever it raises is one reason, and it is reported
        raise NotSupportedError(f"importing sgl_kernel failed with {type(error).__name__}: {error}") from error
    if getattr(module, STAND_IN_MARKER, False):
        raise NotSupportedError("sgl_kernel is the stand-in that lets SGLang import without it, and holds no kernels")
    return wanted


def _operator(name: str) -> Any:
    _module(MODULE)
    operator = getattr(getattr(torch.ops.sgl_kernel, name, None), "default", None)
    if operator is None:
        raise NotSupportedError(f"this sgl_kernel has no operator {name}")
    found = tuple(argument.name for argument in operator._schema.arguments)
    if found != ARGUMENTS[name]:
        raise NotSupportedError(
            f"sgl_kernel's {name} takes {', '.join(found)}; calls here are written for {', '.join(ARGUMENTS[name])}"
        )
    return operator


kernels = SglKernels()
