"""Registers FlagGems' operators, and those that it has no right one for, with the reason that ``explain`` prints."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sglang_fl.dispatch.backends.flaggems.availability import operator_availability
from sglang_fl.dispatch.backends.flaggems.flaggems import FlagGemsBackend
from sglang_fl.dispatch.backends.flaggems.impl.activation import supports_gelu
from sglang_fl.dispatch.backends.flaggems.impl.normalization import supports_norm
from sglang_fl.dispatch.types import BackendImplKind, BackendPriority, NotSupportedError, OpImpl
from sglang_fl.selection import Availability

IMPL_ID = "flagos"
DTYPES = frozenset({"bfloat16", "float16", "float32"})

_SUPPORTS: dict[str, Callable[[Any], str]] = {
    "gelu_and_mul": supports_gelu,
    "rms_norm": supports_norm,
    "gemma_rms_norm": supports_norm,
}
_OFFERED = ("silu_and_mul", "gelu_and_mul", "rms_norm", "gemma_rms_norm", "rotary_embedding", "topk")

# Found by reading FlagGems 5.0.2.
NOT_OFFERED = {
    "mrotary_embedding": "FlagGems 5.0.2 has no multimodal rotary kernel",
    "fused_moe": (
        "FlagGems 5.0.2's fused_experts_impl is not right for it: the id -1 (an expert of another rank) makes "
        "moe_align_block_size count outside of its buffer, its kernels are compiled anew for every number of tokens, "
        "and float32 is multiplied in TF32"
    ),
}


def _refuse(reason: str, *args: Any, **kwargs: Any) -> Any:
    raise NotSupportedError(reason)


def _offered(op_name: str, function: Callable[..., Any]) -> OpImpl:
    vars(function)["_is_available"] = partial(operator_availability, op_name)
    return OpImpl(
        op_name=op_name,
        impl_id=IMPL_ID,
        kind=BackendImplKind.DEFAULT,
        fn=function,
        priority=BackendPriority.DEFAULT,
        supported_dtypes=DTYPES,
        supports=_SUPPORTS.get(op_name),
    )


def _not_offered(op_name: str, reason: str) -> OpImpl:
    function = partial(_refuse, reason)
    vars(function)["_is_available"] = partial(Availability.no, reason)
    return OpImpl(op_name, IMPL_ID, BackendImplKind.DEFAULT, function, priority=BackendPriority.DEFAULT)


def register_builtins(registry: Any) -> None:
    """Register every operator with ``registry``, without importing FlagGems."""
    backend = FlagGemsBackend()
    impls = [_offered(op_name, getattr(backend, op_name)) for op_name in _OFFERED]
    impls += [_not_offered(op_name, reason) for op_name, reason in NOT_OFFERED.items()]
    registry.register_many(impls)
