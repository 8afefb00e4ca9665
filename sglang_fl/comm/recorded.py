"""Records the calls of a transport whose library has no recorder: torch.distributed, a vendor's, SGLang's own."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang_fl.comm.marks import raw_stream_of
from sglang_fl.comm.places import CallSite
from sglang_fl.comm.recorder import Recorder
from sglang_fl.comm.ring import ENDED, TIME_OUT, CallRing
from sglang_fl.comm.types import GroupContext, Operation, Transport, Work


def recorded(context: GroupContext, transport: Transport) -> Transport:
    """``transport`` with its calls recorded; as it is where it does so itself, or the group is not to be recorded."""
    if not context.records or transport.recorders():
        return transport
    return RecordedTransport(transport, context)


class RecordedTransport(Transport):
    """A transport whose calls are recorded; point-to-point by direction, since each has its own order of calls.

    On host memory a broadcast's, send's or receive's time out is when its work was waited for or found done.
    """

    def __init__(self, inner: Transport, context: GroupContext) -> None:
        self.inner = inner
        self.name = inner.name
        self.capabilities = inner.capabilities
        self.extra_bytes = inner.extra_bytes
        self.registrar = inner.registrar
        self._context = context
        self._ring = self._new_ring(f"{context.name} {inner.name}", context.ranks, inner.interrupt)
        self._directions: dict[tuple[int, int], CallRing] = {}
        self._transfers: dict[tuple[Operation, int], Callable[..., Work]] = {}
        for method, subject in _COLLECTIVES.items():
            # Bound to the object: on the way to the library there is one call more and no look-up.
            setattr(self, method, _around(self._ring, subject, getattr(inner, method)))

    def recorders(self) -> tuple[Recorder, ...]:
        """See :meth:`Transport.recorders`: the collectives', then those of the directions used so far."""
        return (self._ring, *list(self._directions.values()))

    def exceptions(self) -> dict[str, str]:
        """See :meth:`Transport.exceptions`."""
        return self.inner.exceptions()

    # Bound in __init__; these only give the class its interface.

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """See :meth:`Transport.all_reduce`."""
        self.inner.all_reduce(tensor)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """See :meth:`Transport.all_gather`."""
        self.inner.all_gather(output, tensor)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """See :meth:`Transport.reduce_scatter`."""
        self.inner.reduce_scatter(output, tensor)

    def reduce(self, tensor: torch.Tensor, dst: int) -> None:
        """See :meth:`Transport.reduce`."""
        self.inner.reduce(tensor, dst)

    def broadcast(self, tensor: torch.Tensor, src: int) -> Work | None:
        """See :meth:`Transport.broadcast`."""
        return self.inner.broadcast(tensor, src)

    def gather(self, output: torch.Tensor | None, tensor: torch.Tensor, dst: int) -> None:
        """See :meth:`Transport.gather`."""
        self.inner.gather(output, tensor, dst)

    # Each direction of a pair of ranks has an order of calls of its own.

    def send(self, tensor: torch.Tensor, dst: int) -> Work:
        """See :meth:`Transport.send`."""
        call = self._transfers.get((Operation.SEND, dst)) or self._transfer(Operation.SEND, dst)
        return call(tensor, dst)

    def recv(self, tensor: torch.Tensor, src: int) -> Work:
        """See :meth:`Transport.recv`."""
        call = self._transfers.get((Operation.RECV, src)) or self._transfer(Operation.RECV, src)
        return call(tensor, src)

    def _transfer(self, operation: Operation, peer: int) -> Callable[..., Work]:
        own, other = self._context.ranks[self._context.rank], self._context.ranks[peer]
        direction = (own, other) if operation is Operation.SEND else (other, own)
        ring = self._directions.get(direction)
        if ring is None:
            name = f"{self._ring.name} {direction[0]}>{direction[1]}"
            ring = self._directions[direction] = self._new_ring(name, direction, self.inner.interrupt)
        ring.stream_behind = self.inner.transfer_stream(operation, peer)
        call = _around(ring, _TRANSFERS[operation], getattr(self.inner, operation.value))
        self._transfers[operation, peer] = call
        return call

    def _new_ring(self, name: str, ranks: tuple[int, ...], interrupt: Callable[[], bool]) -> CallRing:
        ring = CallRing(name, ranks, self._context.device, interrupt=interrupt)
        self._context.watch(ring)
        return ring

    def interrupt(self) -> bool:
        """See :meth:`Transport.interrupt`."""
        return self.inner.interrupt()

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        self.inner.close()


@dataclass(frozen=True)
class _Subject:
    """What of a method is recorded.

    Attributes:
        operation: the row's.
        tensor_at: which argument has the dtype and the count.
        peer_at: which one is the root or peer; None where there is none.
        has_work: whether it may return a work.
    """

    operation: Operation
    tensor_at: int = 0
    peer_at: int | None = None
    has_work: bool = False


_COLLECTIVES = {
    "all_reduce": _Subject(Operation.ALL_REDUCE),
    "all_reduce_result": _Subject(Operation.ALL_REDUCE),
    "all_reduce_new": _Subject(Operation.ALL_REDUCE),
    "all_gather": _Subject(Operation.ALL_GATHER, tensor_at=1),
    "reduce_scatter": _Subject(Operation.REDUCE_SCATTER),
    "reduce": _Subject(Operation.REDUCE, peer_at=1),
    "broadcast": _Subject(Operation.BROADCAST, peer_at=1, has_work=True),
    "gather": _Subject(Operation.GATHER, tensor_at=1, peer_at=2),
}
_TRANSFERS = {
    Operation.SEND: _Subject(Operation.SEND, peer_at=1, has_work=True),
    Operation.RECV: _Subject(Operation.RECV, peer_at=1, has_work=True),
}


def _around(ring: CallRing, subject: _Subject, call: Callable[..., Any]) -> Callable[..., Any]:
    operation, tensor_at, peer_at = subject.operation.value, subject.tensor_at, subject.peer_at
    has_work, on_host = subject.has_work, ring.marker is None
    rows, size = ring.rows, len(ring.rows)
    stream_behind = ring.stream_behind
    stream_now = raw_stream_of(ring.device) if stream_behind is None else (lambda: stream_behind)
    is_capturing = getattr(ring.marker, "is_capturing", None)
    site = CallSite()
    known, find = site.known, site.find
    frame_at, clock = sys._getframe, time.monotonic_ns

    def recorded_call(*arguments: Any) -> Any:
        if ring.refusal is not None:
            raise ring.refused(arguments[tensor_at].shape)
        try:
            frame = frame_at(site.depth)
            code, place = known[frame.f_lasti]
            if code is not frame.f_code:
                place = find()
        except (KeyError, ValueError):  # of another instruction, or from less deep in the stack
            place = find()
        tensor = arguments[tensor_at]
        peer = None if peer_at is None else arguments[peer_at]
        stream, captured = (0, False) if is_capturing is None else (stream_now(), is_capturing())
        if captured:
            ring.has_captured_calls = True
        number = ring.number + 1
        row = [number, operation, tensor.dtype, tensor.numel(), peer, stream, captured, place, clock(), None, "", False]
        rows[number % size] = row
        ring.number = number
        try:
            result = call(*arguments)
        except BaseException as error:
            told = ring.failed(row, error, tensor.shape)
            if told is error:
                raise
            raise told from error
        if has_work and result is not None:
            if not on_host:
                ring.enqueued(row)
            return ring.watch(row, result, tensor.shape)
        row[TIME_OUT] = clock()
        row[ENDED] = True
        if ring.mark_wanted:
            ring.mark(row, is_close=True)
        return result

    return recorded_call
