"""Sends that do not wait for the receiver: the buffers in flight and the thread that lets them go."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from multiprocessing.util import Finalize

import torch

from sglang_fl.comm.errors import CollectiveTimeout, CommError, PeerLost
from sglang_fl.comm.types import Work

logger = logging.getLogger("sglang_fl.comm")


@dataclass
class P2PWork:
    """A send under way and the buffer it reads; has SGLang's field names, so that its callers can wait on it."""

    work: Work | None
    payload: torch.Tensor | None


class PendingSends:
    """Keeps the buffers of blocking sends alive until they are done, so that ``send`` returns at once.

    Two ranks that both send first would otherwise wait for each other. At most ``limit_bytes`` are held;
    a send beyond that waits for the oldest ones. The works are waited on in the order of the calls by a
    daemon thread, because gloo's cannot be asked whether they are done.
    """

    def __init__(self, limit_bytes: int = 256 * 2**20) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self._in_flight = 0
        self._works: deque[P2PWork] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def reserve(self, size_bytes: int) -> None:
        """Wait until ``size_bytes`` fit; one buffer larger than the limit goes alone.

        Raises:
            CommError: an earlier send failed; CollectiveTimeout or PeerLost where it was that.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._error or not self.held_bytes or self.held_bytes + size_bytes <= self.limit_bytes
            )
            self._raise_earlier()
            self.held_bytes += size_bytes

    def add(self, pending: P2PWork) -> None:
        """Hold ``pending``, for whose payload :meth:`reserve` was called, until its work is done."""
        with self._changed:
            self._works.append(pending)
            self._in_flight += 1
            if self._thread is None:
                _finish_at_exit(self)
                self._thread = threading.Thread(target=self._run, name="sglang_fl-sends", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def drain(self, limit_s: float) -> int:
        """Wait until nothing is in flight, ``limit_s`` seconds at most; how many sends still are, or failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or not self._in_flight, limit_s)
            return self._in_flight

    def _raise_earlier(self) -> None:
        if self._error is not None:
            kind = type(self._error) if type(self._error) in (CollectiveTimeout, PeerLost) else CommError
            raise kind(f"an earlier send failed: {self._error}") from self._error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._works))
                pending = self._works.popleft()
            error = _wait(pending.work)
            size = size_bytes(pending.payload)
            del pending
            with self._changed:
                self._error = self._error or error
                self.held_bytes -= size
                self._in_flight -= 1
                self._changed.notify_all()


EXIT_LIMIT_S = 5.0
_unfinished: weakref.WeakSet[PendingSends] = weakref.WeakSet()


def _finish_at_exit(sends: PendingSends) -> None:
    """A process that ends right after ``send`` has returned must not take the data along."""
    if not _unfinished:
        # Unlike atexit, this also runs at the end of a process that multiprocessing started.
        Finalize(None, _drain_all, exitpriority=100)
    _unfinished.add(sends)


def _drain_all() -> None:
    for sends in list(_unfinished):
        left = sends.drain(EXIT_LIMIT_S)
        if left:
            logger.error("[sglang_fl] the process ends with %d send(s) that nobody received", left)


def _wait(work: Work | None) -> BaseException | None:
    try:
        if work is not None:
            work.wait()
    except RuntimeError as error:
        return error  # raised at the caller's next send
    return None


def size_bytes(tensor: torch.Tensor | None) -> int:
    """Bytes of the elements of ``tensor``; 0 for None."""
    return 0 if tensor is None else tensor.numel() * tensor.element_size()
