"""Point-to-point on a device: one process group a direction of a pair, connected by a thread at the first transfer.

A library such as NCCL makes the communicator of two ranks, and in it the connection of a direction, inside the first
call that needs it, which blocks the host until the peer makes the same one. Two ranks that both send first would each
wait inside another direction's call. So at the first transfer between two ranks, in whichever direction, a thread on
each side meets the other's and moves one byte through each direction, that from the lower rank first. Sends so far
wait in a queue; from then on the caller enqueues itself.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as LimitReached
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch

from sglang_fl.comm.backends.torch_dist.pair_group import end_pair_group, make_pair_group
from sglang_fl.comm.backends.torch_dist.sends import QueuedSend, SendWork
from sglang_fl.comm.errors import CommError
from sglang_fl.comm.marks import marker_for, raw_stream
from sglang_fl.comm.threads import start_thread
from sglang_fl.comm.types import GroupContext, Work

logger = logging.getLogger("sglang_fl.comm")

_MOMENT_S = 5.0  # beyond the limit, for a thread to say what it found
_PAUSE_S = 0.001
_REFUSALS = (RuntimeError, ValueError, AssertionError)  # what torch.distributed raises, and CommError


@dataclass(frozen=True)
class Pair:
    """The connected groups of both directions; ``other``: the peer's rank in them."""

    outgoing: Any
    incoming: Any
    other: int


@dataclass(frozen=True)
class _Job:
    tensor: torch.Tensor
    ready: Any  # event after which the tensor holds its data; None for host memory
    thread: int  # that called send
    future: Future[SendWork]


class _Peer:
    """The way to one peer.

    Attributes:
        pair: the connection, or why there is none.
        settled: done when nothing is queued any more, or it failed.
        open_pair: the connection once it is settled, and the caller may use it.
    """

    def __init__(self, pairs: Pairs, peer: int) -> None:
        self.pair: Future[Pair] = Future()
        self.settled: Future[None] = Future()
        self.open_pair: Pair | None = None
        self._pairs = pairs
        self._peer = peer
        self._problem: CommError | None = None
        self._jobs: deque[_Job] = deque()
        self._lock = threading.Lock()
        start_thread(self._run, f"sglang_fl-peer-{peer}")

    def queue(self, job: _Job) -> bool:
        """Have the thread send it; False if the caller may do so by now.

        Raises:
            CommError: the pair has failed.
        """
        with self._lock:
            if self._problem is not None:
                raise self._problem
            if self.open_pair is None:
                self._jobs.append(job)
            return self.open_pair is None

    def _run(self) -> None:
        job: _Job | None = None
        try:
            pair = self._pairs.connect(self._peer)
            self.pair.set_result(pair)
            while (job := self._next(pair)) is not None:
                job.future.set_result(self._pairs.enqueue(pair, self._peer, job.tensor, job.thread, job.ready))
        except Exception as error:  # noqa: BLE001 - whatever it is: who waits for this thread must hear of it
            problem = self._pairs.problem(self._peer, error)
            problem.__cause__ = error
            self._fail(problem, job)
        finally:
            self.settled.set_result(None)

    def _next(self, pair: Pair) -> _Job | None:
        with self._lock:
            if self._jobs:
                return self._jobs.popleft()
            self.open_pair = pair
            return None

    def _fail(self, problem: CommError, job: _Job | None) -> None:
        logger.error("[sglang_fl] %s", problem)
        with self._lock:
            self._problem = problem
            failed = [job, *self._jobs]
            self._jobs.clear()
        for each in failed:
            if each is not None:
                each.future.set_exception(problem)
        if not self.pair.done():
            self.pair.set_exception(problem)


