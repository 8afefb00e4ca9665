"""Point-to-point: one communicator a direction of a pair, so that neither side waits for the other's send.

Each direction has a communicator of two ranks (0 sends, 1 receives), made at its first use, and a thread on the
sending side. A library over host memory works inside the call, so the thread carries the send itself. On a device the
thread only enqueues, on a stream of the direction's own.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
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
    """A send on a channel's thread; on a device, its event."""

    future: Future[Any]

    def wait(self) -> None:
        """Block until it is done; on a device, until it is enqueued, and let the current stream wait for the rest.

        Raises:
            CommError: it failed.
        """
        done = self.future.result()
        if done is not None:
            done.wait()

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
    ready: Any  # event after which the tensor holds its data; None for host memory
    future: Future[Any]


class _SendChannel:
    """Sends to one peer, in order, from a thread of its own; a failed one fails all that follow."""

    def __init__(self, channels: Channels, peer: int) -> None:
        self._channels = channels
        self._peer = peer
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._communicator: FlagCXCommunicator | None = None
        self._stream = channels.new_stream()
        self._thread = threading.Thread(target=self._run, name=f"sglang_fl-send-{peer}", daemon=True)
        self._thread.start()

    def send(self, tensor: torch.Tensor, dtype: int) -> Work:
        job = _Job(tensor, dtype, self._channels.event_here(), Future())
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
                done = self._channels.transfer(
                    self._communicator.send, RECEIVER, job.tensor, job.dtype, self._stream, job.ready
                )
            except CommError as error:
                problem = error
                job.future.set_exception(error)
            else:
                job.future.set_result(done)
            del job


class Channels:
    """The channels of one rank of a group; made lazily, closed together."""

    close_limit_s = 5.0

    def __init__(self, context: GroupContext, library: FlagCXLibrary) -> None:
        self._context = context
        self._library = library
        self._device = None if context.device.type == "cpu" else torch.get_device_module(context.device)
        self._senders: dict[int, _SendChannel] = {}
        self._receivers: dict[int, tuple[FlagCXCommunicator, Any]] = {}

    def send(self, tensor: torch.Tensor, dst: int, dtype: int) -> Work:
        """Start to send; ``tensor`` must stay alive and unchanged until the work is done."""
        channel = self._senders.get(dst)
        if channel is None:
            channel = self._senders[dst] = _SendChannel(self, dst)
        return channel.send(tensor, dtype)

    def recv(self, tensor: torch.Tensor, src: int, dtype: int) -> Work:
        """Receive into ``tensor``; done when this returns, on a device in the order of the current stream."""
        known = self._receivers.get(src)
        if known is None:
            known = self._receivers[src] = (self.join(src, RECEIVER), self.new_stream())
        communicator, stream = known
        done = self.transfer(communicator.recv, SENDER, tensor, dtype, stream, self.event_here())
        if done is not None:
            done.wait()
        return DoneWork()

    def new_stream(self) -> Any:
        """A stream of the group's device; None for host memory."""
        return None if self._device is None else self._device.Stream(self._context.device)

    def event_here(self) -> Any:
        """An event on the caller's current stream; None for host memory."""
        return None if self._device is None else self._device.current_stream(self._context.device).record_event()

    def transfer(
        self, call: Callable[..., None], peer: int, tensor: torch.Tensor, dtype: int, stream: Any, ready: Any
    ) -> Any:
        """Call the library's send or recv; on a device enqueue it behind ``ready`` and return its own event."""
        if self._device is None:
            call(tensor.data_ptr(), tensor.numel(), dtype, peer)
            return None
        self._device.set_device(self._context.device)
        stream.wait_event(ready)
        call(tensor.data_ptr(), tensor.numel(), dtype, peer, raw_stream(stream))
        tensor.record_stream(stream)
        return stream.record_event()

    def join(self, peer: int, role: int) -> FlagCXCommunicator:
        """Make the communicator of one direction; the sending side makes the id, the other receives it.

        Raises:
            CommError: the peer did not come within the group's time limit.
        """
        context = self._context
        unique_id = self._library.unique_id(context.timeout_s) if role == SENDER else b""
        unique_id = self._hand_over(unique_id, peer, role)
        device = None if self._device is None else context.device.index
        return FlagCXCommunicator.create(self._library, unique_id, 2, role, context.timeout_s, device)

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
        for communicator, _ in self._receivers.values():
            communicator.close()
        self._senders.clear()
        self._receivers.clear()


def raw_stream(stream: Any) -> int:
    """The device runtime's own handle of a torch stream: ``cuda_stream``, ``npu_stream``, ..."""
    return int(getattr(stream, f"{stream.device.type}_stream"))


def _wait(work: dist.Work | None, limit: timedelta) -> None:
    assert work is not None
    work.wait(limit)
