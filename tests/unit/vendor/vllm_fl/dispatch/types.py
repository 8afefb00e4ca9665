"""A stand-in for vllm-plugin-FL's descriptor: the same fields as ours, in classes that know nothing of ours."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any


class BackendImplKind(str, Enum):
    """Kinds."""

    DEFAULT = "flagos"
    REFERENCE = "reference"
    VENDOR = "vendor"


class BackendPriority:
    """Priorities."""

    DEFAULT, VENDOR, REFERENCE = 150, 100, 50


@dataclass(frozen=True)
class OpImpl:
    """Descriptor."""

    op_name: str
    impl_id: str
    kind: BackendImplKind
    fn: Callable[..., Any]
    vendor: str | None = None
    priority: int = 0
    supported_dtypes: set[str] | None = None
    min_arch: str | None = None
