"""Point-to-point over host memory: one communicator a direction of a pair, so that neither side waits for the other.

A FlagCX library over host memory works inside the call, and a large send waits for the receiver. So each direction
has a communicator of two ranks (0 sends, 1 receives), made at its first use, and a thread on the sending side.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sglang_fl.comm.backends.flagcx.communicator import FlagCXCommunicator
from sglang_fl.comm.backends.flagcx.library import FlagCXLibrary
from sglang_fl.comm.errors import CommError
from sglang_fl.comm.types import GroupContext, Work

_ID_TAG = 0x46435821  # away from the tags of the group's other messages
SENDER, RECEIVER = 0, 1


@dataclass(frozen=True)
class SendWork:
    """A send under way on a channel's thread."""

    future: Future[None]

    def wait(self) -> None:
        """Block until it is done.

        Raises:
            CommError: it failed.
        """
        self.future.result()

    def is_completed(self) -> bool:
        """Whether it is done."""
        return self.future.done()


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
    future: Future[None]


class _SendChannel:
    """Sends to one peer, in order, from a thread of its own; a failed one fails all that follow."""

    def __init__(self, channels: HostChannels, peer: int) -> None:
        self._channels = channels
        self._peer = peer
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._communicator: FlagCXCommunicator | None = None
        self._thread = threading.Thread(target=self._run, name=f"sglang_fl-send-{peer}", daemon=True)
        self._thread.start()

    def send(self, tensor: torch.Tensor, dtype: int) -> Work:
        job = _Job(tensor, dtype, Future())
        self._jobs.put(job)
        return SendWork(job.future)

    def close(self, timeout_s: float) -> None:
        self._jobs.put(None)
        self._thread.join(timeout_s)
        if self._communicator is not None and not self._thread.is_alive():
            self._communicator.close()

    def _run(self) -> None:
        problem: CommError | None = None
        while (job := self._jobs.get()) is not None:
            try:
                if problem is not None:
                    raise problem
                if self._communicator is None:
                    self._communicator = self._channels.join(self._peer, SENDER)
                self._communicator.send(job.tensor.data_ptr(), job.tensor.numel(), job.dtype, RECEIVER)
            except CommError as error:
                problem = error
                job.future.set_exception(error)
            else:
                job.future.set_result(None)
            del job


class HostChannels:
    """The channels of one rank of a group; made lazily, closed together."""

    close_limit_s = 5.0

    def __init__(self, context: GroupContext, library: FlagCXLibrary) -> None:
        self._context = context
        self._library = library
        self._senders: dict[int, _SendChannel] = {}
        self._receivers: dict[int, FlagCXCommunicator] = {}

    def send(self, tensor: torch.Tensor, dst: int, dtype: int) -> Work:
        """Start to send; ``tensor`` must stay alive and unchanged until the work is done."""
        channel = self._senders.get(dst)
        if channel is None:
            channel = self._senders[dst] = _SendChannel(self, dst)
        return channel.send(tensor, dtype)

    def recv(self, tensor: torch.Tensor, src: int, dtype: int) -> Work:
        """Receive into ``tensor``; done when this returns."""
        communicator = self._receivers.get(src)
        if communicator is None:
            communicator = self._receivers[src] = self.join(src, RECEIVER)
        communicator.recv(tensor.data_ptr(), tensor.numel(), dtype, SENDER)
        return DoneWork()

    def join(self, peer: int, role: int) -> FlagCXCommunicator:
        """Make the communicator of one direction; the sending side makes the id, the other receives it.

        Raises:
            CommError: the peer did not come within the group's time limit.
        """
        context = self._context
        unique_id = self._library.unique_id(context.timeout_s) if role == SENDER else b""
        unique_id = self._hand_over(unique_id, peer, role)
        return FlagCXCommunicator.create(self._library, unique_id, 2, role, context.timeout_s)

    def _hand_over(self, unique_id: bytes, peer: int, role: int) -> bytes:
        context = self._context
        length = torch.tensor([len(unique_id)])
        limit = timedelta(seconds=context.timeout_s)
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
            verb = "send to" if role == SENDER else "receive from"
            raise CommError(
                f"group {context.name}, rank {context.rank}: the first {verb} rank {peer} found it missing for "
                f"{context.timeout_s:g} s: {error}"
            ) from error

    def close(self) -> None:
        """Wait briefly for sends under way, then close every channel."""
        for channel in self._senders.values():
            channel.close(self.close_limit_s)
        for communicator in self._receivers.values():
            communicator.close()
        self._senders.clear()
        self._receivers.clear()


def _wait(work: dist.Work | None, limit: timedelta) -> None:
    assert work is not None
    work.wait(limit)
