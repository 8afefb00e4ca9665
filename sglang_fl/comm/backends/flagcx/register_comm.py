"""Registers FlagCX."""

from sglang_fl.comm.backends.flagcx.transport import FlagCXBackend
from sglang_fl.comm.types import BackendRegistry


def register_comm(registry: BackendRegistry) -> None:
    """Entry point of this folder."""
    registry.register(FlagCXBackend())
