"""The route for few bytes over torch's symmetric memory with a kernel of our own: all_reduce with one wait in a call.

It takes memory of every kind as it is, in a graph too: only the buffer that the ranks write to is symmetric.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_fl import triton_launch
from sglang_fl.comm.backends.vendor.cuda.stream_order import StreamOrder
from sglang_fl.comm.backends.vendor.cuda.symmetric import AllReduceAlone, SymmetricBackend, group_of, pieces, prove
from sglang_fl.comm.registered import CALL_OPTION
from sglang_fl.comm.types import GroupContext, Transport
from sglang_fl.selection import Availability

DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
WARPS = 8
PROGRAM_BYTES = WARPS * 32 * 16  # 16 bytes a thread
SMALLEST_SLOT_BYTES, LARGEST_SLOT_BYTES = 2**16, 2**20
# What Triton compiles for: counts and addresses that are multiples of it, or any.
_ALIGNED = 16


@dataclass(frozen=True)
class PushBuffer:
    """What the ranks write to, as one of them sees it. Zeros on all before the first call.

    Attributes:
        block: this rank's, bytes; :func:`block_bytes` long.
        distances: int64, bytes from ``anchor`` to each rank's block.
        anchor: 16 bytes at an address that is a multiple of 16.
        counter: int32, calls so far and programs that have ended.
        slot_bytes: what a call carries at most.
        rank: this one's place in ``distances``.
    """

    block: torch.Tensor
    distances: torch.Tensor
    anchor: torch.Tensor
    counter: torch.Tensor
    slot_bytes: int
    rank: int

    @classmethod
    def at(cls, block: torch.Tensor, addresses: Sequence[int], rank: int, slot_bytes: int) -> PushBuffer:
        """Of a zeroed ``block``; ``addresses`` are those of all ranks' blocks, as this process sees them."""
        device = block.device
        anchor = torch.zeros(2 * _ALIGNED, dtype=torch.uint8, device=device)
        anchor = anchor[-anchor.data_ptr() % _ALIGNED :][:_ALIGNED]
        distances = torch.tensor([address - anchor.data_ptr() for address in addresses], device=device)
        return cls(block, distances, anchor, torch.zeros(2, dtype=torch.int32, device=device), slot_bytes, rank)


def flag_bytes(world_size: int, slot_bytes: int) -> int:
    """At the beginning of a block."""
    programs = -(-slot_bytes // PROGRAM_BYTES)
    return -(-programs * world_size * 4 // 256) * 256


def block_bytes(world_size: int, slot_bytes: int) -> int:
    """Of flags and two slots for each rank."""
    return flag_bytes(world_size, slot_bytes) + 2 * world_size * slot_bytes


class PushTransport(AllReduceAlone):
    """Of any length, in pieces of a slot."""

    def __init__(self, name: str, context: GroupContext, order: StreamOrder, buffer: PushBuffer) -> None:
        from sglang_fl.comm.backends.vendor.cuda.push_kernel import push_kernel

        super().__init__(name, context, DTYPES)
        self._order = order
        self._buffer = buffer
        self._launches = {
            (dtype, aligned): _bound(push_kernel, buffer, dtype, aligned, context)
            for dtype in DTYPES
            for aligned in (True, False)
        }
        self._anchors = {dtype: buffer.anchor.view(dtype) for dtype in DTYPES}

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """See :meth:`Transport.all_reduce`."""
        self._sum(tensor, tensor)

    def all_reduce_new(self, tensor: torch.Tensor) -> torch.Tensor:
        """See :meth:`Transport.all_reduce_new`; nothing is copied."""
        output = torch.empty_like(tensor)
        self._sum(tensor, output)
        return output

    def _sum(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._order.take_turn()
        dtype, item = source.dtype, source.itemsize
        buffer, anchor = self._buffer, self._anchors[dtype]
        given, taken = source.view(-1), target.view(-1)
        for start, end in pieces(given.numel(), buffer.slot_bytes // item):
            part, into, count = given[start:end], taken[start:end], end - start
            aligned = not (part.data_ptr() | into.data_ptr() | count) % _ALIGNED
            programs = -(-count * item // PROGRAM_BYTES)
            self._launches[dtype, aligned](programs, 1, part, into, anchor, buffer.distances, buffer.counter, count)


def _bound(
    kernel: Any, buffer: PushBuffer, dtype: torch.dtype, aligned: bool, context: GroupContext
) -> triton_launch.Launch:
    """The kernel compiled for tensors like ``example``'s; now, since in a capture it could not be."""
    whole = torch.zeros(4 * _ALIGNED, dtype=dtype, device=buffer.block.device)
    example, count = (whole, _ALIGNED) if aligned else (whole[1:], _ALIGNED + 1)
    constants = {
        "rank": buffer.rank,
        "world": context.world_size,
        "flag_bytes": flag_bytes(context.world_size, buffer.slot_bytes),
        "slot_bytes": buffer.slot_bytes,
        "block": PROGRAM_BYTES // dtype.itemsize,
    }
    arguments = (example, example, buffer.anchor.view(dtype), buffer.distances, buffer.counter, count)
    device = -1 if context.device.type == "cpu" else example.get_device()
    return triton_launch.bind(kernel, arguments, constants, {"num_warps": WARPS}, device)


class PushBackend(SymmetricBackend):
    """The route ``symm_push``; its groups and refusals are those of the routes over torch's kernels."""

    def __init__(self, name: str) -> None:
        super().__init__(name, None)

    def probe(self, context: GroupContext) -> Availability:
        """Available on CUDA where torch has symmetric memory, and Triton is there."""
        availability = super().probe(context)
        if availability.available and importlib.util.find_spec("triton") is None:
            return Availability.no("Triton is not installed")
        return availability

    def create(self, context: GroupContext) -> Transport:
        """Exchange the block, and prove with calls of every kind that sums are right."""
        group = group_of(context)
        slot_bytes = slot_bytes_for(context)
        block = group.staging(context, f"{self.name} {slot_bytes}", block_bytes(context.world_size, slot_bytes))
        buffer = group.kept.get(block.data_ptr())
        if buffer is None:
            block.zero_()
            torch.cuda.synchronize(context.device)
            context.exchange("clear the block of symmetric memory", None)  # before any peer writes to it
            rank, addresses = group.addresses_of(block)
            buffer = group.kept[block.data_ptr()] = PushBuffer.at(block, addresses, rank, slot_bytes)
        transport = PushTransport(self.name, context, group.order, buffer)
        prove(transport, context)
        return transport


def slot_bytes_for(context: GroupContext) -> int:
    """What its largest call has, of either memory: registered memory goes through the slots, too."""
    asked = int(context.options.get(CALL_OPTION, LARGEST_SLOT_BYTES))
    return min(max(-(-asked // PROGRAM_BYTES) * PROGRAM_BYTES, SMALLEST_SLOT_BYTES), LARGEST_SLOT_BYTES)
