"""Sends that do not wait for the receiver: the buffers in flight and the thread that lets them go."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing.util import Finalize

import torch

from sglang_fl.comm.errors import CollectiveTimeout, CommError, PeerLost
from sglang_fl.comm.threads import start_thread
from sglang_fl.comm.types import Work

logger = logging.getLogger("sglang_fl.comm")

EXIT_LIMIT_S = 5.0
_MOMENT_S = 3.0  # a send that failed says more than that there is no room, and takes so long to find it out
_JOIN_LIMIT_S = 0.5


@dataclass
class P2PWork:
    """A send under way and the buffer it reads; has SGLang's field names, so that its callers can wait on it."""

    work: Work | None
    payload: torch.Tensor | None


class OwnedSend:
    """A send that its caller waits for; one that is dropped instead, or kept to the end of the process, is held like a
    blocking one.

    Gloo would take it back, and the receiver wait for what never comes.
    """

    __slots__ = ("__weakref__", "_adopt", "_is_taken", "_pending")

    def __init__(self, pending: P2PWork, adopt: Callable[[P2PWork], None]) -> None:
        """``adopt`` takes what nobody has waited for; called by whoever drops it, at any moment."""
        self._pending = pending
        self._adopt = adopt
        self._is_taken = pending.work is None

    def wait(self) -> None:
        """As the work's own."""
        self._is_taken = True
        if self._pending.work is not None:
            self._pending.work.wait()

    def is_completed(self) -> bool:
        """As the work's own."""
        is_done = self._pending.work is None or self._pending.work.is_completed()
        self._is_taken = self._is_taken or is_done
        return is_done

    def hand_over(self) -> None:
        """Nobody else will wait for it."""
        if not self._is_taken:
            self._is_taken = True
            self._adopt(self._pending)

    def __del__(self) -> None:
        """The caller has dropped it."""
        self.hand_over()


@dataclass(frozen=True)
class _Held:
    """A send under way; ``owner`` lives as long as one of its sends does, though its group was dropped."""

    owner: PendingSends
    pending: P2PWork
    size_bytes: int
    dst: int


