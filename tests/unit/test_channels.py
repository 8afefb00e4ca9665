"""FlagCX's sends on a device: who waits for them, and on what. The device, its streams and the library are handmade."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from sglang_fl.comm.backends.flagcx.channels import Channels, SendWork, _Direction, _Pair
from sglang_fl.comm.backends.flagcx.first_call import FirstCall
from sglang_fl.comm.captures import CAPTURES
from sglang_fl.comm.errors import CommError
from sglang_fl.comm.marks import DeviceEvent
from sglang_fl.comm.point_to_point import P2PWork, PendingSends, size_bytes
from sglang_fl.comm.types import GroupContext

CPU = torch.device("cpu")
LIMIT_S = 30.0


class Event:
    """Of a device, done when the test says so."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.is_done = False
        self.asked = threading.Event()

    def query(self) -> bool:
        self.asked.set()
        return self.is_done

    def wait(self) -> None:
        self._device.current_stream().said.append("waits for the send")


class Stream:
    """What was enqueued on it, in words."""

    device = SimpleNamespace(type="made")
    made_stream = 5

    def __init__(self, device: Device) -> None:
        self._device = device
        self.said: list[str] = []
        self.events: list[Event] = []

    def record_event(self) -> Event:
        self.said.append("event")
        self.events.append(Event(self._device))
        return self.events[-1]

    def wait_event(self, event: Event) -> None:
        self.said.append("waits for the event")


class Device:
    """Stands for torch's module of a device, whose default stream is the same for all threads."""

    def __init__(self) -> None:
        self.default = Stream(self)

    def current_stream(self, device: object = None) -> Stream:
        return self.default

    def device(self, device: object) -> nullcontext[None]:
        return nullcontext()

    def set_device(self, device: object) -> None:
        """There is one."""


class MadeChannels(Channels):
    """Connected at once; what reaches the library is told on the stream."""

    def __init__(self, device: Device) -> None:
        group = GroupContext("pp:0", (0, 1), 0, CPU, None, None)
        library = SimpleNamespace(function=lambda operation: self._carry)
        super().__init__("flagcx", group, cast("Any", library))
        self._device = device
        self.outgoing = Stream(device)

    def _carry(self, *arguments: object) -> int:
        self.outgoing.said.append(f"sends on {arguments[-1]}")
        return 0

    def make_pair(self, peer: int, first: FirstCall) -> _Pair:
        made = SimpleNamespace(handle=None, recorder=None)
        direction = _Direction(cast("Any", made), self.outgoing)
        return _Pair(direction, direction)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A handmade one, whose tensors are in host memory."""
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: stream.said.append("keeps the tensor"))
    return Device()


@pytest.fixture
def channels(device: Device) -> Iterator[MadeChannels]:
    """Of a group of two ranks, with one send done."""
    made = MadeChannels(device)
    first = made.send(torch.zeros(1), 1, 0, 0)
    assert isinstance(first, SendWork)
    first.future.result(LIMIT_S)
    made.outgoing.events[-1].is_done = True
    for stream in (made.outgoing, device.default):
        stream.said.clear()
    yield made
    assert made._peers[1].stop(LIMIT_S)


def _event_of(channels: MadeChannels) -> Event:
    return channels.outgoing.events[-1]


def test_a_held_send_holds_up_no_stream(channels: MadeChannels, device: Device) -> None:
    """Given a send that nobody receives yet, when its buffer is held, then the default stream does not wait for it, and
    the buffer is held until it is done."""
    sends, tensor = PendingSends("pp:0", LIMIT_S), torch.zeros(256)
    sends.start(size_bytes(tensor), 1, lambda: P2PWork(channels.send(tensor, 1, 0, 0), tensor))
    assert _event_of(channels).asked.wait(LIMIT_S)
    assert sends.held_bytes == 1024 and sends.drain(0.0) == "1 send(s) that no rank received: 1 to global rank 1"
    _event_of(channels).is_done = True
    assert sends.drain(LIMIT_S) == "" and sends.held_bytes == 0
    assert device.default.said == ["event"]
    assert channels.outgoing.said == ["waits for the event", "sends on 5", "keeps the tensor", "event"]


def test_the_senders_thread_lets_its_stream_wait(channels: MadeChannels, device: Device) -> None:
    """Given a send that is not done, when the sender's thread waits, then it goes on and its stream waits; the send is
    completed once its event is done."""
    work = channels.send(torch.zeros(1), 1, 0, 0)
    work.wait()
    assert device.default.said == ["event", "waits for the send"]
    assert not work.is_completed()
    _event_of(channels).is_done = True
    assert work.is_completed()


def test_a_send_is_not_asked_for_during_a_capture(channels: MadeChannels) -> None:
    """Given a capture, when another thread waits for a send that is done, then it asks the device after the capture."""
    work = channels.send(torch.zeros(1), 1, 0, 0)
    event, begun = _event_of(channels), threading.Event()
    event.is_done = True

    def wait() -> None:
        begun.set()
        work.wait()

    waiting = threading.Thread(target=wait)
    with CAPTURES.capture():
        waiting.start()
        assert begun.wait(LIMIT_S)
        waiting.join(0.05)
        assert waiting.is_alive() and not event.asked.is_set()
    waiting.join(LIMIT_S)
    assert not waiting.is_alive() and event.asked.is_set()


def test_a_captured_send_is_waited_for_by_its_own_thread(channels: MadeChannels, device: Device) -> None:
    """Given a send in a capture, when its thread waits, then the stream does; another thread gets an error, and the
    device is not asked."""
    channels._is_capturing = lambda: True
    work = channels.send(torch.zeros(1), 1, 0, 0)
    sends, tensor = PendingSends("pp:0", LIMIT_S), torch.zeros(1)
    sends.start(4, 1, lambda: P2PWork(work, tensor))
    sends.drain(LIMIT_S)
    with pytest.raises(CommError, match="use isend"):
        sends.start(4, 1, lambda: P2PWork(work, tensor))
    assert "use isend" in sends.close(LIMIT_S)
    assert device.default.said == ["event"] and not _event_of(channels).asked.is_set()
    work.wait()
    assert device.default.said == ["event", "waits for the send"]


def test_a_first_transfer_is_not_captured(device: Device) -> None:
    """Given a stream under capture, when ranks that are not connected transfer, then an error says so, and nothing is
    begun or enqueued."""
    channels = MadeChannels(device)
    channels._is_capturing = lambda: True
    calls: list[Callable[..., object]] = [channels.send, channels.recv]
    for call in calls:
        with pytest.raises(CommError, match=r"group pp:0, flagcx: .* first transfer lies in a graph's capture"):
            call(torch.zeros(1), 1, 0, 0)
    assert not channels._peers and not device.default.said


def test_a_send_that_failed_is_completed() -> None:
    """Given sends of host memory, when one is under way, done or has failed, then it says so; waiting raises its
    error."""
    futures: list[Future[DeviceEvent | None]] = [Future() for _ in range(3)]
    futures[1].set_result(None)
    futures[2].set_exception(CommError("gone"))
    works = [SendWork(future, 0) for future in futures]
    assert [work.is_completed() for work in works] == [False, True, True]
    works[1].wait()
    with pytest.raises(CommError, match="gone"):
        works[2].wait()
