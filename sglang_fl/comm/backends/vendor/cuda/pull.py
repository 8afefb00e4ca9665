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
PROGRAM_BYTES = WARPS * 32 * 16  # of one step: 16 bytes a thread
PROGRAMS_PER_PROCESSOR = 2
# 65536 registers of a multiprocessor for so many programs, which wait for their peers and so must all be resident.
REGISTERS = 65536 // (PROGRAMS_PER_PROCESSOR * WARPS * 32)
# One stage: no load of a later step may come before its wait.
OPTIONS = {"num_warps": WARPS, "num_stages": 1, "maxnreg": REGISTERS}
SMALLEST_STAGING_BYTES = 2**16
MOST_COUNT = 2**30  # of a call of the kernel, so that its offsets fit into 32 bits
_ALIGNED = triton_launch.ALIGNMENT


@dataclass(frozen=True)
class PullFlags:
    """What the programs wait on, as one rank sees it. Zeros on all before the first call.

    Attributes:
        flags: int32 [programs, ranks], this rank's, in memory that all reach.
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
        flags = block.view(torch.int32).view(-1, len(addresses))
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
        self._staging = {dtype: staging.view(dtype) for dtype in sorted(DTYPES, key=str)}  # alike on all ranks
        self._staging_distances = staging_distances
        self._launches = {
            (dtype, is_aligned, in_place): _bound(pull_kernel, flags, dtype, is_aligned, in_place, context)
            for dtype in DTYPES
            for is_aligned in (True, False)
            for in_place in (True, False)
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

    def prove_in_place(self) -> None:
        """One call of each dtype and alignment on the buffer itself, where :func:`prove` has proven it out of place.

        All ranks must call it. Raises: CommError: a sum is wrong.
        """
        world_size = self._group.world_size
        for dtype, staging in self._staging.items():
            for count in (_ALIGNED, _ALIGNED + 1):
                ones = staging[:count].fill_(1)
                self._pull(ones, ones, self._staging_distances)
                found = ones.tolist()
                if found != [world_size] * count:
                    raise CommError(
                        f"{self.name}: the sum in place of 1 in {dtype} over {world_size} ranks came out as {found}"
                    )

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
        launch = self._launches[dtype, not (given | taken | count) % _ALIGNED, given == taken]
        programs = min(-(-count * dtype.itemsize // PROGRAM_BYTES), self._programs)
        launch(programs, 1, source, target, distances, flags.flags, flags.distances, flags.counters, count)


def _bound(
    kernel: Any, flags: PullFlags, dtype: torch.dtype, is_aligned: bool, in_place: bool, context: GroupContext
) -> triton_launch.Launch:
    """The kernel compiled for tensors of that kind; now, since in a capture it could not be."""
    whole = torch.zeros(4 * _ALIGNED, dtype=dtype, device=flags.flags.device)
    example, count = (whole, _ALIGNED) if is_aligned else (whole[1:], _ALIGNED + 1)
    constants = {
        "rank": flags.rank,
        "world": context.world_size,
        "block": PROGRAM_BYTES // dtype.itemsize,
        "in_place": in_place,
    }
    arguments = (example, example, flags.distances, flags.flags, flags.distances, flags.counters, count)
    device = -1 if context.device.type == "cpu" else example.get_device()
    return triton_launch.bind(kernel, arguments, constants, OPTIONS, device)


class PullBackend(PushBackend):
    """The route ``symm_pull``; it needs what ``symm_push`` needs."""

    def create(self, context: GroupContext) -> Transport:
        """Exchange flags and buffer, and prove with calls of every kind that sums are right."""
        group = group_of(context)
        asked = int(context.options.get(STAGING_OPTION, STAGING_BYTES))
        size = max(-(-asked // _ALIGNED) * _ALIGNED, SMALLEST_STAGING_BYTES)
        staging = group.staging(context, self.name, size)
        flags = _flags_of(self.name, group, context)
        transport = PullTransport(self.name, context, group, flags, staging, group.distances_of(staging))
        prove(transport, context)
        transport.prove_in_place()
        return transport


def _flags_of(name: str, group: SymmetricGroup, context: GroupContext) -> PullFlags:
    """Those of the group, made and cleared for its first transport. All ranks must call it."""
    own = torch.cuda.get_device_properties(context.device).multi_processor_count
    least: int = min(context.exchange("compare the GPUs' multiprocessors", own))
    programs = least * PROGRAMS_PER_PROCESSOR
    block = group.staging(context, f"{name} flags of {programs}", programs * context.world_size * 4)
    flags: PullFlags | None = group.kept.get(block.data_ptr())
    if flags is None:
        block.zero_()
        torch.cuda.synchronize(context.device)
        context.exchange("clear the block of symmetric memory", None)  # before any peer writes to it
        rank, addresses = group.addresses_of(block)
        flags = group.kept[block.data_ptr()] = PullFlags.at(block, addresses, rank)
    return flags
