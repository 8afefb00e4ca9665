"""First transfers between ranks of a device's group, where each connection blocks the host until the peer makes it.

Gloo connects otherwise, so what stands for NCCL here is a stand-in over gloo: its first call in each direction blocks
until the peer makes the same one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from sglang_fl.comm import ring
from sglang_fl.comm.backends.torch_dist import TorchTransport
from sglang_fl.comm.backends.torch_dist import pairs as pairs_module
from sglang_fl.comm.backends.torch_dist.pairs import Pairs
from sglang_fl.comm.backends.torch_dist.sends import SendWork
from sglang_fl.comm.errors import CommError
from sglang_fl.comm.recorded import RecordedTransport
from sglang_fl.comm.recorder import Recorder
from sglang_fl.comm.types import GroupContext, Operation
from sglang_fl.testing.ranks import RankContext, run_ranks

_LIMIT_S = 30.0
_make_gloo = pairs_module.make_pair_group


class Blocking:
    """The stand-in for a pair's group on NCCL."""

    def __init__(self, context: GroupContext, name: str) -> None:
        self._group = _make_gloo(context, name)
        self._keys = [f"{name} {place}" for place in range(2)]
        self._own = context.rank
        self._is_connected = False
        self._sent: list[Any] = []  # gloo gives up a send whose work is dropped; NCCL does not

    def send(self, *arguments: Any) -> Any:
        self._connect()
        self._sent.append(self._group.send(*arguments))
        return self._sent[-1]

    def recv(self, *arguments: Any) -> Any:
        self._connect()
        return self._group.recv(*arguments)

    def _connect(self) -> None:
        store = c10d._get_default_store()
        store.set(self._keys[self._own], "here")
        while not self._is_connected:
            self._is_connected = store.check(self._keys)
            time.sleep(0.001)


def _group(context: RankContext, timeout_s: float = _LIMIT_S) -> GroupContext:
    group = dist.new_group(list(range(context.world_size)), backend="gloo")
    return GroupContext(
        name="pp:0",
        ranks=tuple(range(context.world_size)),
        rank=context.rank,
        device=torch.device("cpu"),
        device_group=group,
        cpu_group=group,
        timeout_s=timeout_s,
    )


def _pairs(context: RankContext, timeout_s: float = _LIMIT_S) -> Pairs:
    pairs_module.make_pair_group = Blocking
    return Pairs("torch", _group(context, timeout_s))


def _message(src: int, dst: int, number: int = 0) -> torch.Tensor:
    return torch.tensor([src, dst, number])


def _receive(pairs: Pairs, src: int) -> list[int]:
    tensor = torch.zeros(3, dtype=torch.int64)
    pairs.recv(tensor, src).wait()
    return list(tensor.tolist())


def _to_the_next(context: RankContext) -> None:
    pairs, rank, size = _pairs(context), context.rank, context.world_size
    pairs.send(_message(rank, (rank + 1) % size), (rank + 1) % size)
    previous = (rank - 1) % size
    assert _receive(pairs, previous) == [previous, rank, 0]
    pairs.send(_message(rank, previous, 1), previous)  # now connected
    assert _receive(pairs, (rank + 1) % size) == [(rank + 1) % size, rank, 1]
    dist.barrier()  # what gloo has sent goes with its process


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_send_first(world_size: int) -> None:
    """Given ranks that were never connected, when each sends to the next before it receives, then all have what was
    sent, and so has the way back."""
    run_ranks(_to_the_next, world_size, timeout_s=_LIMIT_S)


def _in_own_order(context: RankContext) -> None:
    pairs, rank = _pairs(context), context.rank
    others = [(rank + 1) % 3, (rank + 2) % 3]
    for dst in others:
        for number in range(3):
            pairs.send(_message(rank, dst, number), dst)
    for src in others[:: -1 if rank else 1]:
        assert [_receive(pairs, src) for _ in range(3)] == [[src, rank, number] for number in range(3)]
    dist.barrier()


def test_each_rank_begins_with_another() -> None:
    """Given three ranks whose first transfers are to different ranks, several each, when they receive in yet other
    orders, then everything is there in the order in which it was sent."""
    run_ranks(_in_own_order, 3, timeout_s=_LIMIT_S)


def _sends_alone(context: RankContext) -> None:
    pairs, store = _pairs(context), context.store("sent")
    if context.rank == 0:
        work = pairs.send(_message(0, 1), 1)
        assert not work.is_completed()
        store.set("returned", "1")
        work.wait()
        return
    store.wait(["returned"])
    assert _receive(pairs, 0) == [0, 1, 0]


def test_a_first_send_does_not_wait_for_the_peer() -> None:
    """Given a peer that takes part only once the send has returned, when a rank sends first, then it returns, and the
    peer receives."""
    run_ranks(_sends_alone, 2, timeout_s=_LIMIT_S)


