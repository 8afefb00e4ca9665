"""What a chip's backend consists of: where it works (probe), and how a group gets its transport (create)."""

from __future__ import annotations

import importlib.util

import torch

from sglang_fl.comm.backends.torch_dist import TorchTransport
from sglang_fl.comm.types import Backend, GroupContext
from sglang_fl.selection import Availability, Kind

SDK = "my_chip_sdk"
DEVICE_TYPE = "my_chip"


class MyChipTransport(TorchTransport):
    """Starts from torch.distributed's group; each operation that the chip does better is overridden.

    An operation sees contiguous tensors on the group's device, of a dtype that ``capabilities`` names, and enqueues
    on the current stream. What ``capabilities.operations`` leaves out is carried by torch.distributed on all ranks.
    """

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum ``tensor`` over the ranks, in place, on the current stream."""
        import my_chip_sdk  # type: ignore[import-not-found]  # the chip's own library

        my_chip_sdk.all_reduce(tensor.data_ptr(), tensor.numel(), str(tensor.dtype), self.name)


class MyChipBackend(Backend):
    """One object a process. ``name`` goes into SGLANG_FL_PER_OP and reports, ``vendor`` into allow and deny lists."""

    name = "template"
    kind = Kind.VENDOR
    vendor = "template"

    def probe(self, context: GroupContext) -> Availability:
        """Local and cheap; a "no" says why, since the reason is what users read."""
        if importlib.util.find_spec(SDK) is None:
            return Availability.no(f"{SDK} is not installed")
        if context.device.type != DEVICE_TYPE:
            return Availability.no(f"the group's tensors are on {context.device.type}, not on {DEVICE_TYPE}")
        return Availability.yes()

    def create(self, context: GroupContext) -> MyChipTransport:
        """All ranks of the group come here together; ``context.exchange`` hands values among them, bounded in time."""
        return MyChipTransport(self.name, context)
