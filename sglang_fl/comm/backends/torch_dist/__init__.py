"""Collectives over a torch.distributed group: the reference, and what the vendors' own groups build on."""

from sglang_fl.comm.backends.torch_dist.transport import TorchBackend, TorchTransport, backwards_group

__all__ = ["TorchBackend", "TorchTransport", "backwards_group"]
