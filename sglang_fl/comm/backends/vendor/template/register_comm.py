"""Registers the template's backend, which is never available: it shows what a chip's backend consists of."""

from sglang_fl.comm.backends.vendor.template.my_chip import MyChipBackend
from sglang_fl.comm.types import BackendRegistry


def register_comm(registry: BackendRegistry) -> None:
    """Entry point of this folder; sglang_fl calls it in every process."""
    registry.register(MyChipBackend())
