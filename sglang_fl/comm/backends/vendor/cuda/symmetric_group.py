"""A group's symmetric memory: blocks of torch's that each rank can reach in all others, without multicast."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from sglang_fl.comm.backends.flagcx.machine import Machine, spread, this_machine
from sglang_fl.comm.backends.vendor.cuda.stream_order import StreamOrder
from sglang_fl.comm.errors import CommError
from sglang_fl.comm.types import GroupContext

# torch's own variables. The first keeps torch from making a multicast object of a block: these routes use none, and
# where the hardware only claims to have it, torch's rendezvous fails.
NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
SHARED_DEVICES = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


class SymmetricGroup:
    """What the transports of one group of ranks share.

    Attributes:
        group_name: torch's name of the process group over which blocks are exchanged; the operators want it.
        world_size: number of ranks.
        order: of all calls on its blocks.
        spans: first address and the one after the last, of the blocks handed out as registered memory.
        distances: by a span's first address, what :meth:`distances_of` gives for its block.
        kept: by a block's address, what a transport keeps with it for the next one of the same ranks.
    """

    def __init__(self, context: GroupContext) -> None:
        self._process_group = context.cpu_group
        self.group_name: str = context.cpu_group.group_name
        self.world_size = context.world_size
        self.order = StreamOrder(context.device)
        self.spans: tuple[tuple[int, int], ...] = ()
        self.distances: dict[int, torch.Tensor] = {}
        self.kept: dict[int, Any] = {}
        self._staging: dict[str, torch.Tensor] = {}
        self._handles: dict[int, Any] = {}

    def is_live(self) -> bool:
        """Whether the process group is still there, by whose name torch's operators and exchanges find the ranks."""
        try:
            dist.get_process_group_ranks(self._process_group)
        except KeyError:
            return False
        return True

    def holds(self, address: int) -> bool:
        """Whether a tensor that begins there lies in a block that was handed out."""
        return any(start <= address < end for start, end in self.spans)

    def registered(self, context: GroupContext, size: int) -> torch.Tensor:
        """A block to hand out, ``size`` bytes (uint8). All ranks must call it. Raises: CommError."""
        block = self._block(context, size)
        self.distances[block.data_ptr()] = self.distances_of(block)
        self.spans += ((block.data_ptr(), block.data_ptr() + size),)
        return block

    def distances_at(self, address: int) -> torch.Tensor | None:
        """From a tensor that begins there to the peers' at the same place; None if it is in no block handed out."""
        for start, end in self.spans:
            if start <= address < end:
                return self.distances[start]
        return None

    def staging(self, context: GroupContext, name: str, size: int) -> torch.Tensor:
        """The buffer that ``name`` copies ordinary memory through, at least ``size`` bytes. All ranks must call it."""
        buffer = self._staging.get(name)
        # A creation that failed may have left a buffer on some ranks.
        if not all(context.exchange("look for the buffer", buffer is not None and buffer.numel() >= size)):
            buffer = self._staging[name] = self._block(context, size)
        assert buffer is not None
        return buffer

    def addresses_of(self, block: torch.Tensor) -> tuple[int, list[int]]:
        """This rank's place among them, and where each rank's block lies, as this process sees it.

        Raises:
            CommError: torch gave another address than the block's.
        """
        handle = self._handles[block.data_ptr()]
        rank, addresses = int(handle.rank), [int(address) for address in handle.buffer_ptrs]
        if addresses[rank] != block.data_ptr():
            raise CommError(
                f"torch's symmetric memory: a block at {block.data_ptr():#x} has the address {addresses[rank]:#x} "
                f"for its peers"
            )
        return rank, addresses

    def distances_of(self, block: torch.Tensor) -> torch.Tensor:
        """See :func:`distances_from`: of a block of this group, not to be called in a capture. Raises: CommError."""
        rank, addresses = self.addresses_of(block)
        return distances_from(rank, addresses, block.device)

    def _block(self, context: GroupContext, size: int) -> torch.Tensor:
        import torch.distributed._symmetric_memory as symmetric_memory

        block, problem = None, ""
        try:
            block = symmetric_memory.empty(size, dtype=torch.uint8, device=context.device)
        except RuntimeError as error:
            problem = _first_line(error)
        # Before any rank waits for the others within torch, where the limit is the store's.
        problems = context.exchange("allocate symmetric memory", problem)
        refused = [(context.ranks[rank], text) for rank, text in enumerate(problems) if text]
        if block is None or refused:
            rank, text = refused[0]
            raise CommError(f"global rank {rank} cannot allocate {size} bytes of symmetric memory: {text}")
        try:
            with _without_multicast():
                # Also a later group's, of the same ranks: the operators would exchange it again, in a capture too.
                self._handles[block.data_ptr()] = symmetric_memory.rendezvous(block, self._process_group)
        except RuntimeError as error:
            raise CommError(f"torch's symmetric memory cannot be exchanged: {_first_line(error)}") from error
        return block


def distances_from(rank: int, addresses: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 on ``device``: bytes from the block of ``rank`` to each rank's, from their addresses in this process."""
    return torch.tensor([address - addresses[rank] for address in addresses], dtype=torch.int64, device=device)


@dataclass(frozen=True)
class Place:
    """Where a rank's memory is.

    Attributes:
        machine: of the process.
        gpu: the device's UUID.
        reachable: UUIDs of this process's devices whose memory its own device reaches, itself among them.
        visible: all of this process's.
        may_share: whether torch is told to take ranks on one GPU.
    """

    machine: Machine
    gpu: str
    reachable: frozenset[str]
    visible: frozenset[str]
    may_share: bool


def this_place(device: torch.device) -> Place:
    """Of the calling rank, whose tensors are on ``device``."""
    own = device.index if device.index is not None else torch.cuda.current_device()
    gpus = {index: str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())}
    reachable = {gpu for index, gpu in gpus.items() if index == own or torch.cuda.can_device_access_peer(own, index)}
    may_share = os.environ.get(SHARED_DEVICES) == "1"
    return Place(this_machine(), gpus[own], frozenset(reachable), frozenset(gpus.values()), may_share)


def refusal(places: Sequence[Place], ranks: Sequence[int]) -> str:
    """Why ranks at these places have no symmetric memory; the same text on all, empty if nothing speaks against it."""
    apart = spread([place.machine for place in places], ranks)
    if apart:
        return f"symmetric memory needs GPUs of one machine: {apart}"
    for rank, place in zip(ranks, places, strict=True):
        for other_rank, other in zip(ranks, places, strict=True):
            if other_rank == rank:
                continue
            if other.gpu == place.gpu and not place.may_share:
                return (
                    f"global ranks {rank} and {other_rank} are on the same GPU; for a trial set {SHARED_DEVICES}=1 "
                    f"on all ranks"
                )
            if other.gpu in place.visible and other.gpu not in place.reachable:
                return f"the GPU of global rank {rank} cannot reach the memory of global rank {other_rank}'s (no P2P)"
    return ""


@contextmanager
def _without_multicast() -> Iterator[None]:
    if NO_MULTICAST in os.environ:
        yield
        return
    os.environ[NO_MULTICAST] = "1"
    try:
        yield
    finally:
        del os.environ[NO_MULTICAST]


def _first_line(error: RuntimeError) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
