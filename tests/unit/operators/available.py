"""Every implementation that can run in this process: a backend that is added later is tested without a change here."""

from __future__ import annotations

import torch

from sglang_fl.dispatch.builtin_ops import register_all
from sglang_fl.dispatch.registry import OpRegistry
from sglang_fl.dispatch.types import BackendImplKind, OpImpl


def available() -> tuple[OpImpl, ...]:
    """All implementations whose backends say that they can be used."""
    registry = OpRegistry()
    register_all(registry)
    return tuple(impl for impl in registry.all_implementations() if impl.is_available())


def device_of(impl: OpImpl) -> str:
    """The reference runs on the CPU; what says that it can be used elsewhere runs on this machine's device."""
    on_device = impl.kind is not BackendImplKind.REFERENCE and torch.cuda.is_available()
    return "cuda" if on_device else "cpu"


AVAILABLE = available()
REFERENCE = {impl.op_name: impl for impl in AVAILABLE if impl.impl_id == "reference"}
