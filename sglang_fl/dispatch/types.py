"""What an operator's implementation is: the descriptor that every backend registers, and how it says no."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from sglang_fl.selection import Availability


class BackendImplKind(str, Enum):
    """What stands behind an implementation; the values are the tokens that settings use."""

    DEFAULT = "flagos"
    VENDOR = "vendor"
    REFERENCE = "reference"

    def __str__(self) -> str:
        return str(self.value)


class BackendPriority:
    """Standard priorities; among implementations that the policy ranks equal, the higher one comes first."""

    DEFAULT = 150
    VENDOR = 100
    REFERENCE = 50


class NotSupportedError(NotImplementedError):
    """Raised by an implementation that cannot do this call, before it has touched any of its inputs.

    Outside strict mode the next implementation then gets the same call; that is sound only because nothing was
    written yet.
    """


class OwnMethodError(Exception):
    """Raised by the stand-in for the framework's own method, which cannot be called with the standard arguments.

    A bound function lets it pass whatever the mode: whoever called it then runs that method with its own arguments.
    """


@dataclass(frozen=True)
class OpImpl:
    """One implementation of one operator.

    Attributes:
        op_name: the operator, such as ``rms_norm``; its signature is in :class:`sglang_fl.dispatch.ops.FLBackendBase`.
        impl_id: unique for the operator: ``flagos``, ``reference``, ``vendor.nvidia``.
        kind: flagos, vendor or reference.
        fn: the function; an attribute ``_is_available`` on it (a function without arguments that gives a bool or an
            :class:`Availability`) says whether it can be used in this process.
        vendor: the vendor's name, required for kind VENDOR; aliases such as cuda are understood.
        priority: see :class:`BackendPriority`.
        supported_dtypes: names such as ``bfloat16``; None: all. Asked once, at the first call of a layer.
        min_arch: least compute capability on CUDA devices, such as ``9.0``; None: any.
        supports: given the layer object, why this implementation is wrong for it, or "" if it is right; asked
            once, at the first call of that layer. None: right for all.
    """

    op_name: str
    impl_id: str
    kind: BackendImplKind
    fn: Callable[..., Any]
    vendor: str | None = None
    priority: int = 0
    supported_dtypes: frozenset[str] | set[str] | None = None
    min_arch: str | None = None
    supports: Callable[[Any], str] | None = None

    def __post_init__(self) -> None:
        """Check what cannot be right.

        Raises:
            ValueError: a vendor's implementation without the vendor's name.
        """
        if self.kind == BackendImplKind.VENDOR and not self.vendor:
            raise ValueError(f"OpImpl {self.impl_id} of {self.op_name}: kind VENDOR needs vendor=, the vendor's name")

    def availability(self) -> Availability:
        """Whether it can be used in this process, and why not. An ``_is_available`` that raises says no.

        Source: the public plugin's recipe attaches ``_is_available`` to the function.
        """
        probe = getattr(self.fn, "_is_available", None)
        if probe is None:
            return Availability.yes()
        try:
            answer = probe()
            if isinstance(answer, Availability):
                return answer
            is_available = bool(answer)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - third-party code; the reason is kept and reported
            return Availability.no(f"its is_available raised {type(error).__name__}: {error}")
        return Availability.yes() if is_available else Availability.no("its is_available says no")

    def is_available(self) -> bool:
        """Whether it can be used in this process."""
        return self.availability().available
