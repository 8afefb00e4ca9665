"""First transfers between ranks on GPUs, whose connections block the host until the peer makes the same ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from sglang_fl.comm.captures import CAPTURES
from sglang_fl.comm.communicator import CommunicatorFL
from sglang_fl.comm.errors import CommError
from sglang_fl.comm.recorder import Mark, Recorder
from sglang_fl.testing.ranks import RankContext
from tests.gpu.places import Places, communicator_of_all, how, places, run_on

pytestmark = pytest.mark.gpu

_LIMIT_S = 120.0
_DONE_S = 30.0
_MISSING_S = 5.0
# Elements of float32: one, and far more than a library buffers for a peer that does not receive yet.
_SIZES = (1, 16 << 20)
# As many as no library buffers for a peer: between GPUs that reach each other's memory NCCL took 64 MiB, with 32
# channels of 4 MiB it would take 128.
_UNBUFFERED = 256 << 20


@pytest.fixture(params=["flagcx", "torch"])
def backend(request: pytest.FixtureRequest) -> str:
    """What carries the calls."""
    return str(request.param)


@pytest.fixture(params=[3], ids=how)
def three_places(request: pytest.FixtureRequest) -> Places:
    """Places for three ranks, see :func:`tests.gpu.places.places`."""
    return places(request.param)


def _communicator(context: RankContext, timeout_s: float | None = None) -> CommunicatorFL:
    communicator = communicator_of_all(context, "pp:0", **({} if timeout_s is None else {"timeout_s": timeout_s}))
    # CUDA loads a kernel at its first launch, and on the way waits for what runs: for a send, until it is received.
    assert _is_all(_message(communicator, 8, 1.0), 1.0) and not _is_all(_message(communicator, 8, 1.0), 2.0)
    return communicator


def _message(communicator: CommunicatorFL, elements: int, value: float) -> torch.Tensor:
    return torch.full((elements,), value, dtype=torch.float32, device=communicator.device)


def _is_all(tensor: torch.Tensor, value: float) -> bool:
    return bool(tensor.eq(value).all().item())


def _receive(communicator: CommunicatorFL, elements: int, src: int, value: float) -> None:
    received = communicator.recv(torch.Size([elements]), torch.float32, src)
    assert _is_all(received, value), (src, value)


def _send_first(context: RankContext, elements: int, on_own_stream: bool) -> None:
    communicator, rank, size = _communicator(context), context.rank, context.world_size
    following, previous = (rank + 1) % size, (rank - 1) % size
    stream = torch.cuda.Stream() if on_own_stream else torch.cuda.default_stream()
    with torch.cuda.stream(stream):
        for turn in range(3):  # the first is cold; then the way back, and again
            context.note(f"turn {turn}")
            dst, src = (previous, following) if turn == 1 else (following, previous)
            communicator.send(_message(communicator, elements, 10.0 * turn + rank), dst)
            _receive(communicator, elements, src, 10.0 * turn + src)
    communicator.destroy()


@pytest.mark.parametrize("on_own_stream", [False, True], ids=["default-stream", "own-stream"])
@pytest.mark.parametrize("elements", _SIZES)
def test_both_send_first(backend: str, elements: int, on_own_stream: bool, two_places: Places) -> None:
    """Given two ranks that were never connected, when both send before they receive, then both have what was sent."""
    run_on(two_places, _send_first, backend, elements, on_own_stream, timeout_s=_LIMIT_S)


@pytest.mark.parametrize("elements", _SIZES)
def test_a_ring_of_three_sends_first(backend: str, elements: int, three_places: Places) -> None:
    """Given three ranks that were never connected, when each sends to the next before it receives, then all have what
    was sent."""
    run_on(three_places, _send_first, backend, elements, False, timeout_s=_LIMIT_S)


def _in_own_order(context: RankContext) -> None:
    communicator, rank = _communicator(context), context.rank
    others = [(rank + 1) % 3, (rank + 2) % 3]
    for dst in others:
        for number in range(3):
            communicator.send(_message(communicator, 1 << 20, 100.0 * rank + 10.0 * dst + number), dst)
    for src in others[:: -1 if rank else 1]:
        for number in range(3):
            _receive(communicator, 1 << 20, src, 100.0 * src + 10.0 * rank + number)
    communicator.destroy()


def test_each_rank_begins_with_another(backend: str, three_places: Places) -> None:
    """Given three ranks whose first transfers are to different ranks, several each, when they receive in yet other
    orders, then everything is there in the order in which it was sent."""
    run_on(three_places, _in_own_order, backend, timeout_s=_LIMIT_S)


def _nobody_comes(context: RankContext) -> list[str]:
    communicator, store = _communicator(context, _MISSING_S), context.store("done")
    if context.rank == 1:
        store.wait(["done"])
        communicator.destroy()
        return []
    texts: list[str] = []

    def refused(call: Callable[[], object]) -> bool:
        try:
            call()
        except CommError as error:
            texts.append(str(error))
        return bool(texts)

    try:
        communicator.send(_message(communicator, 8, 1.0), 1)
        assert refused(lambda: communicator.recv(torch.Size([8]), torch.float32, 1))
        receive, texts = texts, []
        _wait_for(lambda: refused(lambda: communicator.send(_message(communicator, 8, 1.0), 1)))
    finally:
        store.set("done", "1")
    communicator.destroy()
    return receive + texts


def test_a_peer_that_never_comes_is_named(backend: str, two_places: Places) -> None:
    """Given a peer that takes part in no transfer, when the group's limit has passed, then a receive and the next send
    raise, both with the group and the peer."""
    texts = run_on(two_places, _nobody_comes, backend, timeout_s=_LIMIT_S)[0]
    assert isinstance(texts, list) and len(texts) == 2
    for text in texts:
        assert "pp:0" in text and "1" in text.partition("rank")[2], text


def _outgoing(communicator: CommunicatorFL) -> Recorder:
    rank = communicator.rank_in_group
    name = f"{communicator.name} {communicator.backend} {rank}>{1 - rank}"
    recorders = [recorder for recorder in communicator.recorders() if recorder.device.type == "cuda"]
    (found,) = [recorder for recorder in recorders if recorder.name == name]
    return found


def _wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _DONE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def _received_late(context: RankContext) -> None:
    communicator, store, elements = _communicator(context), context.store("seen"), _UNBUFFERED
    _exchange(communicator)
    if context.rank == 1:
        store.wait(["seen"])
        _receive(communicator, elements, 0, 5.0)
        communicator.destroy()
        return
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        communicator.send(_message(communicator, elements, 5.0), 1)
    marks: list[Mark | None] = []
    thread = threading.Thread(target=lambda: marks.append(_outgoing(communicator).mark_now()))
    thread.start()
    thread.join(_DONE_S)
    (mark,) = marks
    assert mark is not None and mark.number == _outgoing(communicator).entered()
    time.sleep(0.5)
    assert not mark.event.query()
    # What the rank itself does meanwhile, there and on the default stream, does not wait for the receiver.
    behind = torch.cuda.Event()
    behind.record(stream)
    default = torch.cuda.Event()
    default.record(torch.cuda.default_stream())
    _wait_for(behind.query)
    _wait_for(default.query)
    assert not mark.event.query()
    store.set("seen", "1")
    _wait_for(mark.event.query)
    communicator.destroy()


def test_a_send_that_nobody_receives_is_seen_and_holds_up_nothing(backend: str, two_places: Places) -> None:
    """Given a send that is not received yet, when its direction is marked from another thread, then the mark is not
    done until it is received; the sender's streams go on meanwhile."""
    run_on(two_places, _received_late, backend, timeout_s=_LIMIT_S)


