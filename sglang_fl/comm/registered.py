"""Memory that every rank of a group has registered, at the same offsets, so that sums of it need no copies."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import torch

from sglang_fl.comm.errors import AgreementError, CommError
from sglang_fl.comm.types import GroupContext

# In the options of a context for a route's backend, absent where there is no limit: how many bytes a call of it has at
# most, and how many where it is of ordinary memory; "0" if none is.
CALL_OPTION, STAGING_OPTION = "call_bytes", "staging_bytes"
BLOCK_BYTES = 64 * 2**20
ALIGNMENT = 256  # of each tensor within a block, bytes; more than any kernel's vectors ask for
MOST_BYTES = 2**63 - 1  # that torch can count


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
    that reads a peer's memory at its own offset would add up something else, without an error. For the same reason
    nothing more is handed out once a rank did not come to a call, or the group is destroyed.

    Attributes:
        spans: first address and the one after the last, of each block; the same number on all ranks.
        notes: which transports take blocks as ordinary memory, and why.
    """

    def __init__(self, context: GroupContext, registrars: Iterable[Registrar]) -> None:
        self._context = replace(context, creation_ends_s=None)
        self._registrars = tuple(registrars)
        self._blocks: list[torch.Tensor] = []
        self._used = 0  # of the last block, bytes
        self._refusal = ""
        self.spans: tuple[tuple[int, int], ...] = ()
        self.notes: tuple[str, ...] = ()

    def holds(self, address: int) -> bool:
        """Whether a tensor that begins at ``address`` is registered memory: alike on all ranks if it came from here."""
        return any(start <= address < end for start, end in self.spans)

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """A new, contiguous tensor. All ranks of the group must call it, with equal arguments and in the same order.

        Not while a graph is captured: a block that is made waits for the device. May take a new block of
        ``BLOCK_BYTES``, or as much as the tensor needs.

        Args:
            shape: whole numbers of 0 or more, no bool; what has an ``__index__``, as NumPy's integers, is one.

        Raises:
            AgreementError: the ranks' arguments or earlier calls differ, or a rank did not arrive; on all ranks.
            CommError: a rank's arguments are none of those allowed, which all ranks hear; no transport of the group
                registers memory, or none is left. At once and on this rank alone: a rank did not arrive at an earlier
                call, or the group is destroyed.
        """
        if self._refusal:
            raise CommError(self._refusal)
        sizes, refusal = _checked(shape, dtype)
        self._require_alike((refusal, (sizes, str(dtype), len(self._blocks), self._used)))
        size = math.prod(sizes) * dtype.itemsize
        if not self._blocks or self._used + size > self._blocks[-1].numel():
            with self._closed_if_one_is_missing():
                self._add_block(max(size, BLOCK_BYTES))
        start = self._used
        tensor = self._blocks[-1][start : start + size].view(dtype).view(sizes)
        self._used += -(-size // ALIGNMENT) * ALIGNMENT
        return tensor

    def refuse(self, reason: str) -> None:
        """Hand out nothing more, for ``reason``; what was handed out stays as it is. Local."""
        self._refusal = reason

    def close(self) -> None:
        """Forget the blocks: tensors that are left are ordinary memory from now on. Local."""
        self.spans = ()
        self._blocks = []
        self._used = 0

    def _require_alike(self, own: _View) -> None:
        # What is refused on one rank is exchanged, too: the others would wait for that rank until their limit.
        with self._closed_if_one_is_missing():
            views: list[_View] = self._context.exchange("take registered memory", own)
        ranks, group = self._context.ranks, self._context.name
        for rank, (refusal, _) in zip(ranks, views, strict=True):
            if refusal:
                raise CommError(f"group {group}: registered memory cannot be taken: global rank {rank} gave {refusal}")
        first = views[0][1]
        for rank, (_, wanted) in zip(ranks, views, strict=True):
            if wanted != first:
                raise AgreementError(
                    f"group {group}: registered memory must be taken alike on all ranks: global rank {ranks[0]} asks "
                    f"for {_in_words(first)}, global rank {rank} for {_in_words(wanted)}"
                )

    @contextmanager
    def _closed_if_one_is_missing(self) -> Iterator[None]:
        try:
            yield
        except AgreementError as error:
            self.refuse(
                f"group {self._context.name}: its registered memory is closed, since an earlier call failed on all "
                f"ranks ({error}). Make a new group."
            )
            raise

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


_Wanted = tuple[tuple[int, ...], str, int, int]  # shape, dtype, blocks and bytes so far
_View = tuple[str, _Wanted]  # and before it why the arguments are refused, or ""


def _checked(shape: Sequence[object], dtype: object) -> tuple[tuple[int, ...], str]:
    """``shape`` as integers; or none, and why it or ``dtype`` is refused."""
    if not isinstance(dtype, torch.dtype):
        return (), f"dtype={dtype!r}; allowed is a dtype of torch, such as torch.bfloat16"
    sizes = []
    for place, found in enumerate(shape):
        size = _whole(found)
        if size is None or not 0 <= size <= MOST_BYTES:
            shown = repr(found) if size is None else _short(size)
            return (), f"{shown} as size {place} of the shape; allowed are whole numbers from 0 to 2**63 - 1"
        sizes.append(size)
    total = math.prod(sizes) * dtype.itemsize
    if total > MOST_BYTES:
        return (), f"the shape {sizes} of {dtype}; allowed are at most 2**63 - 1 bytes"
    return tuple(sizes), ""


def _whole(found: object) -> int | None:
    if isinstance(found, bool):
        return None
    try:
        return operator.index(found)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):  # the latter: a tensor without a value
        return None


def _short(number: int) -> str:
    # Python refuses to write integers of thousands of digits.
    return str(number) if number.bit_length() <= 64 else f"an integer of {number.bit_length()} bits"


def _in_words(wanted: _Wanted) -> str:
    shape, dtype, blocks, used = wanted
    return f"{dtype}{list(shape)} after {blocks} block(s) and {used} bytes"
