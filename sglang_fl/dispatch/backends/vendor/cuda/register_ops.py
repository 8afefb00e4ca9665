"""Registers sgl_kernel's operators, and those that it has no right one for, with the reason that ``explain`` prints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from sglang_fl.dispatch.backends.vendor.cuda.availability import sgl_kernel_availability
from sglang_fl.dispatch.backends.vendor.cuda.cuda import CudaBackend
from sglang_fl.dispatch.backends.vendor.cuda.impl import rotary
from sglang_fl.dispatch.backends.vendor.cuda.impl.activation import supports_gelu
from sglang_fl.dispatch.backends.vendor.cuda.impl.normalization import supports_norm
from sglang_fl.dispatch.types import BackendImplKind, BackendPriority, NotSupportedError, OpImpl
from sglang_fl.selection import Availability

IMPL_ID = "vendor.nvidia"
VENDOR = "nvidia"
# SGLang's own method for NVIDIA has the same id and 90. What sgl_kernel can do in few cases or not at all comes after
# it: strict mode allows only the first.
BEHIND_SGLANG = 80
DTYPES = frozenset({"bfloat16", "float16", "float32"})
SIXTEEN_BITS = frozenset({"bfloat16", "float16"})


@dataclass(frozen=True)
class Offer:
    """What sgl_kernel is right for: dtypes, and the question to a layer why it is not."""

    dtypes: frozenset[str] = DTYPES
    supports: Callable[[Any], str] | None = None
    priority: int = BackendPriority.VENDOR


OFFERED: dict[str, Offer] = {
    "silu_and_mul": Offer(),
    "gelu_and_mul": Offer(SIXTEEN_BITS, supports_gelu),
    "rms_norm": Offer(SIXTEEN_BITS, supports_norm),
    "gemma_rms_norm": Offer(SIXTEEN_BITS, supports_norm),
    "rotary_embedding": Offer(dtypes=rotary.DTYPES, priority=BEHIND_SGLANG),
    "topk": Offer(),
}

# Found by reading sglang-kernel 0.4.2.
NOT_OFFERED = {
    "mrotary_embedding": "sgl_kernel 0.4.2 has no multimodal rotary kernel; SGLang's own is in SGLang",
    "fused_moe": "sgl_kernel 0.4.2 has grouped products for quantized weights only; SGLang's own is in SGLang",
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
        supported_dtypes=offer.dtypes,
        supports=offer.supports,
    )


def register_builtins(registry: Any) -> None:
    """Register every operator with ``registry``, without importing sgl_kernel."""
    backend = CudaBackend()
    impls = [
        _impl(op_name, getattr(backend, op_name), sgl_kernel_availability, offer) for op_name, offer in OFFERED.items()
    ]
    impls += [
        _impl(op_name, partial(_refuse, reason), partial(Availability.no, reason), Offer(priority=BEHIND_SGLANG))
        for op_name, reason in NOT_OFFERED.items()
    ]
    registry.register_many(impls)
