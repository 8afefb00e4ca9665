"""SGLang's own method for the platform as one of an operator's implementations."""

from __future__ import annotations

from typing import Any

from sglang_fl.config import find_chip
from sglang_fl.dispatch import BackendImplKind, OpImpl, OwnMethodError

# Below a vendor's own backend for the same operator, which was written for the standard signature.
PRIORITY = 90
# Platforms for which SGLang itself has kernels. On a CPU its method is plain PyTorch, as the reference is.
_WITH_KERNELS = frozenset({"cuda", "ascend", "musa"})


def _call_own_method(*_: Any, **__: Any) -> Any:
    raise OwnMethodError("SGLang's own method takes SGLang's arguments")


def own_method(op_name: str, platform: str | None, has_kernels: bool) -> tuple[OpImpl, ...]:
    """The candidate for ``op_name``, or none where SGLang has no kernels for the platform.

    Args:
        op_name: the operator.
        platform: the platform in use.
        has_kernels: whether the vendor's package is there, as opposed to the stand-in that only answers to its name.
    """
    chip = find_chip(platform or "")
    if chip is None or platform not in _WITH_KERNELS or not has_kernels:
        return ()
    vendor = chip.vendor
    kind = BackendImplKind.VENDOR
    return (OpImpl(op_name, f"vendor.{vendor}", kind, _call_own_method, vendor=vendor, priority=PRIORITY),)


def is_own_method(impl: OpImpl) -> bool:
    """Whether ``impl`` stands for SGLang's own method."""
    return impl.fn is _call_own_method
