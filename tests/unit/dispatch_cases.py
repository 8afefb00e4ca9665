"""What the tests of dispatch share: implementations that count their calls and do as they are told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from sglang_fl.dispatch import BackendImplKind, OpImpl, OpManager, OpRegistry, SelectionPolicy
from sglang_fl.selection import Availability

KINDS = {
    "flagos": (BackendImplKind.DEFAULT, 150),
    "reference": (BackendImplKind.REFERENCE, 50),
}


@dataclass
class Counted:
    """An implementation: returns its own id, or raises; ``calls`` are the arguments of each call."""

    impl_id: str
    error: BaseException | None = None
    unavailable: str = ""
    op_name: str = "silu_and_mul"
    priority: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    probes: int = 0

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        """Count, then raise or return."""
        self.calls.append((*args, *kwargs.items()))
        if self.error is not None:
            raise self.error
        return self.impl_id

    def _is_available(self) -> Availability:
        self.probes += 1
        return Availability(not self.unavailable, self.unavailable)

    @property
    def impl(self) -> OpImpl:
        """The descriptor."""
        kind, priority = KINDS.get(self.impl_id, (BackendImplKind.VENDOR, 100))
        vendor = self.impl_id.removeprefix("vendor.") if kind is BackendImplKind.VENDOR else None
        priority = priority if self.priority is None else self.priority
        return OpImpl(self.op_name, self.impl_id, kind, self, vendor, priority, **self.options)


def manager_of(*implementations: Counted, policy: SelectionPolicy | None = None) -> OpManager:
    """A manager that has these alone."""
    registry = OpRegistry()
    registry.register_many([each.impl for each in implementations])
    return OpManager(registry, policy or SelectionPolicy())


def raised(function: Callable[[], Any]) -> BaseException:
    """What the function raises."""
    with pytest.raises(BaseException) as caught:
        function()
    return caught.value