def _nobody_comes(context: RankContext) -> list[str]:
    pairs, store = _pairs(context, timeout_s=0.5), context.store("done")
    if context.rank == 1:
        store.wait(["done"])
        return []
    work = pairs.send(_message(0, 1), 1)
    tensor = torch.zeros(3, dtype=torch.int64)
    attempts: list[Callable[[], object]] = [
        work.wait,
        lambda: pairs.recv(tensor, 1),
        lambda: pairs.send(tensor, 1),
    ]
    texts = []
    for attempt in attempts:
        with pytest.raises(CommError) as caught:
            attempt()
        texts.append(str(caught.value))
    assert work.is_completed()
    pairs.close()
    store.set("done", "1")
    return texts


def test_a_peer_that_never_comes_is_named() -> None:
    """Given a peer that never takes part, when the limit has passed, then the send's work, a receive and a further send
    raise with group, backend and both ranks, and the pairs can be closed."""
    texts = run_ranks(_nobody_comes, 2, timeout_s=_LIMIT_S)[0]
    assert len(texts) == 3
    for text in texts:
        assert text.startswith("group pp:0, torch: no transfer between global ranks 0 and 1: ")
        assert "global rank(s) [1] did not reach 'the first transfer over torch'" in text


class Faulty(Blocking):
    """Has a fault that no refusal of torch's is, in its first transfer (which connects) or in a later send."""

    first_bad = 0

    def __init__(self, context: GroupContext, name: str) -> None:
        super().__init__(context, name)
        self._transfers = 0

    def send(self, *arguments: Any) -> Any:
        self._count()
        return super().send(*arguments)

    def recv(self, *arguments: Any) -> Any:
        self._count()
        return super().recv(*arguments)

    def _count(self) -> None:
        self._transfers += 1
        if self._transfers > self.first_bad:
            raise KeyError("a fault")


def _has_a_fault(context: RankContext, first_bad: int) -> list[str]:
    pairs, other = _pairs(context), 1 - context.rank
    pairs_module.make_pair_group, Faulty.first_bad = Faulty, first_bad
    tensor = _message(context.rank, other)
    first = pairs.send(tensor, other)
    attempts: list[Callable[[], object]] = [
        lambda: pairs.send(tensor, other).wait(),
        first.wait,
        lambda: pairs.send(tensor, other),
    ]
    texts = []
    for attempt in attempts:
        with pytest.raises(CommError) as caught:
            attempt()
        texts.append(str(caught.value))
        assert isinstance(caught.value.__cause__, KeyError)
    assert first.is_completed()
    pairs.close()
    return texts


@pytest.mark.parametrize("first_bad", [0, 1], ids=["connection", "send"])
def test_any_fault_reaches_who_waits(first_bad: int) -> None:
    """Given a fault that is no refusal of torch's, as the ranks connect or in the first send, then each send's work
    raises, and so does a later send, with group, backend, both ranks and the fault; and the pairs can be closed."""
    for rank, texts in enumerate(run_ranks(_has_a_fault, 2, first_bad, timeout_s=_LIMIT_S)):
        ranks = f"{rank} and {1 - rank}"
        wanted = f"group pp:0, torch: no transfer between global ranks {ranks}: KeyError: 'a fault'"
        assert texts == [wanted] * 3


def _sends_what_cannot_be(context: RankContext) -> list[str]:
    pairs, rank, other = _pairs(context), context.rank, 1 - context.rank
    pairs_module.make_pair_group = _make_gloo
    spread = torch.zeros(3, 2, dtype=torch.int64)[:, 0]
    texts = []
    for number, tensors in enumerate(((spread, spread.to("meta")), (spread,))):  # never connected, then connected
        for tensor in tensors:
            with pytest.raises((ValueError, RuntimeError)) as caught:  # the latter is gloo's
                pairs.send(tensor, other)
            texts.append(str(caught.value))
        work = pairs.send(_message(rank, other, number), other)
        assert _receive(pairs, other) == [other, rank, number]
        work.wait()
    dist.barrier()
    pairs.close()
    return texts[:2]


def test_a_tensor_that_cannot_be_sent_fails_its_call_alone() -> None:
    """Given ranks that were never connected, when one sends a tensor that is not contiguous, or on another kind of
    device, then this call raises and says so, as it does once they are connected, and what is sent next arrives."""
    spread, elsewhere = run_ranks(_sends_what_cannot_be, 2, timeout_s=_LIMIT_S)[0]
    begin = "group pp:0, torch: no transfer between global ranks 0 and 1: a tensor of shape (3,), torch.int64, on "
    assert spread == f"{begin}cpu cannot be sent: it is not contiguous; call contiguous() first"
    assert elsewhere == f"{begin}meta cannot be sent: it is not on cpu"


