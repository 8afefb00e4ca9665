"""Registers the chip's operators; as copied they are never available: no chip's library is called my_chip_sdk."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from sglang_fl.dispatch.types import BackendImplKind, BackendPriority, OpImpl
from sglang_fl.selection import Availability

from .my_chip import MyChipBackend

OPERATORS = ("silu_and_mul", "rms_norm", "rotary_embedding")


def _bind_is_available(fn: Callable[..., Any], is_available: Callable[[], Availability]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    vars(wrapper)["_is_available"] = is_available
    return wrapper


def register_builtins(registry: Any) -> None:
    """Entry point of this folder; sglang_fl calls it once in every process."""
    backend = MyChipBackend()
    registry.register_many(
        [
            OpImpl(
                op_name=op_name,
                impl_id="vendor.template",
                kind=BackendImplKind.VENDOR,
                fn=_bind_is_available(getattr(backend, op_name), backend.availability),
                vendor="template",
                priority=BackendPriority.VENDOR,
            )
            for op_name in OPERATORS
        ]
    )
