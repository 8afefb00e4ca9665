"""The route over torch's symmetric memory that reads registered memory of the peers with a kernel of our own.

What SGLang's custom one-shot kernel does, in memory that it cannot take in a graph. Ordinary memory is copied into a
shared buffer first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_fl import triton_launch
from sglang_fl.comm.backends.vendor.cuda.push import DTYPES, PushBackend
from sglang_fl.comm.backends.vendor.cuda.symmetric import (
    STAGING_BYTES,
    AllReduceAlone,
    SymmetricRegistrar,
    group_of,
    pieces,
    prove,
)
from sglang_fl.comm.backends.vendor.cuda.symmetric_group import SymmetricGroup, distances_from
from sglang_fl.comm.errors import CommError
from sglang_fl.comm.registered import STAGING_OPTION
from sglang_fl.comm.types import GroupContext, Transport

WARPS = 16
PACK_BYTES = WARPS * 32 * 16  # 16 bytes a thread
# A step of a program is so many packs, all under way at once: the fewest with which the programs need no second step.
PACKS = (1, 2, 4)
PACKS_OF_ALL_RANKS = 16  # at most, together: each is four registers of a thread
PROGRAMS_PER_PROCESSOR = 1
# 65536 registers of a multiprocessor for so many programs, which wait for their peers and so must all be resident.
REGISTERS = 65536 // (PROGRAMS_PER_PROCESSOR * WARPS * 32)
# One stage: no load of a later step may come before its wait.
OPTIONS = {"num_warps": WARPS, "num_stages": 1, "maxnreg": REGISTERS}
ROW_BYTES = 128  # of a program's flags; ROW in flags.py
SMALLEST_STAGING_BYTES = 2**16
MOST_COUNT = 2**30  # of a call of the kernel, so that its offsets fit into 32 bits
_ALIGNED = triton_launch.ALIGNMENT


@dataclass(frozen=True)
class PullFlags:
    """What the programs wait on, as one rank sees it. Zeros on all before the first call.

    Attributes:
        flags: int32 [programs, ROW_BYTES // 4], this rank's, in memory that all reach; a rank has a column.
        distances: int64, bytes from there to each rank's.
        counters: int32 [programs], this rank's own.
        rank: this one's place in ``distances``.
    """

    flags: torch.Tensor
    distances: torch.Tensor
    counters: torch.Tensor
    rank: int

    @classmethod
    def at(cls, block: torch.Tensor, addresses: Sequence[int], rank: int) -> PullFlags:
        """Of a zeroed ``block`` (uint8); ``addresses`` are those of all ranks' blocks, as this process sees them."""
        flags = block.view(torch.int32).view(-1, ROW_BYTES // 4)
        counters = torch.zeros(len(flags), dtype=torch.int32, device=block.device)
        return cls(flags, distances_from(rank, addresses, block.device), counters, rank)


class PullTransport(AllReduceAlone):
    """Of any length; the kernel takes more steps where it is longer than one of all programs."""

    def __init__(
        self,
        name: str,
        context: GroupContext,
        group: SymmetricGroup,
        flags: PullFlags,
        staging: torch.Tensor,
        staging_distances: torch.Tensor,
    ) -> None:
        """``staging``: uint8, what ordinary memory is copied into, with the distances to the peers' of it."""
        from sglang_fl.comm.backends.vendor.cuda.pull_kernel import pull_kernel

        super().__init__(name, context, DTYPES)
        self.registrar = SymmetricRegistrar(name, context, group)
        self._group = group
        self._flags = flags
        self._programs = len(flags.flags)
        packs = packs_for(context.world_size)
        self._steps = steps_of(self._programs, packs)
        self._staging = {dtype: staging.view(dtype) for dtype in sorted(DTYPES, key=str)}  # alike on all ranks
        self._staging_distances = staging_distances
        self._launches = {
            (dtype, is_aligned, each): _bound(pull_kernel, flags, dtype, is_aligned, each, context)
            for dtype in DTYPES
            for is_aligned in (True, False)
            for each in packs
        }

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """See :meth:`Transport.all_reduce`."""
        self._group.order.take_turn()
        self._sum(tensor, tensor)

    def all_reduce_new(self, tensor: torch.Tensor) -> torch.Tensor:
        """See :meth:`Transport.all_reduce_new`; the kernel writes to another place, nothing is copied out."""
        output = torch.empty_like(tensor)
        self._group.order.take_turn()
        self._sum(tensor, output)
        return output

    def _sum(self, source: torch.Tensor, target: torch.Tensor) -> None:
        distances, count = self._group.distances_at(source.data_ptr()), source.numel()
        if distances is not None and 0 < count <= MOST_COUNT:
            self._pull(source, target, distances)
            return
        given, taken = source.view(-1), target.view(-1)
        if distances is not None:
            for start, end in pieces(count, MOST_COUNT):
                self._pull(given[start:end], taken[start:end], distances)
            return
        staging = self._staging[source.dtype]
        for start, end in pieces(count, staging.numel()):
            # No peer still reads the buffer: the call before has ended after all had read it.
            copy = staging[: end - start].copy_(given[start:end])
            self._pull(copy, taken[start:end], self._staging_distances)

    def _pull(self, source: torch.Tensor, target: torch.Tensor, distances: torch.Tensor) -> None:
        flags, count, dtype = self._flags, source.numel(), source.dtype
        given, taken = source.data_ptr(), target.data_ptr()
        # Whether they are aligned may differ between the ranks, how many programs and steps there are must not.
        programs, packs = grid_of(count * dtype.itemsize, self._programs, self._steps)
        launch = self._launches[dtype, not (given | taken | count) % _ALIGNED, packs]
        launch(programs, 1, source, target, distances, flags.flags, flags.distances, flags.counters, count)


def packs_for(world_size: int) -> tuple[int, ...]:
    """Those of ``PACKS`` for which the registers last."""
    return tuple(packs for packs in PACKS if packs * world_size <= max(PACKS_OF_ALL_RANKS, world_size))


def steps_of(programs: int, packs: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(bytes that so many programs do in one step, packs of each program in it)."""
    return tuple((each * programs * PACK_BYTES, each) for each in packs)


def grid_of(size: int, programs: int, steps: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """(programs, packs of each in a step) for ``size`` bytes: one step where there is one that is large enough."""
    packs = next((each for most, each in steps if size <= most), steps[-1][1])
    return min(-(-size // (packs * PACK_BYTES)), programs), packs


def _bound(
    kernel: Any, flags: PullFlags, dtype: torch.dtype, is_aligned: bool, packs: int, context: GroupContext
) -> triton_launch.Launch:
    """The kernel compiled for tensors of that kind; now, since in a capture it could not be."""
    whole = torch.zeros(4 * _ALIGNED, dtype=dtype, device=flags.flags.device)
    example, count = (whole, _ALIGNED) if is_aligned else (whole[1:], _ALIGNED + 1)
    constants = {
        "rank": flags.rank,
        "world": context.world_size,
        "block": packs * PACK_BYTES // dtype.itemsize,
    }
    arguments = (example, example, flags.distances, flags.flags, flags.distances, flags.counters, count)
    device = -1 if context.device.type == "cpu" else example.get_device()
    return triton_launch.bind(kernel, arguments, constants, OPTIONS, device)


class PullBackend(PushBackend):
    """The route ``symm_pull``; it needs what ``symm_push`` needs."""

    def create(self, context: GroupContext) -> Transport:
        """Exchange flags and buffer, and prove with calls of each dtype that sums are right.

        Raises:
            CommError: there are more ranks than a program has flags, or as :meth:`PushBackend.create`.
        """
        if context.world_size * 4 > ROW_BYTES:
            raise CommError(f"{self.name} is for up to {ROW_BYTES // 4} ranks, not {context.world_size}")
        group = group_of(context)
        asked = int(context.options.get(STAGING_OPTION, STAGING_BYTES))
        size = max(-(-asked // _ALIGNED) * _ALIGNED, SMALLEST_STAGING_BYTES)
        staging = group.staging(context, self.name, size)
        flags = _flags_of(self.name, group, context)
        transport = PullTransport(self.name, context, group, flags, staging, group.distances_of(staging))
        prove(transport, context)
        return transport


def _flags_of(name: str, group: SymmetricGroup, context: GroupContext) -> PullFlags:
    """Those of the group, made and cleared for its first transport. All ranks must call it."""
    own = torch.cuda.get_device_properties(context.device).multi_processor_count
    least: int = min(context.exchange("compare the GPUs' multiprocessors", own))
    programs = least * PROGRAMS_PER_PROCESSOR
    block = group.staging(context, f"{name} flags of {programs}", programs * ROW_BYTES)
    flags: PullFlags | None = group.kept.get(block.data_ptr())
    if flags is None:
        block.zero_()
        torch.cuda.synchronize(context.device)
        context.exchange("clear the block of symmetric memory", None)  # before any peer writes to it
        rank, addresses = group.addresses_of(block)
        flags = group.kept[block.data_ptr()] = PullFlags.at(block, addresses, rank)
    return flags
