"""Registers torch_npu's operators, and the one that its documentation leaves open, with the reason for ``explain``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from sglang_fl.dispatch.backends.vendor.ascend.ascend import AscendBackend
from sglang_fl.dispatch.backends.vendor.ascend.availability import torch_npu_availability
from sglang_fl.dispatch.backends.vendor.ascend.impl.activation import supports_gelu
from sglang_fl.dispatch.backends.vendor.ascend.impl.normalization import supports_norm
from sglang_fl.dispatch.backends.vendor.ascend.impl.rotary import supports_mrotary, supports_rotary
from sglang_fl.dispatch.types import BackendImplKind, BackendPriority, NotSupportedError, OpImpl
from sglang_fl.selection import Availability

IMPL_ID = "vendor.ascend"
VENDOR = "ascend"
DTYPES = frozenset({"bfloat16", "float16", "float32"})
# SGLang's own method for Ascend has the same id and 90. What torch_npu can do in few cases or not at all comes after
# it: strict mode allows only the first.
BEHIND_SGLANG = 80


@dataclass(frozen=True)
class Offer:
    """What torch_npu is right for: the question to a layer why it is not, and the place among the vendor's own."""

    supports: Callable[[Any], str] | None = None
    priority: int = BackendPriority.VENDOR


OFFERED: dict[str, Offer] = {
    "silu_and_mul": Offer(),
    "gelu_and_mul": Offer(supports_gelu),
    "rms_norm": Offer(supports_norm),
    "gemma_rms_norm": Offer(supports_norm),
    "rotary_embedding": Offer(supports_rotary),
    "mrotary_embedding": Offer(supports_mrotary, BEHIND_SGLANG),
    "topk": Offer(priority=BEHIND_SGLANG),
}

NOT_OFFERED = {
    "fused_moe": (
        "torch_npu's documentation does not say what its routing functions do with the id -1 (an expert of another "
        "rank); SGLang's own method is in SGLang"
    ),
}


def _refuse(reason: str, *args: Any, **kwargs: Any) -> Any:
    raise NotSupportedError(reason)


def _impl(op_name: str, function: Callable[..., Any], probe: Callable[[], Availability], offer: Offer) -> OpImpl:
    vars(function)["_is_available"] = probe
    return OpImpl(
        op_name=op_name,
        impl_id=IMPL_ID,
        kind=BackendImplKind.VENDOR,
        fn=function,
        vendor=VENDOR,
        priority=offer.priority,
        supported_dtypes=DTYPES,
        supports=offer.supports,
    )


def register_builtins(registry: Any) -> None:
    """Register every operator with ``registry``, without importing torch_npu."""
    backend = AscendBackend()
    impls = [
        _impl(op_name, getattr(backend, op_name), torch_npu_availability, offer) for op_name, offer in OFFERED.items()
    ]
    impls += [
        _impl(op_name, partial(_refuse, reason), partial(Availability.no, reason), Offer(priority=BEHIND_SGLANG))
        for op_name, reason in NOT_OFFERED.items()
    ]
    registry.register_many(impls)
