"""Registers torch.distributed, the reference backend: available on every device."""

from sglang_fl.comm.backends.torch_dist.transport import TorchBackend
from sglang_fl.comm.types import BackendRegistry
from sglang_fl.selection import Kind


def register_comm(registry: BackendRegistry) -> None:
    """Entry point of this folder."""
    registry.register(TorchBackend("torch", Kind.REFERENCE))
