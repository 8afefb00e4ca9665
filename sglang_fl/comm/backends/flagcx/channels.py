"""Point-to-point: one communicator a direction of a pair, so that neither side waits for the other's send.

At the first transfer between two ranks, in whichever direction, a thread on each side makes both communicators of the
pair (rank 0 sends, rank 1 receives), one after the other, and moves one byte through each: a library's connections are
then made while nothing else waits on the device. Sends go through a thread per peer. A library over host memory works
inside the call, so that thread carries the send itself; on a device it only enqueues, on a stream of the direction.
"""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sglang_fl.comm.backends.flagcx.communicator import FlagCXCommunicator
from sglang_fl.comm.backends.flagcx.first_call import FirstCall
from sglang_fl.comm.backends.flagcx.library import FlagCXLibrary
from sglang_fl.comm.backends.flagcx.recorder import FlagCXRecorder, close_within
from sglang_fl.comm.backends.flagcx.types import DataType, FlagCXOperation
from sglang_fl.comm.errors import CollectiveTimeout, CommError
from sglang_fl.comm.marks import DeviceEvent, marker_for, raw_stream
from sglang_fl.comm.places import Place
from sglang_fl.comm.recorder import Recorder
from sglang_fl.comm.threads import start_thread
from sglang_fl.comm.types import GroupContext, Operation, Work

_ID_TAG = 0x46435821  # away from the tags of the group's other messages
_MOMENT_S = 0.5
SENDER, RECEIVER = 0, 1
_OPERATIONS = (FlagCXOperation.SEND, FlagCXOperation.RECV)  # of the roles


@dataclass(frozen=True)
class SendWork:
    """A send on a channel's thread; on a device, its event.

    The stream of the thread that sent can wait for it. Another thread, which holds the buffer until it was read, waits
    on the host: its stream is mostly the default one, and what runs there must not wait for a peer.
    """

    future: Future[DeviceEvent | None]
    thread: int  # that called send
    is_captured: bool = False

    def wait(self) -> None:
        """Block until it is done; on a device, in the sender's thread, let the current stream wait for it instead.

        Raises:
            CommError: it failed; or it was captured into a graph, and another thread waits for it.
        """
        done = self.future.result()
        if done is None:
            return
        if threading.get_ident() == self.thread:
            done.event.wait()
        elif self.is_captured:
            raise CommError(
                "flagcx: a send in a graph's capture must be waited for on the captured stream; use isend and wait for "
                "its work before the capture ends"
            )
        else:
            done.wait_on_host()

    def is_completed(self) -> bool:
        """Whether it is done or has failed."""
        if not self.future.done():
            return False
        done = None if self.future.exception() is not None else self.future.result()
        return done is None or done.query()