def _exchange(communicator: CommunicatorFL) -> None:
    rank = communicator.rank_in_group
    communicator.send(_message(communicator, 8, rank), 1 - rank)
    _receive(communicator, 8, 1 - rank, 1.0 - rank)
    torch.cuda.synchronize()


def _captured(context: RankContext) -> None:
    communicator, rank = _communicator(context), context.rank
    own, received = (torch.zeros(1 << 20, device=communicator.device) for _ in range(2))
    _exchange(communicator)
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with CAPTURES.capture(), communicator.graph_capture(), torch.cuda.graph(graph):
        sent = communicator.isend(own, 1 - rank)
        communicator.recv_into(received, 1 - rank)
        assert sent.work is not None
        sent.work.wait()
    for turn in range(3):
        own.fill_(10.0 * turn + rank)
        graph.replay()
        torch.cuda.synchronize()
        assert received.eq(10.0 * turn + 1 - rank).all().item()
    communicator.destroy()
    graph.replay()
    torch.cuda.synchronize()


def test_transfers_are_captured_once_connected(backend: str, two_places: Places) -> None:
    """Given connected ranks, when both send first in a capture, then each replay moves the data of that moment, also
    after destroy."""
    run_on(two_places, _captured, backend, timeout_s=_LIMIT_S)


def _captured_first(context: RankContext) -> str:
    communicator, rank = _communicator(context), context.rank
    tensor = _message(communicator, 8, 1.0)
    graph = torch.cuda.CUDAGraph()
    with CAPTURES.capture(), torch.cuda.graph(graph), pytest.raises(CommError) as caught:
        tensor.add_(1)
        communicator.isend(tensor, 1 - rank)
    _exchange(communicator)
    communicator.destroy()
    return str(caught.value)


def test_a_first_transfer_is_not_captured(backend: str, two_places: Places) -> None:
    """Given ranks that are not connected, when they send in a capture, then an error says what to do,
    the capture is good, and they can be connected afterwards."""
    for text in run_on(two_places, _captured_first, backend, timeout_s=_LIMIT_S):
        assert "first transfer lies in a graph's capture" in str(text)
