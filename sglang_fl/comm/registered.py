"""Memory that every rank of a group has registered, at the same offsets, so that sums of it need no copies."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

import torch

from sglang_fl.comm.errors import AgreementError, CommError
from sglang_fl.comm.types import GroupContext

# In the options of a context for a route's backend: how many bytes of ordinary memory a call of it has at most.
STAGING_OPTION = "staging_bytes"
BLOCK_BYTES = 64 * 2**20
ALIGNMENT = 256  # of each tensor within a block, bytes; more than any kernel's vectors ask for


class Registrar(Protocol):
    """What of a transport knows about registered memory.

    Attributes:
        name: of its transport, for errors and reports.
        makes_blocks: whether :meth:`block` can be called; others only :meth:`adopt` what another one made.
        needs_own_blocks: it can take no other's, and so makes them for all.
    """

    name: str
    makes_blocks: bool
    needs_own_blocks: bool

    def block(self, size: int) -> torch.Tensor:
        """``size`` bytes (uint8), registered for the transport. All ranks must call it, with the same size.

        Raises:
            CommError: it cannot be had, on any rank.
        """

    def adopt(self, address: int, size: int) -> str:
        """Register ``size`` bytes that another one made; why that cannot be, or "". All ranks must call it.

        Raises:
            CommError: it can be on some ranks only, which might then choose different algorithms for one call.
        """


class RegisteredMemory:
    """The registered memory of one group, handed out tensor by tensor; what was handed out stays for the group's life.

    Nothing is given back in between: ranks that freed in different orders would use different offsets, and a kernel
    that reads a peer's memory at its own offset would add up something else, without an error.

    Attributes:
        spans: first address and the one after the last, of each block; the same number on all ranks.
        notes: which transports take blocks as ordinary memory, and why.
    """

    def __init__(self, context: GroupContext, registrars: Iterable[Registrar]) -> None:
        self._context = replace(context, creation_ends_s=None)
        self._registrars = tuple(registrars)
        self._blocks: list[torch.Tensor] = []
        self._used = 0  # of the last block, bytes
        self.spans: tuple[tuple[int, int], ...] = ()
        self.notes: tuple[str, ...] = ()

    def holds(self, address: int) -> bool:
        """Whether a tensor that begins at ``address`` is registered memory: alike on all ranks if it came from here."""
        return any(start <= address < end for start, end in self.spans)

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """A new, contiguous tensor. All ranks of the group must call it, with equal arguments and in the same order.

        Not while a graph is captured: a block that is made waits for the device. May take a new block of
        ``BLOCK_BYTES``, or as much as the tensor needs.

        Raises:
            AgreementError: the ranks' arguments or earlier calls differ, or a rank did not arrive; on all ranks.
            CommError: no transport of the group registers memory, or none is left.
        """
        size = math.prod(shape) * dtype.itemsize
        wanted = (tuple(shape), str(dtype), len(self._blocks), self._used)
        views = self._context.exchange("take registered memory", wanted)
        for rank, view in enumerate(views):
            if view != views[0]:
                ranks = self._context.ranks
                raise AgreementError(
                    f"group {self._context.name}: registered memory must be taken alike on all ranks: global rank "
                    f"{ranks[0]} asks for {_in_words(views[0])}, global rank {ranks[rank]} for {_in_words(view)}"
                )
        if not self._blocks or self._used + size > self._blocks[-1].numel():
            self._add_block(max(size, BLOCK_BYTES))
        start = self._used
        self._used += -(-size // ALIGNMENT) * ALIGNMENT
        return self._blocks[-1][start : start + size].view(dtype).view(shape)

    def close(self) -> None:
        """Forget the blocks: tensors that are left are ordinary memory from now on. Local."""
        self.spans = ()
        self._blocks = []
        self._used = 0

    def _add_block(self, size: int) -> None:
        maker = next((registrar for registrar in self._registrars if registrar.makes_blocks), None)
        if maker is None:
            names = ", ".join(registrar.name for registrar in self._registrars) or "none"
            raise CommError(
                f"group {self._context.name}: no transport of this group makes registered memory (asked: {names}). "
                f"Give it a route that does, such as SGLANG_FL_COMM_ROUTES='all_reduce=symm_two_shot@registered'."
            )
        block = maker.block(size)
        for registrar in self._registrars:
            if registrar is not maker:
                reason = registrar.adopt(block.data_ptr(), block.numel())
                self.notes += (f"{registrar.name} takes registered memory as ordinary memory: {reason}",) * bool(reason)
        self._blocks.append(block)
        self._used = 0
        self.spans += ((block.data_ptr(), block.data_ptr() + block.numel()),)


def _in_words(wanted: tuple[tuple[int, ...], str, int, int]) -> str:
    shape, dtype, blocks, used = wanted
    return f"{dtype}{list(shape)} after {blocks} block(s) and {used} bytes"