class DoneWork:
    """A transfer that was done before it was returned."""

    def wait(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        """True."""
        return True


@dataclass(frozen=True)
class _Job:
    tensor: torch.Tensor
    dtype: int
    ready: Any  # event after which the tensor holds its data; None for host memory
    place: Place
    future: Future[DeviceEvent | None]


@dataclass(frozen=True)
class _Direction:
    """One direction of a pair: its communicator, and on a device its stream."""

    communicator: FlagCXCommunicator
    stream: Any


@dataclass(frozen=True)
class _Pair:
    outgoing: _Direction
    incoming: _Direction


class _Peer:
    """The way to one peer: the pair, made by a thread, which then carries the sends in order.

    On a device the thread only carries what was sent before the pair was made; afterwards the caller enqueues
    itself. A send that fails fails all that follow.
    """

    def __init__(self, channels: Channels, peer: int, first: FirstCall) -> None:
        self._channels = channels
        self._peer = peer
        self._first = first
        self._last: Future[DeviceEvent | None] | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._problem: CommError | None = None
        self.pair: Future[_Pair] = Future()
        first.on_interrupt(self._give_up)
        self._thread = start_thread(self._run, f"sglang_fl-peer-{peer}")

    def send(self, tensor: torch.Tensor, dtype: int, place: Place, is_captured: bool) -> Work:
        job = _Job(tensor, dtype, self._channels.event_here(), place, Future())
        if self._channels.enqueues and self.is_idle():
            self._carry(job)
        else:
            self._jobs.put(job)
        self._last = job.future
        return SendWork(job.future, threading.get_ident(), is_captured)

    def is_idle(self) -> bool:
        """Whether the pair is made and every send so far has been carried or enqueued."""
        return self.pair.done() and (self._last is None or self._last.done())

    def settle(self) -> None:
        """Wait until it is idle; what failed is told by the works."""
        self.pair.exception()
        if self._last is not None:
            self._last.exception()

    def stop(self, timeout_s: float) -> bool:
        """End the thread after the sends so far; False if it does not come to its end."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _give_up(self, error: CommError) -> None:
        """Who waits for the pair gets ``error``; the thread goes on by itself, up to its limit."""
        self._problem = error
        with suppress(InvalidStateError):
            self.pair.set_exception(error)

    def _run(self) -> None:
        try:
            pair = self._channels.make_pair(self._peer, self._first)
        except Exception as error:  # noqa: BLE001 - whatever it is: who waits for this thread must hear of it
            self._give_up(_as_comm_error(error))
        else:
            with suppress(InvalidStateError):  # it was given up
                self.pair.set_result(pair)
        while (job := self._jobs.get()) is not None:
            self._carry(job)
            del job

    def _carry(self, job: _Job) -> None:
        try:
            if self._problem is not None:
                raise self._problem
            outgoing = self.pair.result().outgoing
            done = self._channels.transfer(outgoing, SENDER, job.tensor, job.dtype, job.ready, job.place)
        except Exception as error:  # noqa: BLE001 - as above
            self._problem = _as_comm_error(error)
            job.future.set_exception(self._problem)
        else:
            job.future.set_result(done)


class Channels:
    """The channels of one rank of a group; made lazily, closed together."""

    close_limit_s = 5.0

    def __init__(self, name: str, context: GroupContext, library: FlagCXLibrary) -> None:
        """``name``: of the backend."""
        self._name = name
        self._context = context
        self._library = library
        self._device = None if context.device.type == "cpu" else torch.get_device_module(context.device)
        marker = marker_for(context.device)
        self._is_capturing = _never if marker is None else marker.is_capturing
        self._peers: dict[int, _Peer] = {}
        self._recorders: list[Recorder] = []
        self._functions = tuple(library.function(operation) for operation in _OPERATIONS)

    @property
    def enqueues(self) -> bool:
        """Whether the library's calls enqueue on a stream instead of doing the transfer."""
        return self._device is not None

    def recorders(self) -> tuple[Recorder, ...]:
        """Those of the directions made so far, each from before its first call."""
        return tuple(self._recorders)

    def send(self, tensor: torch.Tensor, dst: int, dtype: int, place: Place) -> Work:
        """Start to send; ``tensor`` must stay alive and unchanged until the work is done. ``place``: the caller's.

        Raises:
            CommError: it is the first transfer with ``dst``, and the stream is being captured.
        """
        is_captured = self._is_capturing()
        return self._to(dst, Operation.SEND, tensor, place, is_captured).send(tensor, dtype, place, is_captured)

    def recv(self, tensor: torch.Tensor, src: int, dtype: int, place: Place) -> Work:
        """Receive into ``tensor``; done when this returns, on a device in the order of the current stream.

        Raises:
            CommError: as :meth:`send`; or the pair could not be made.
        """
        incoming = self._to(src, Operation.RECV, tensor, place, self._is_capturing()).pair.result().incoming
        if self.enqueues:
            # What waits on the device from here on must not hold up a connection or a send that it depends on.
            for peer in self._peers.values():
                peer.settle()
        done = self.transfer(incoming, RECEIVER, tensor, dtype, self.event_here(), place)
        if done is not None:
            done.event.wait()
        return DoneWork()

    def _to(self, peer: int, operation: Operation, tensor: torch.Tensor, place: Place, is_captured: bool) -> _Peer:
        """The way to a peer, which is begun if this is the first transfer with it."""
        found = self._peers.get(peer)
        if is_captured and (found is None or not found.is_idle()):
            raise CommError(
                f"group {self._context.name}, {self._name}: no transfer between ranks {self._context.rank} and {peer}: "
                "their first transfer lies in a graph's capture; let both ranks do one before they capture"
            )
        if found is None:
            first = FirstCall(self._name, self._context, operation, tensor, peer, place)
            if first.recorder is not None:
                self._recorders.append(first.recorder)
                self._context.watch(first.recorder)
            try:
                found = self._peers[peer] = _Peer(self, peer, first)
            except CommError as error:
                between = f"group {self._context.name}, {self._name}: no transfer between ranks {self._context.rank}"
                raise first.failed(CommError(f"{between} and {peer}: {error}")) from error
        return found

    def new_stream(self) -> Any:
        """A stream of the group's device; None for host memory."""
        return None if self._device is None else self._device.Stream(self._context.device)

    def event_here(self) -> Any:
        """An event on the caller's current stream; None for host memory."""
        return None if self._device is None else self._device.current_stream(self._context.device).record_event()

    def transfer(
        self, direction: _Direction, role: int, tensor: torch.Tensor, dtype: int, ready: Any, place: Place
    ) -> DeviceEvent | None:
        """Call the library's send or recv; on a device enqueue it behind ``ready`` and return its own event."""
        if self._device is None:
            self._call(direction, role, tensor, dtype, 0, place)
            return None
        stream = direction.stream
        self._device.set_device(self._context.device)  # this may be a new thread
        stream.wait_event(ready)
        self._call(direction, role, tensor, dtype, raw_stream(stream), place)
        tensor.record_stream(stream)
        return DeviceEvent(stream.record_event(), self._context.device, self._device)

    def _call(
        self, direction: _Direction, role: int, tensor: torch.Tensor, dtype: int, stream: int, place: Place
    ) -> None:
        communicator, operation, count = direction.communicator, _OPERATIONS[role], tensor.numel()
        if communicator.recorder is not None:
            communicator.recorder.next_place(place)
        code = self._functions[role](communicator.handle, tensor.data_ptr(), count, dtype, 1 - role, stream)
        if code:
            communicator.settle(code, operation, dtype, None, count, tensor.shape)

    def make_pair(self, peer: int, first: FirstCall) -> _Pair:
        """Make both directions with ``peer``, which does the same, the one from the lower rank first.

        Raises:
            CommError: the peer did not come within the limit of ``first``: CollectiveTimeout, or PeerLost if it is
                gone; or the pair was not made within the creation's.
        """
        upwards = SENDER if self._context.rank < peer else RECEIVER
        unique_id = self._meet(peer, upwards, first)
        ends_s = time.monotonic() + self._context.timeout_s
        made = {upwards: self._make_direction(unique_id, peer, upwards, ends_s)}
        unique_id = self._hand_over(peer, 1 - upwards, ends_s)
        made[1 - upwards] = self._make_direction(unique_id, peer, 1 - upwards, ends_s)
        return _Pair(outgoing=made[SENDER], incoming=made[RECEIVER])

    def _meet(self, peer: int, role: int, first: FirstCall) -> bytes:
        try:
            unique_id = self._hand_over(peer, role, time.monotonic() + first.limit_s)
        except CommError as error:
            raise first.failed(error) from error
        first.met()
        # From now on the directions' own recorders tell of what is called.
        if first.recorder in self._recorders:
            self._recorders.remove(first.recorder)
        return unique_id

    def _make_direction(self, unique_id: bytes, peer: int, role: int, ends_s: float) -> _Direction:
        context = self._context
        device = None if self._device is None else context.device.index
        communicator = FlagCXCommunicator.create(self._library, unique_id, 2, role, _left_s(ends_s), device)
        if context.records:
            communicator.recorder = self._record(communicator, peer, role)
        direction = _Direction(communicator, self.new_stream())
        probe = torch.zeros(1, dtype=torch.uint8, device=context.device)
        done = self.transfer(direction, role, probe, int(DataType.UINT8), self.event_here(), place=0)
        if done is not None:
            done.event.synchronize()
        return direction

    def _record(self, communicator: FlagCXCommunicator, peer: int, role: int) -> FlagCXRecorder:
        context = self._context
        peers = (context.rank, peer) if role == SENDER else (peer, context.rank)
        source, destination = (context.ranks[rank] for rank in peers)
        name = f"{context.name} {self._name} {source}>{destination}"
        recorder = FlagCXRecorder(communicator, name, (source, destination), context.device, peers)
        self._recorders.append(recorder)
        context.watch(recorder)
        return recorder

    def _hand_over(self, peer: int, role: int, ends_s: float) -> bytes:
        """The unique id of a direction, from its sender to its receiver."""
        context = self._context
        unique_id = self._library.unique_id(_left_s(ends_s)) if role == SENDER else b""
        length = torch.tensor([len(unique_id)])
        limit = timedelta(seconds=_left_s(ends_s))
        arguments: dict[str, Any] = {"group": context.cpu_group, "tag": _ID_TAG}
        try:
            if role == SENDER:
                for part in (length, torch.frombuffer(bytearray(unique_id), dtype=torch.uint8)):
                    _wait(dist.isend(part, context.ranks[peer], **arguments), limit)
                return unique_id
            _wait(dist.irecv(length, context.ranks[peer], **arguments), limit)
            received = torch.empty(int(length.item()), dtype=torch.uint8)
            _wait(dist.irecv(received, context.ranks[peer], **arguments), limit)
            return received.numpy().tobytes()
        except RuntimeError as error:
            ranks = f"global ranks {context.ranks[context.rank]} and {context.ranks[peer]}"
            kind = CommError if context.records or time.monotonic() < ends_s else CollectiveTimeout  # or FirstCall's
            raise kind(
                f"group {context.name}, {self._name}: no transfer between {ranks}: they did not meet for the first "
                f"one: {str(error).strip().partition(chr(10))[0]}"
            ) from error

    def close(self) -> None:
        """Wait briefly for sends under way, then close every pair, in the same order on both of its sides."""
        context = self._context
        ends_s = time.monotonic() + self.close_limit_s
        for peer, known in sorted(self._peers.items(), key=lambda item: sorted((item[0], context.rank))):
            ended = known.stop(_left_s(ends_s))
            if not ended or known.pair.exception() is not None:
                continue  # a thread that is stuck in the library keeps what it uses
            pair = known.pair.result()
            upwards = (pair.outgoing, pair.incoming) if context.rank < peer else (pair.incoming, pair.outgoing)
            for direction in upwards:
                close_within(direction.communicator, _left_s(ends_s))
        self._peers.clear()
        self._recorders.clear()


def _never() -> bool:
    return False


def _as_comm_error(error: Exception) -> CommError:
    if isinstance(error, CommError):
        return error
    problem = CommError(f"flagcx, a transfer: {type(error).__name__}: {error}")
    problem.__cause__ = error
    return problem


def _left_s(ends_s: float) -> float:
    """Until then; a moment, even if it has come: most steps take none."""
    return max(_MOMENT_S, ends_s - time.monotonic())


def _wait(work: dist.Work | None, limit: timedelta) -> None:
    assert work is not None
    work.wait(limit)
