"""What a chip's backend consists of: where it works (probe), and how a group gets its transport (create)."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from sglang_fl.comm.backends.torch_dist import TorchTransport, warm_up
from sglang_fl.comm.errors import CommError
from sglang_fl.comm.types import Backend, GroupContext
from sglang_fl.selection import Availability, Kind

SDK = "my_chip_sdk"
DEVICE_TYPE = "my_chip"


class MyChipTransport(TorchTransport):
    """Starts from torch.distributed's group; each operation that the chip does better is overridden.

    An operation sees contiguous tensors on the group's device, of a dtype that ``capabilities`` names, and enqueues
    on the current stream. What ``capabilities.operations`` leaves out is carried by torch.distributed on all ranks.
    """

    def __init__(self, name: str, context: GroupContext, communicator: Any) -> None:
        super().__init__(name, context)
        self._communicator = communicator

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum ``tensor`` over the ranks, in place, on the current stream."""
        self._communicator.all_reduce(tensor.data_ptr(), tensor.numel(), str(tensor.dtype))

    def close(self) -> None:
        """Give up the chip's communicator and what torch.distributed has for it; may be called twice."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.close()
        super().close()


class MyChipBackend(Backend):
    """One object a process. ``name`` goes into reports, ``vendor`` into SGLANG_FL_PER_OP and allow and deny lists."""

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
        """All ranks of the group come here together; each group has a communicator of the chip's library.

        Raises:
            CommError: rank 0 got no id; on all ranks, before one waits for the others in the library.
        """
        import my_chip_sdk  # type: ignore[import-not-found]  # the chip's own library

        unique_id, problem = b"", ""
        if context.rank == 0:
            try:
                unique_id = my_chip_sdk.unique_id()
            except RuntimeError as error:
                problem = f"{SDK} gave no unique id: {error}"
        unique_id, problem = context.exchange("hand out the chip's unique id", (unique_id, problem))[0]
        if problem:
            raise CommError(problem)
        communicator = my_chip_sdk.Communicator(unique_id, context.world_size, context.rank)
        warm_up(context)
        return MyChipTransport(self.name, context, communicator)