def _after_the_end(context: RankContext, is_connected: bool) -> list[str]:
    pairs, rank, other = _pairs(context), context.rank, 1 - context.rank
    pairs_module.make_pair_group = _make_gloo
    if is_connected:
        work = pairs.send(_message(rank, other), other)
        assert _receive(pairs, other) == [other, rank, 0]
        work.wait()
    dist.barrier()
    pairs.close()
    texts = []
    for call in (pairs.send, pairs.recv):
        with pytest.raises(CommError) as caught:
            call(_message(rank, other), other)
        texts.append(str(caught.value))
    assert not pairs._peers
    dist.barrier()
    return texts


@pytest.mark.parametrize("is_connected", [False, True])
def test_closed_pairs_refuse_transfers(is_connected: bool) -> None:
    """Given pairs that were closed, connected before or not, when a rank sends or receives, then an error says so at
    once, and nothing is begun."""
    text = "group pp:0, torch: no transfer between global ranks 0 and 1: this group's transport is closed; make a new"
    assert run_ranks(_after_the_end, 2, is_connected, timeout_s=_LIMIT_S)[0] == [f"{text} group"] * 2


def _lifetime(context: RankContext) -> None:
    pairs = _pairs(context)
    pairs_module.make_pair_group = _make_gloo
    before = set(c10d._world.pg_map)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("sglang_fl-peer")]
    if context.rank < 2:
        work = pairs.send(_message(context.rank, 1 - context.rank), 1 - context.rank)
        assert _receive(pairs, 1 - context.rank) == [1 - context.rank, context.rank, 0]
        work.wait()
    dist.barrier()
    made = set(c10d._world.pg_map) - before
    assert len(made) == (2 if context.rank < 2 else 0)
    assert all(sorted(dist.get_process_group_ranks(group)) == [0, 1] for group in made)
    pairs.close()
    pairs.close()
    assert set(c10d._world.pg_map) == before


def test_only_ranks_that_transfer_are_connected() -> None:
    """Given a group of three, when two of them transfer, then they have a group for each direction and the third has
    none; closed, which may be done twice, nothing is left."""
    run_ranks(_lifetime, 3, timeout_s=_LIMIT_S)


def _captures(context: RankContext) -> None:
    pairs, tensor = _pairs(context), torch.zeros(3, dtype=torch.int64)
    other = 1 - context.rank
    pairs._is_capturing = lambda: True
    for call in (pairs.send, pairs.recv):
        with pytest.raises(CommError, match="first transfer lies in a graph's capture"):
            call(tensor, other)
    pairs._is_capturing = lambda: False
    pairs.send(_message(context.rank, other), other)
    assert _receive(pairs, other) == [other, context.rank, 0]
    pairs._is_capturing = lambda: True
    pairs.send(_message(context.rank, other, 1), other)
    assert _receive(pairs, other) == [other, context.rank, 1]
    dist.barrier()


def test_a_first_transfer_is_not_captured() -> None:
    """Given a stream under capture, when ranks that are not connected transfer, then an error says so and nothing is
    begun; once they are connected, they may."""
    run_ranks(_captures, 2, timeout_s=_LIMIT_S)


class DeviceWork:
    """Stands for torch's work of a send on a device: done when the test says so."""

    def __init__(self) -> None:
        self.is_done = False
        self.waits = 0
        self.asked = threading.Event()

    def wait(self) -> None:
        self.waits += 1

    def is_completed(self) -> bool:
        self.asked.set()
        return self.is_done


def test_another_thread_waits_on_the_host() -> None:
    """Given a send that is not done, when the sender's thread waits, then only its stream does; when another waits,
    then it blocks until the send is done, and no stream of its waits."""
    work = DeviceWork()
    send = SendWork(work, threading.get_ident(), None)
    send.wait()
    assert work.waits == 1
    waiting = threading.Thread(target=send.wait)
    waiting.start()
    assert work.asked.wait(_LIMIT_S)
    assert waiting.is_alive()
    work.is_done = True
    waiting.join(_LIMIT_S)
    assert not waiting.is_alive() and work.waits == 1


def test_a_captured_send_is_waited_for_by_its_own_thread() -> None:
    """Given a send in a capture, when its thread waits, then the stream does; another thread gets an error, and the
    device is not asked."""
    work = DeviceWork()
    SendWork(work, threading.get_ident(), None, is_captured=True).wait()
    assert work.waits == 1
    with pytest.raises(CommError, match="use isend"):
        SendWork(work, threading.get_ident() + 1, None, is_captured=True).wait()
    assert work.waits == 1 and not work.asked.is_set()


class Marking:
    """Stands for a device's marker: nothing is ever captured, and an event is in words where it lies."""

    def is_capturing(self) -> bool:
        return False

    def here(self) -> str:
        return "the caller's stream"

    def on(self, stream: int) -> str:
        return f"stream {stream}"


