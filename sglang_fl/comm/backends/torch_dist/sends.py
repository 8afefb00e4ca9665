"""What a send on a device returns: who waits for it, and on what."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

import torch

from sglang_fl.comm.captures import CAPTURES
from sglang_fl.comm.errors import CommError

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.00005, 0.002


class SendWork:
    """A send that was enqueued.

    The stream of the thread that sent can wait for it. Another thread, which holds the buffer until it was read, waits
    on the host: its stream is mostly the default one, and what runs there must not wait for a peer.
    """

    __slots__ = ("_device", "_is_captured", "_thread", "_work")

    def __init__(self, work: Any, thread: int, device: torch.device | None, is_captured: bool = False) -> None:
        """``thread``: that called send. ``device``: None for host memory."""
        self._work = work
        self._thread = thread
        self._device = device
        self._is_captured = is_captured

    def wait(self) -> None:
        """Let the current stream wait until it is done; in another thread than the sender's, block until it is.

        Raises:
            CommError: it was captured into a graph, and another thread waits for it.
        """
        if threading.get_ident() == self._thread:
            self._work.wait()
            return
        if self._is_captured:
            raise CommError(
                "torch.distributed: a send in a graph's capture must be waited for on the captured stream; use isend "
                "and wait for its work before the capture ends"
            )
        pause_s = _SHORTEST_PAUSE_S
        while not self._was_seen_done():
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _was_seen_done(self) -> bool:
        # To ask the device from here would end a capture of this process.
        if self._device is None:
            return self.is_completed()
        with CAPTURES.device_call() as allowed:
            return allowed and self.is_completed()

    def is_completed(self) -> bool:
        """Whether it is done."""
        # A thread that never set its device would make a context on device 0.
        with nullcontext() if self._device is None else torch.get_device_module(self._device).device(self._device):
            return bool(self._work.is_completed())


class QueuedSend:
    """A send from before its pair was connected."""

    __slots__ = ("_future",)

    def __init__(self, future: Future[SendWork]) -> None:
        self._future = future

    def wait(self) -> None:
        """Block until it is enqueued, then as :meth:`SendWork.wait`.

        Raises:
            CommError: the peer did not come, or the pair could not be connected.
        """
        self._future.result().wait()

    def is_completed(self) -> bool:
        """Whether it is done or has failed."""
        if not self._future.done():
            return False
        return self._future.exception() is not None or self._future.result().is_completed()
