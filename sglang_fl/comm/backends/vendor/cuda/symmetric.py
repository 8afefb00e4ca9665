"""Routes over torch's symmetric memory, without multicast: all_reduce in one shot, for few bytes, or in two.

In one shot each rank reads what all others have and adds it up; in two each adds up its share and writes it to all.
A tensor of ordinary memory is copied through a buffer that the group shares; one of registered memory is used where
it lies. The kernels are torch's (``torch.ops.symm_mem``). They wait for the peers on the device, without a limit of
their own: the calls are recorded and watched as those of every other transport.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from sglang_fl.comm.backends.vendor.cuda.symmetric_group import SymmetricGroup, refusal, this_place
from sglang_fl.comm.errors import CommError
from sglang_fl.comm.registered import CALL_OPTION, STAGING_OPTION
from sglang_fl.comm.types import Backend, Capabilities, GroupContext, Operation, Transport
from sglang_fl.selection import Availability, Kind

# What torch's kernels are compiled for. Source: AT_DISPATCH_FLOAT_AND_BFLOAT16 in CUDASymmetricMemoryOps.cu.
DTYPES = frozenset({torch.bfloat16, torch.float32})
# Vectors of this size, and only they, go the short way; everything else through the buffer, padded.
VECTOR_BYTES = 16
# The world sizes for which torch compiles two shots into another tensor. Source: the same file.
OUT_OF_PLACE_WORLDS = frozenset({2, 4, 8})
STAGING_BYTES = 64 * 2**20
_SMALLEST_STAGING_BYTES = 2**16  # for the first call, which proves that the ranks reach each other
# Registered memory goes through the buffer where it is not aligned, or is to stay as it is: seldom, and in pieces of so
# much no slower.
_REGISTERED_STAGING_BYTES = 4 * 2**20
_SUM = "sum"
NEEDED = ("one_shot_all_reduce_out", "one_shot_all_reduce_copy_out", "two_shot_all_reduce_", "two_shot_all_reduce_out")


class AllReduceAlone(Transport):
    """A transport of this one operation."""

    def __init__(self, name: str, context: GroupContext, dtypes: frozenset[torch.dtype]) -> None:
        self.name = name
        self.capabilities = Capabilities(
            operations=frozenset({Operation.ALL_REDUCE}),
            reducible=dtypes,
            movable=frozenset(),
            device_types=frozenset({context.device.type}),
        )

    def _not_offered(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{self.name} offers all_reduce alone")

    all_gather = reduce_scatter = reduce = broadcast = gather = send = recv = _not_offered

    def close(self) -> None:
        """Nothing: peers may still use the blocks, which live as long as the process."""


class SymmetricTransport(AllReduceAlone):
    """The two ways differ in what carries a tensor of whole, aligned vectors."""

    def __init__(
        self,
        name: str,
        context: GroupContext,
        group: SymmetricGroup,
        staging: torch.Tensor,
        operators: Any = torch.ops.symm_mem,
    ) -> None:
        """``staging``: of whole vectors, from ``group``; ``operators``: torch's, which the tests replace on a CPU."""
        super().__init__(name, context, DTYPES)
        self.registrar = SymmetricRegistrar(name, context, group)
        self._group = group
        self._group_name = group.group_name
        self._operators = operators
        self._staging = {dtype: staging.view(dtype) for dtype in DTYPES}

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """See :meth:`Transport.all_reduce`."""
        self._group.order.take_turn()
        if self._is_registered(tensor) and _is_aligned(tensor):
            self._operators.two_shot_all_reduce_(tensor, _SUM, self._group_name)
        else:
            self._sum(tensor, tensor)

    def all_reduce_new(self, tensor: torch.Tensor) -> torch.Tensor:
        """See :meth:`Transport.all_reduce_new`; the kernels write to another place, nothing is copied out."""
        output = torch.empty_like(tensor)
        self._group.order.take_turn()
        if self._is_registered(tensor) and _is_aligned(tensor):
            self._sum_registered(tensor, output)
        else:
            self._sum(tensor, output)
        return output

    def _is_registered(self, tensor: torch.Tensor) -> bool:
        return bool(self._group.spans) and self._group.holds(tensor.data_ptr())

    def _sum(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Of ordinary memory, in pieces of the buffer's size; ``target`` may be ``source``."""
        staging = self._staging[source.dtype]
        given, taken = source.view(-1), target.view(-1)
        for start, end in pieces(given.numel(), staging.numel()):
            part, into = given[start:end], taken[start:end]
            if _is_aligned(part) and _is_aligned(into):
                self._sum_staged(staging[: end - start], part, into)
            else:
                staging[: end - start].copy_(part)
                # The padding adds up whatever lies there; nobody reads it.
                padded = staging[: _padded(part.nbytes) // part.itemsize]
                self._operators.two_shot_all_reduce_(padded, _SUM, self._group_name)
                into.copy_(staging[: end - start])

    @abstractmethod
    def _sum_staged(self, staging: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """``target`` receives the sum of ``source``; both are aligned and as long as ``staging``."""

    @abstractmethod
    def _sum_registered(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """``target``, another tensor, receives the sum of ``source``, which stays as it is."""


class OneShotTransport(SymmetricTransport):
    """Each rank adds up everything."""

    def all_reduce_result(self, tensor: torch.Tensor) -> torch.Tensor:
        """See :meth:`Transport.all_reduce_result`: of registered memory in a new tensor, since peers still read it."""
        if self._is_registered(tensor):
            return self.all_reduce_new(tensor)
        self.all_reduce(tensor)
        return tensor

    def _sum_staged(self, staging: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        self._operators.one_shot_all_reduce_copy_out(staging, source, _SUM, self._group_name, target)

    def _sum_registered(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._operators.one_shot_all_reduce_out(source, _SUM, self._group_name, target)


class TwoShotTransport(SymmetricTransport):
    """Each rank adds up its share."""

    def _sum_staged(self, staging: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        staging.copy_(source)
        if self._group.world_size in OUT_OF_PLACE_WORLDS:
            self._operators.two_shot_all_reduce_out(staging, _SUM, self._group_name, target)
        else:
            self._operators.two_shot_all_reduce_(staging, _SUM, self._group_name)
            target.copy_(staging)

    def _sum_registered(self, source: torch.Tensor, target: torch.Tensor) -> None:
        # Two shots of the source itself would leave this rank's share summed in it.
        self._sum(source, target)


class SymmetricRegistrar:
    """Hands out blocks of the group's symmetric memory; see :class:`sglang_fl.comm.registered.Registrar`."""

    makes_blocks = True
    needs_own_blocks = True

    def __init__(self, name: str, context: GroupContext, group: SymmetricGroup) -> None:
        self.name = name
        self._context = replace(context, creation_ends_s=None)
        self._group = group

    def block(self, size: int) -> torch.Tensor:
        """See :meth:`Registrar.block`."""
        return self._group.registered(self._context, size)

    def adopt(self, address: int, size: int) -> str:
        """See :meth:`Registrar.adopt`: those of the other transport of the same group are its own."""
        return "" if self._group.holds(address) else "its kernels reach torch's symmetric memory alone"


class SymmetricBackend(Backend):
    """One of the two ways; both share a group's blocks."""

    kind = Kind.VENDOR
    vendor = "nvidia"
    is_route_only = True

    def __init__(self, name: str, transport: type[SymmetricTransport] | None) -> None:
        """``transport``: what :meth:`create` makes; None for a backend that has its own."""
        self.name = name
        self._transport = transport

    def probe(self, context: GroupContext) -> Availability:
        """Available on CUDA where torch has the operators; where the ranks are is compared at the creation."""
        if context.device.type != "cuda":
            return Availability.no(f"the group's tensors are on {context.device.type}, not on cuda")
        missing = [name for name in NEEDED if not hasattr(torch.ops.symm_mem, name)]
        if missing:
            return Availability.no(f"torch {torch.__version__} lacks torch.ops.symm_mem.{', '.join(missing)}")
        return Availability.yes()

    def create(self, context: GroupContext) -> Transport:
        """Exchange the buffer, and prove with calls of each dtype that sums are right."""
        assert self._transport is not None
        group = group_of(context)
        staging = group.staging(context, self.name, staging_bytes_for(context))
        transport = self._transport(self.name, context, group, staging)
        prove(transport, context)
        return transport


_groups: dict[tuple[tuple[int, ...], str, str], SymmetricGroup] = {}
_ended: list[SymmetricGroup] = []  # whose process group is gone; peers may still use the blocks


def group_of(context: GroupContext) -> SymmetricGroup:
    """That of the same ranks, see :func:`shared_group`.

    Raises:
        CommError: where the ranks are, there is no symmetric memory; the same text on all.
    """
    places = context.exchange("compare places for symmetric memory", this_place(context.device))
    reason = refusal(places, context.ranks)
    if reason:
        raise CommError(reason)
    return shared_group(context)


def shared_group(context: GroupContext) -> SymmetricGroup:
    """One for all groups of the same ranks; those that are used at the same time have one each.

    All ranks must call it. Its blocks stay for the process's life, it is taken again as long as the process group that
    it was made for is there.
    """
    name = "" if context.shares_communicator else context.name
    key = (context.ranks, str(context.device), name)
    own = _groups.get(key)
    known = context.exchange("look for symmetric memory of the same ranks", own is not None and own.is_live())
    if not all(known):  # alike on all: a rank that has one would wait for the others in another
        if own is not None:
            _ended.append(own)
        _groups[key] = SymmetricGroup(context)
    return _groups[key]


def prove(transport: Transport, context: GroupContext) -> None:
    """One call of each dtype, of whole vectors and of an odd length.

    Raises:
        CommError: a sum is wrong.
    """
    for dtype in sorted(transport.capabilities.reducible, key=str):
        for count in (VECTOR_BYTES, VECTOR_BYTES + 1):
            ones = torch.ones(count, dtype=dtype, device=context.device)
            transport.all_reduce(ones)
            found = ones.tolist()
            if found != [context.world_size] * count:
                raise CommError(f"{transport.name}: the sum of 1 over {context.world_size} ranks came out as {found}")


def staging_bytes_for(context: GroupContext) -> int:
    """Of the buffer: what the largest call on ordinary memory has, or a piece of registered memory."""
    ordinary, any_call = (int(context.options.get(name, STAGING_BYTES)) for name in (STAGING_OPTION, CALL_OPTION))
    return max(_padded(ordinary), min(_padded(any_call), _REGISTERED_STAGING_BYTES), _SMALLEST_STAGING_BYTES)


def _is_aligned(tensor: torch.Tensor) -> bool:
    """Whether it is whole vectors. The operators look at the offset within the storage, the kernels at the address."""
    offset = int(tensor.storage_offset()) * tensor.itemsize
    return not (tensor.data_ptr() | offset | tensor.nbytes) % VECTOR_BYTES


def _padded(size: int) -> int:
    """``size`` bytes, up to whole vectors."""
    return -(-size // VECTOR_BYTES) * VECTOR_BYTES


def pieces(count: int, limit: int) -> Iterator[tuple[int, int]]:
    """Begin and end of parts of at most ``limit`` of ``count`` elements."""
    return ((start, min(start + limit, count)) for start in range(0, count, limit))
