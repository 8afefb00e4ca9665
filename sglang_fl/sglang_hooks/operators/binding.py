"""Decides once per layer, at its first call, what runs it from then on, and says so once per class."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang_fl.dispatch import OpImpl, dispatch_log, get_manager
from sglang_fl.selection import Selection
from sglang_fl.sglang_hooks.operators.bridge import Connection, Method, Owner, moved
from sglang_fl.sglang_hooks.operators.own_method import is_own_method, own_method
from sglang_fl.sglang_hooks.operators.table import Bridged

logger = logging.getLogger("sglang_fl")


@dataclass
class Binder:
    """What the layers of one process share: the platform, and which lines were logged.

    Attributes:
        platform: the platform in use.
        has_kernels: whether SGLang's own methods have the vendor's kernels.
    """

    platform: str | None
    has_kernels: bool
    _reported: set[tuple[str, str]] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def candidates(self, op_name: str) -> tuple[OpImpl, ...]:
        """SGLang's own method, where it is one of the operator's implementations."""
        return own_method(op_name, self.platform, self.has_kernels)

    def bind(self, row: Bridged, layer: Any, own: Method, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Method:
        """What is to run ``layer``: a bridge, or SGLang's own method.

        Args:
            row: the layer's bridge.
            layer: SGLang's layer.
            own: SGLang's own method for the platform.
            args, kwargs: of the first call.

        Raises:
            SelectionError: no implementation may be used.
        """
        name = type(layer).__name__
        bridge = row.bridge
        subject = bridge.subject(layer, args, kwargs)
        obstacle = bridge.obstacle(layer, subject, own)
        if obstacle:
            self._report(name, f"SGLang's own method: {obstacle}")
            return own
        bound = get_manager().bind(
            row.op_name, subject, extra=self.candidates(row.op_name), dtype=bridge.input_dtype(args, kwargs)
        )
        dispatch_log.write(name, bound.impl)
        self._report(name, describe(row.op_name, bound.impl, bound.selection))
        if is_own_method(bound.impl):
            return own
        owner = Owner(layer)
        return owner.bind(bridge.make(Connection(owner, subject, bound, own)))

    def _report(self, name: str, line: str) -> None:
        """Log what a class got, once per class and outcome; INFO on rank 0, DEBUG on the others."""
        with self._lock:
            if (name, line) in self._reported:
                return
            self._reported.add((name, line))
        logger.log(logging.INFO if _rank() == 0 else logging.DEBUG, "[sglang_fl] %s: %s", name, line)


def first_call(layer: Any, row: Bridged, own: Method, binder: Binder) -> Method:
    """Stands in a layer's ``_forward_method`` until its first call, which decides and puts the decision there.

    Not earlier: SGLang dispatches in the base class's constructor, before the layer has its attributes.
    """
    mine, bound = Owner(layer), None

    def forward(owner: Owner, *args: Any, **kwargs: Any) -> Any:
        nonlocal bound
        if owner is not mine:
            return moved(owner, *args, **kwargs)
        if bound is None:
            bound = binder.bind(row, layer, own, args, kwargs)
            mine.replace(bound)
        return bound(*args, **kwargs)

    return mine.bind(forward)


def describe(op_name: str, impl: OpImpl, selection: Selection) -> str:
    """The implementation and why not the others, on one line."""
    own = " (SGLang's own method)" if is_own_method(impl) else ""
    others = "; ".join(f"not {entry.impl_id}: {entry.reason}" for entry in selection.passed_over)
    return f"{op_name} is {impl.impl_id}{own}" + (f"; {others}" if others else "")


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
