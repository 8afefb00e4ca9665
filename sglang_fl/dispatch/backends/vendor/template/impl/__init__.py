"""The chip's functions behind the standard signatures, one file a family; the chip's library is imported once."""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

SDK = "my_chip_sdk"


@cache
def sdk() -> ModuleType:
    """The chip's own library."""
    return importlib.import_module(SDK)
