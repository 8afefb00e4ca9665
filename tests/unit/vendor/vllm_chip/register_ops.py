"""Registration for vllm-plugin-FL; an attention operator, which only vLLM has, is among it."""

import functools

import torch
from vllm_fl.dispatch.backends import Backend
from vllm_fl.dispatch.types import BackendImplKind, BackendPriority, OpImpl


class VllmChipBackend(Backend):
    """The backend."""

    @property
    def name(self) -> str:
        """Name."""
        return "vllm_chip"

    def is_available(self) -> bool:
        """Always."""
        return True

    def silu_and_mul(self, obj, x):
        """The standard signature."""
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def attention_backend(self, use_mla=False):
        """An operator of vLLM's own."""
        return "vllm_chip.attention"


def _bind_is_available(fn, is_available_fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        return fn(*args, **kwargs)

    wrapper._is_available = is_available_fn
    return wrapper


def register_builtins(registry) -> None:
    """Entry."""
    backend = VllmChipBackend()
    registry.register_many(
        OpImpl(
            op_name=op_name,
            impl_id="vendor.vllm_chip",
            kind=BackendImplKind.VENDOR,
            fn=_bind_is_available(getattr(backend, op_name), backend.is_available),
            vendor="vllm_chip",
            priority=BackendPriority.VENDOR,
            supported_dtypes={"bfloat16", "float32"},
        )
        for op_name in ("silu_and_mul", "attention_backend")
    )
