"""Collectives over a torch.distributed group: the reference, and what the vendors' own groups build on."""

from sglang_fl.comm.backends.torch_dist.transport import TorchBackend, TorchTransport

__all__ = ["TorchBackend", "TorchTransport"]
