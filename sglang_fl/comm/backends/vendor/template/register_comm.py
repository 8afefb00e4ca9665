"""Registers the chip's backend; as copied it is never available, and shows what a backend consists of."""

from sglang_fl.comm.backends.vendor.template.my_chip import MyChipBackend
from sglang_fl.comm.types import BackendRegistry


def register_comm(registry: BackendRegistry) -> None:
    """Entry point of this folder; sglang_fl calls it in every process."""
    registry.register(MyChipBackend())