class Pairs:
    """The pairs of one rank of a group; made at their first transfers, closed together."""

    close_limit_s = 5.0

    def __init__(self, name: str, context: GroupContext) -> None:
        """``name``: of the backend."""
        self._name = name
        self._context = context
        marker = marker_for(context.device)
        self._device = None if marker is None else torch.get_device_module(context.device)
        self._is_capturing = _never if marker is None else marker.is_capturing
        self._peers: dict[int, _Peer] = {}
        self._unsettled: set[int] = set()
        self._streams: dict[int, Any] = {}
        self._is_closed = False
        self._lock = threading.Lock()

    def send(self, tensor: torch.Tensor, dst: int) -> Work:
        """Start to send, behind the current stream; never waits for the peer.

        Raises:
            CommError: an earlier transfer with ``dst`` failed; or it is the first, and the stream is being captured; or
                the pairs are closed.
            ValueError: ``tensor`` is not contiguous, or on another kind of device; nothing was sent.
        """
        peer = self._peers.get(dst)
        pair = None if peer is None else peer.open_pair
        if pair is None:
            return self._queue(tensor, dst)
        return self.enqueue(pair, dst, tensor, threading.get_ident())

    def recv(self, tensor: torch.Tensor, src: int) -> Work:
        """Receive into ``tensor`` behind the current stream; at the first transfer waits until ``src`` takes part.

        Raises:
            CommError: ``src`` did not come within the group's time limit, or as :meth:`send`.
        """
        peer = self._peers.get(src)
        if peer is None or self._unsettled:
            peer = self._settle(src)
        pair = peer.open_pair or peer.pair.result()
        work: Work = pair.incoming.recv([tensor], pair.other, 0)
        return work

    def raw_stream_to(self, dst: int) -> int:
        """The stream that is behind every send to ``dst``."""
        stream = self._stream(dst)
        return 0 if stream is None else raw_stream(stream)

    def _queue(self, tensor: torch.Tensor, dst: int) -> Work:
        self._require_sendable(tensor, dst)
        peer = self._to(dst)
        ready = None if self._device is None else self._device.current_stream(self._context.device).record_event()
        job = _Job(tensor, ready, threading.get_ident(), Future())
        if peer.queue(job):
            return QueuedSend(job.future)
        assert peer.open_pair is not None
        return self.enqueue(peer.open_pair, dst, tensor, job.thread)

    def _require_sendable(self, tensor: torch.Tensor, dst: int) -> None:
        # Torch refuses these itself, but in the thread: there it would be the end of the pair, not of this call.
        allowed = self._context.device.type
        if tensor.device.type == allowed and tensor.is_contiguous():
            return
        what = "not contiguous; call contiguous() first" if tensor.device.type == allowed else f"not on {allowed}"
        raise ValueError(
            f"{self._between(dst)}: a tensor of shape {tuple(tensor.shape)}, {tensor.dtype}, on {tensor.device} cannot "
            f"be sent: it is {what}"
        )

    def _settle(self, src: int) -> _Peer:
        peer, limit_s = self._to(src), self._context.timeout_s
        try:
            peer.pair.result(limit_s + _MOMENT_S)
        except LimitReached as error:
            raise self.problem(src, CommError(f"the connection was not made within {limit_s:g} s")) from error
        # What waits on the device from here on must not hold up a connection or a send that it depends on.
        unsettled = {number: self._peers[number].settled for number in tuple(self._unsettled)}
        wait(unsettled.values(), limit_s + _MOMENT_S)
        # Only this method takes out what it has seen settled; a pair that failed stays and says so each time.
        self._unsettled -= {number for number in unsettled if self._peers[number].open_pair is not None}
        return peer

    def _to(self, number: int) -> _Peer:
        """The way to a peer, which is begun if this is the first transfer with it."""
        found = self._peers.get(number)
        if found is not None and found.open_pair is not None:
            return found
        with self._lock:
            if self._is_closed:
                raise self.problem(number, CommError("this group's transport is closed; make a new group"))
            if self._is_capturing():
                reason = "their first transfer lies in a graph's capture; let both ranks do one before they capture"
                raise self.problem(number, CommError(reason))
            found = self._peers.get(number)
            if found is None:
                try:
                    found = self._peers[number] = _Peer(self, number)
                except CommError as error:
                    raise self.problem(number, error) from error
                self._unsettled.add(number)
            return found

    def _stream(self, number: int) -> Any:
        stream = self._streams.get(number)
        if stream is None and self._device is not None:
            stream = self._streams.setdefault(number, self._device.Stream(self._context.device))
        return stream

    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext() if self._device is None else self._device.stream(stream)

    def enqueue(self, pair: Pair, dst: int, tensor: torch.Tensor, thread: int, ready: Any = None) -> SendWork:
        """Send for ``thread``, behind ``ready``, or if None behind the current stream."""
        if self._device is None:
            return SendWork(pair.outgoing.send([tensor], pair.other, 0), thread, None)
        stream = self._stream(dst)
        if ready is not None:
            with self._on(stream):
                stream.wait_event(ready)
                work = pair.outgoing.send([tensor], pair.other, 0)
                work.wait()
        else:
            work = pair.outgoing.send([tensor], pair.other, 0)
            if self._is_capturing():  # our stream would be in the capture, and never come back
                return SendWork(work, thread, self._context.device, is_captured=True)
            with self._on(stream):
                work.wait()
        # Whoever drops the tensor, its memory is not used again before our stream, which waits for the send, is there.
        tensor.record_stream(stream)
        return SendWork(work, thread, self._context.device)

    def connect(self, peer: int) -> Pair:
        """Meet ``peer``, whose thread does the same, and make both directions, that from the lower rank first.

        Raises:
            CommError: the peer did not come within the group's time limit.
            RuntimeError: of torch.distributed.
        """
        context = self._context
        low, high = sorted((context.rank, peer))
        place = int(context.rank == high)
        ranks = (context.ranks[low], context.ranks[high])
        both = replace(context, ranks=ranks, rank=place, creation_ends_s=None)
        # Only once both are here: a call to the store that waits keeps every other thread of this process from it.
        token = both.exchange(f"the first transfer over {self._name}", uuid.uuid4().hex)[0]
        ends_s = time.monotonic() + context.timeout_s
        groups = [self._direction(both, source, peer, f"{self._name} {token}", ends_s) for source in (0, 1)]
        return Pair(outgoing=groups[place], incoming=groups[1 - place], other=1 - place)

    def _direction(self, both: GroupContext, source: int, peer: int, unique: str, ends_s: float) -> Any:
        name = f"sglang_fl {both.name} {both.ranks[source]}>{both.ranks[1 - source]} {unique}"
        group = make_pair_group(both, name)
        device = both.device
        with nullcontext() if self._device is None else self._device.device(device), self._on(self._stream(peer)):
            probe = torch.zeros(1, dtype=torch.uint8, device=device)
            call = group.send if both.rank == source else group.recv
            work = call([probe], 1 - both.rank, 0)
            if self._device is None:
                work.wait(timedelta(seconds=max(_PAUSE_S, ends_s - time.monotonic())))
                return group
            while not work.is_completed():  # an event must not be waited for while another thread captures
                if time.monotonic() > ends_s:
                    raise CommError(f"the first byte did not come through within {both.timeout_s:g} s")
                time.sleep(_PAUSE_S)
            work.wait()
        return group

    def problem(self, peer: int, error: Exception) -> CommError:
        """``error`` with the group and both ranks."""
        text = str(error) if isinstance(error, _REFUSALS) else f"{type(error).__name__}: {error}"
        return CommError(f"{self._between(peer)}: {text}")

    def _between(self, peer: int) -> str:
        context = self._context
        ranks = f"global ranks {context.ranks[context.rank]} and {context.ranks[peer]}"
        return f"group {context.name}, {self._name}: no transfer between {ranks}"

    def close(self) -> None:
        """Give up every pair, in the same order on both of its sides; one that is still being made is left.

        From then on transfers are refused.
        """
        with self._lock:
            self._is_closed = True
        ends_s = time.monotonic() + self.close_limit_s
        peers = sorted(self._peers.items(), key=lambda item: sorted((item[0], self._context.rank)))
        for number, peer in peers:
            wait([peer.settled], max(0.0, ends_s - time.monotonic()))
            pair = peer.open_pair
            if pair is None:
                continue
            upwards = (pair.outgoing, pair.incoming) if self._context.rank < number else (pair.incoming, pair.outgoing)
            for group in upwards:
                try:
                    end_pair_group(group)
                except _REFUSALS as error:
                    logger.warning("%s", self.problem(number, error))
        self._peers.clear()
        self._unsettled.clear()


def _never() -> bool:
    return False
