"""Registers NCCL: the torch.distributed group on the vendor's library, and inside SGLang its own methods."""

from sglang_fl.comm.backends.torch_dist import TorchBackend
from sglang_fl.comm.types import BackendRegistry
from sglang_fl.selection import Kind


def register_comm(registry: BackendRegistry) -> None:
    """Entry point of this folder."""
    registry.register(TorchBackend("nccl", Kind.VENDOR, vendor="nvidia", c10d_backend="nccl"))
