"""Collectives over a torch.distributed group: the reference, and what the vendors' own groups build on."""

from sglang_fl.comm.backends.torch_dist.objects import broadcast_packed, packed, unpack_into
from sglang_fl.comm.backends.torch_dist.transport import TorchBackend, TorchTransport, warm_up
from sglang_fl.comm.backends.torch_dist.waiting import Waiting

__all__ = ["TorchBackend", "TorchTransport", "Waiting", "broadcast_packed", "packed", "unpack_into", "warm_up"]