class OwnStream(TorchTransport):
    """Says that its sends are done on stream 7 and 8."""

    def transfer_stream(self, operation: Operation, peer: int) -> int | None:
        return 7 + peer if operation is Operation.SEND else None


def _rows(context: RankContext) -> list[object]:
    ring.marker_for = lambda device: Marking()
    group = _group(context)
    transport, other = RecordedTransport(OwnStream("torch", group), group), 1 - context.rank
    work = transport.send(_message(context.rank, other), other)
    received = transport.recv(torch.zeros(3, dtype=torch.int64), other)
    streams: dict[str, list[object]] = {}
    for recorder in transport.recorders()[1:]:
        recorder.ask_for_mark()
        (call,) = recorder.calls()
        streams[call.operation] = [call.stream, recorder]
    for one in (received, work):
        one.wait()
    for found in streams.values():
        recorder = found.pop()
        assert isinstance(recorder, Recorder)
        mark = recorder.take_mark()
        assert mark is not None and not mark.is_close
        found.append(mark.event)
    return streams["send"] + streams["recv"]


def test_a_send_is_recorded_on_the_stream_behind_it() -> None:
    """Given a transport with a stream of its own for sends, when it sends and receives, then the send's row has that
    stream, and the receive's the caller's; so have the events behind them when another thread might wait."""
    here = [0, "the caller's stream"]
    assert run_ranks(_rows, 2, timeout_s=_LIMIT_S) == [[8, "stream 8", *here], [7, "stream 7", *here]]


class GoingOn:
    """A work as a device's: under way by itself, and that the current stream is to wait for it is noted.

    What was received is then there at once, as for a reader on that stream.
    """

    def __init__(self, work: Any, device: HandmadeDevice, is_read: bool) -> None:
        self._device = device
        self._is_read = is_read
        self._thread = threading.Thread(target=work.wait, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        self._device.now().append("waits for the work")
        if self._is_read:
            self._thread.join()

    def is_completed(self) -> bool:
        return not self._thread.is_alive()


class OnDevice(Blocking):
    """The stand-in for a pair's group whose works go on by themselves."""

    device: HandmadeDevice

    def send(self, *arguments: Any) -> Any:
        self.device.now().append("sends")
        return GoingOn(super().send(*arguments), self.device, is_read=False)

    def recv(self, *arguments: Any) -> Any:
        self.device.now().append("receives")
        return GoingOn(super().recv(*arguments), self.device, is_read=True)


class HandmadeStream:
    """A stream: what was enqueued on it, in words."""

    def __init__(self, device: object = None) -> None:
        self.done: list[str] = []

    def record_event(self) -> str:
        self.done.append("event")
        return "event"

    def wait_event(self, event: str) -> None:
        self.done.append(f"waits for the {event}")


class HandmadeDevice:
    """Stands for torch's module of a device: each thread has a current stream."""

    def __init__(self) -> None:
        self._current = threading.local()
        self.default = HandmadeStream()
        self.Stream = HandmadeStream

    def current_stream(self, device: object = None) -> HandmadeStream:
        found: HandmadeStream = getattr(self._current, "stream", self.default)
        return found

    def now(self) -> list[str]:
        return self.current_stream().done

    def device(self, device: object) -> nullcontext[None]:
        return nullcontext()

    @contextmanager
    def stream(self, stream: HandmadeStream) -> Iterator[None]:
        before, self._current.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._current.stream = before


def _with_streams(context: RankContext) -> tuple[list[str], list[str]]:
    pairs, rank, other = _pairs(context), context.rank, 1 - context.rank
    device = OnDevice.device = HandmadeDevice()
    pairs_module.make_pair_group = OnDevice
    pairs._device = device
    torch.Tensor.record_stream = lambda self, stream: stream.done.append("keeps the tensor")  # type: ignore[method-assign]
    pairs.send(_message(rank, other), other)
    assert _receive(pairs, other) == [other, rank, 0]
    cold = list(pairs._streams[other].done)
    pairs.send(_message(rank, other, 1), other)
    assert _receive(pairs, other) == [other, rank, 1]
    assert pairs._streams[other].done[: len(cold)] == cold
    dist.barrier()
    return device.default.done, pairs._streams[other].done[-6:]


def test_a_send_has_its_stream() -> None:
    """Given a handmade device, when ranks send cold and then connected, then the queued send is behind what its
    caller's stream did; a stream of the peer's is behind both sends and keeps their tensors; the caller's never is."""
    for default, own in run_ranks(_with_streams, 2, timeout_s=_LIMIT_S):
        assert default == ["event", "receives", "waits for the work", "sends", "receives", "waits for the work"]
        queued = ["waits for the event", "sends", "waits for the work", "keeps the tensor"]
        assert own == [*queued, "waits for the work", "keeps the tensor"]
