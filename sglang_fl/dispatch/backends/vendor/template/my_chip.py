"""What a chip's operators consist of: where they can be used (availability), and one method for each operator."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch

from sglang_fl.dispatch.backends import Backend
from sglang_fl.selection import Availability

from .impl import SDK, sdk
from .impl.activation import silu_and_mul_my_chip
from .impl.normalization import rms_norm_my_chip
from .impl.rotary import rotary_embedding_my_chip


@cache
def _availability() -> Availability:
    if importlib.util.find_spec(SDK) is None:
        return Availability.no(f"{SDK} is not installed")
    count = sdk().device_count()
    return Availability.yes() if count > 0 else Availability.no(f"{SDK} sees {count} devices")


class MyChipBackend(Backend):
    """The operators that the chip does better; those without a method here are taken from another backend."""

    @property
    def name(self) -> str:
        """For reports."""
        return "template"

    @property
    def vendor(self) -> str:
        """What users write in SGLANG_FL_PER_OP, SGLANG_FL_ALLOW_VENDORS and SGLANG_FL_DENY_VENDORS."""
        return "template"

    def availability(self) -> Availability:
        """Whether the chip can be used in this process; the reason of a "no" is what users read."""
        return _availability()

    def is_available(self) -> bool:
        """The same as a bool."""
        return self.availability().available

    def silu_and_mul(self, obj: Any, x: torch.Tensor) -> torch.Tensor:
        """See FLBackendBase."""
        return silu_and_mul_my_chip(obj, x)

    def rms_norm(
        self, obj: Any, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """See FLBackendBase."""
        return rms_norm_my_chip(obj, x, residual)

    def rotary_embedding(
        self,
        obj: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        position_ids: torch.Tensor,
        rotary_interleaved: bool = False,
        inplace: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See FLBackendBase."""
        return rotary_embedding_my_chip(obj, query, key, cos, sin, position_ids, rotary_interleaved, inplace)