class PendingSends:
    """Keeps the buffers of blocking sends alive until they are done, so that ``send`` returns at once.

    Two ranks that both send first would otherwise wait for each other. At most ``limit_bytes`` are held;
    a send beyond that waits for the oldest ones. The works are waited on in the order of the calls by a
    daemon thread, because gloo's cannot be asked whether they are done. It ends with :meth:`close`, or once the object
    is dropped and nothing is under way.
    """

    def __init__(self, group: str, limit_s: float, limit_bytes: int = 256 * 2**20) -> None:
        """``group``: for errors. ``limit_s``: how long a send may wait for others to make room."""
        self.group = group
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self._limit_s = limit_s
        self._in_flight: Counter[int] = Counter()  # by destination
        self._failed: Counter[int] = Counter()
        self._works: queue.SimpleQueue[_Held | None] = queue.SimpleQueue()
        self._owned: weakref.WeakSet[OwnedSend] = weakref.WeakSet()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._is_closed = False

    def start(self, size_bytes: int, dst: int, begin: Callable[[], P2PWork]) -> None:
        """Have ``begin`` start a send of ``size_bytes`` to global rank ``dst``; hold its buffer until it is done.

        First waits until they fit; one buffer larger than the limit goes alone.

        Raises:
            CommError: an earlier send failed, CollectiveTimeout or PeerLost where it was that; the group is destroyed.
            CollectiveTimeout: the sends under way made no room within the limit; names who does not receive them.
        """
        with self._changed:
            if self._thread is None:  # before anything is sent whose buffer it is to hold
                self._start_thread()
        self._reserve(size_bytes, dst)
        try:
            held = _Held(self, begin(), size_bytes, dst)
        except BaseException:
            with self._changed:
                self.held_bytes -= size_bytes
                self._changed.notify_all()
            raise
        with self._changed:
            self._in_flight[dst] += 1
            self._works.put(held)

    def own(self, size_bytes: int, dst: int, begin: Callable[[], P2PWork]) -> P2PWork:
        """What ``begin`` starts, to be waited for by the caller, or here once the caller has dropped it.

        Raises:
            CommError: the thread that would wait for it cannot be started.
        """
        with self._changed:
            if self._thread is None:
                self._start_thread()
        pending = begin()
        owned = OwnedSend(pending, partial(self._adopt, size_bytes, dst))
        self._owned.add(owned)
        return P2PWork(owned, pending.payload)

    def take_over(self) -> None:
        """Hold what callers still have and have not waited for, at the end of the process."""
        for owned in list(self._owned):
            owned.hand_over()

    def _adopt(self, size_bytes: int, dst: int, pending: P2PWork) -> None:
        with self._changed:
            if not self._is_closed:
                self.held_bytes += size_bytes
                self._in_flight[dst] += 1
                self._works.put(_Held(self, pending, size_bytes, dst))

    def drain(self, limit_s: float) -> str:
        """Wait until nothing is in flight, ``limit_s`` seconds at most.

        Returns:
            how many sends still are or have failed, to whom and why, in words; nothing where all were received.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._in_flight.total(), limit_s)
            lost = self._in_flight + self._failed
            if not lost:
                return ""
            why = f"; what failed first: {self._error}" if self._error is not None else ""
            return f"{lost.total()} send(s) that no rank received: {_by_rank(lost)}{why}"

    def close(self, limit_s: float) -> str:
        """As :meth:`drain`; from then on sends are refused, and the thread ends with the last that is under way."""
        lost = self.drain(limit_s)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        _unfinished.discard(self)
        _with_losses.discard(self)
        self._works.put(None)
        if self._thread is not None:
            self._thread.join(_JOIN_LIMIT_S)
        return lost

    def _reserve(self, size_bytes: int, dst: int) -> None:
        with self._changed:
            has_room = self._changed.wait_for(
                lambda: self._error or self._is_closed or self._fits(size_bytes), self._limit_s + _MOMENT_S
            )
            if self._is_closed:
                raise CommError(f"group {self.group} is destroyed; make a new one")
            self._raise_earlier()
            if not has_room:
                raise CollectiveTimeout(
                    f"group {self.group}: send of {size_bytes} bytes to global rank {dst} found no room within "
                    f"{self._limit_s:g} s: {self.held_bytes} of {self.limit_bytes} bytes are held for sends that no "
                    f"rank has received, {_by_rank(self._in_flight)}; each must call recv"
                )
            self.held_bytes += size_bytes

    def _fits(self, size_bytes: int) -> bool:
        return not self.held_bytes or self.held_bytes + size_bytes <= self.limit_bytes

    def _raise_earlier(self) -> None:
        if self._error is not None:
            kind = type(self._error) if type(self._error) in (CollectiveTimeout, PeerLost) else CommError
            raise kind(f"an earlier send failed: {self._error}") from self._error

    def _start_thread(self) -> None:
        # A process that ends right after ``send`` has returned must not take the data along.
        try:
            self._thread = start_thread(partial(_wait_for_all, self._works), "sglang_fl-sends")
        except CommError as error:
            raise CommError(f"group {self.group}: a send cannot be waited for, so nothing is sent: {error}") from error
        _drain_at_exit(os.getpid())
        _unfinished.add(self)
        weakref.finalize(self, self._works.put, None).atexit = False

    def ended(self, dst: int, size_bytes: int, error: Exception | None) -> None:
        """A send to ``dst`` has ended, with ``error`` if not with success."""
        with self._changed:
            if error is not None:
                self._error = self._error or error
                self._failed[dst] += 1
                if not self._is_closed:
                    _with_losses.add(self)
            self.held_bytes -= size_bytes
            self._in_flight[dst] -= 1
            self._changed.notify_all()


_unfinished: weakref.WeakSet[PendingSends] = weakref.WeakSet()
_with_losses: set[PendingSends] = set()  # to be told at the exit, though their group was dropped


@cache
def _drain_at_exit(_process: int) -> None:
    # Unlike atexit, this also runs at the end of a process that multiprocessing started.
    Finalize(None, _drain_all, exitpriority=100)


def _drain_all() -> None:
    ends_s = time.monotonic() + EXIT_LIMIT_S
    for sends in list(_unfinished):
        sends.take_over()
        lost = sends.drain(max(0.0, ends_s - time.monotonic()))
        if lost:
            logger.error("[sglang_fl] group %s: the process ends with %s", sends.group, lost)


def _wait_for_all(works: queue.SimpleQueue[_Held | None]) -> None:
    while (held := works.get()) is not None:
        held.owner.ended(held.dst, held.size_bytes, _wait(held.pending.work))
        del held  # with it goes the buffer


def _wait(work: Work | None) -> Exception | None:
    try:
        if work is not None:
            work.wait()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is raised at the caller's next send
        return error
    return None


def _by_rank(sends: Counter[int]) -> str:
    return ", ".join(f"{count} to global rank {rank}" for rank, count in sorted(sends.items()) if count)


def size_bytes(tensor: torch.Tensor | None) -> int:
    """Bytes of the elements of ``tensor``; 0 for None."""
    return 0 if tensor is None else tensor.numel() * tensor.element_size()
