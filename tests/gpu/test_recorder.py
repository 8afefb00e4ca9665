"""Recorders of two ranks on GPUs: rows of enqueued calls, marks behind them, what a graph's capture does to both."""

from __future__ import annotations

import ctypes
import threading
import time

import pytest
import torch

from sglang_fl.comm.communicator import CommunicatorFL
from sglang_fl.comm.marks import raw_stream
from sglang_fl.comm.recorder import Mark, Recorder
from sglang_fl.testing.ranks import RankContext
from tests.gpu.places import Places, communicator_of_all, run_on

pytestmark = pytest.mark.gpu

_LIMIT_S = 120.0
_DONE_S = 30.0
_ELEMENTS = 1 << 20


@pytest.fixture(params=["flagcx", "torch"])
def backend(request: pytest.FixtureRequest) -> str:
    """What carries the calls."""
    return str(request.param)


def _recorder_of(communicator: CommunicatorFL, direction: str = "") -> Recorder:
    name = f"{communicator.name} {communicator.backend}{direction}"
    # What travels over the CPU group has recorders as well.
    recorders = [recorder for recorder in communicator.recorders() if recorder.device.type == "cuda"]
    (found,) = [recorder for recorder in recorders if recorder.name == name]
    return found


def _ones(communicator: CommunicatorFL) -> torch.Tensor:
    return torch.ones(_ELEMENTS, device=communicator.device)


def _wait_for(mark: Mark) -> None:
    deadline = time.monotonic() + _DONE_S
    while not mark.event.query():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def _forget_marks(recorder: Recorder) -> None:
    """The monitor asks for marks as well; what it asked for is not the test's."""
    recorder.take_mark()


def _eager(context: RankContext) -> None:
    communicator = communicator_of_all(context, "tp:0")
    recorder = _recorder_of(communicator)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        recorder.ask_for_mark()
        number = recorder.entered() + 1
        result = communicator.all_reduce(_ones(communicator))
        mark = recorder.take_mark()
    assert mark is not None and mark.number == number and mark.is_close
    _wait_for(mark)
    assert result.cpu().eq(2).all()
    call = recorder.last()
    assert call is not None and (call.number, call.stream) == (number, raw_stream(stream))
    assert call.what() == f"all_reduce float32[{_ELEMENTS}]" and not call.captured and call.time_out_s is not None
    assert call.place.endswith("_eager")
    assert not recorder.abort(1.0)
    communicator.destroy()


def test_a_mark_lies_behind_the_call_on_its_stream(backend: str, two_places: Places) -> None:
    """Given a mark that was asked for, when a call is enqueued on a side stream, then its row names that stream, and an
    event lies behind it; on a device nothing is aborted."""
    run_on(two_places, _eager, backend, timeout_s=_LIMIT_S)


def _late_peer(context: RankContext) -> None:
    communicator = communicator_of_all(context, "tp:0")
    recorder = _recorder_of(communicator)
    store = context.store("late")
    torch.cuda.synchronize()
    if context.rank == 1:
        store.wait(["seen"])
        communicator.all_reduce(_ones(communicator))
    else:
        tensor = _ones(communicator)
        communicator.all_reduce(tensor)
        assert recorder.under_way() is None  # it is enqueued
        marks: list[Mark | None] = []
        thread = threading.Thread(target=lambda: marks.append(recorder.mark_now()))
        thread.start()
        thread.join(_DONE_S)
        (mark,) = marks
        assert mark is not None and mark.number == recorder.entered()
        time.sleep(0.5)
        assert not mark.event.query()
        store.set("seen", "1")
        _wait_for(mark)
        assert tensor.cpu().eq(2).all()
    communicator.destroy()


def test_a_mark_of_another_thread_waits_for_the_peer(backend: str, two_places: Places) -> None:
    """Given a peer that comes late, when another thread marks the last call, then the call has returned, and its mark
    is not done until the peer has come."""
    run_on(two_places, _late_peer, backend, timeout_s=_LIMIT_S)


def _captured(context: RankContext) -> float:
    communicator = communicator_of_all(context, "tp:0")
    recorder = _recorder_of(communicator)
    tensor = _ones(communicator)
    communicator.all_reduce(tensor.clone())
    torch.cuda.synchronize()
    assert not recorder.has_captured()
    first = recorder.entered() + 1
    graph = torch.cuda.CUDAGraph()
    recorder.ask_for_mark()
    _forget_marks(recorder)
    with torch.cuda.graph(graph):
        static = tensor.clone()
        for _ in range(3):
            communicator.all_reduce(static)
        assert recorder.mark_now() is None
    assert recorder.take_mark() is None
    assert [call.captured for call in recorder.calls() if call.number >= first] == [True] * 3
    assert recorder.has_captured()
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    assert static.cpu().eq(8).all()
    eager = communicator.all_reduce(tensor.clone())
    mark = recorder.take_mark()
    assert mark is not None and mark.number == first + 3
    _wait_for(mark)
    assert eager.cpu().eq(2).all()
    last = recorder.last()
    assert last is not None and not last.captured
    before_s = time.monotonic()
    communicator.destroy()
    took_s = time.monotonic() - before_s
    graph.replay()
    torch.cuda.synchronize()
    assert static.cpu().eq(8).all()
    return took_s


def test_no_mark_is_captured(backend: str, two_places: Places) -> None:
    """Given a mark that was asked for before a capture, when calls are captured, then their rows say so and none is
    marked; the graph replays right; the first eager call afterwards has the mark; and the group is destroyed in seconds
    while the graph is alive and still replays."""
    for took_s in run_on(two_places, _captured, backend, timeout_s=_LIMIT_S):
        assert isinstance(took_s, float) and took_s < 7.0


def _transfers(context: RankContext) -> None:
    communicator = communicator_of_all(context, "tp:0")
    own = torch.full((_ELEMENTS,), float(context.rank + 1), device=communicator.device)
    communicator.send(own, 1 - context.rank)
    received = communicator.recv(own.shape, own.dtype, 1 - context.rank)
    incoming = _recorder_of(communicator, f" {1 - context.rank}>{context.rank}")
    mark = incoming.mark_now()
    assert mark is not None
    _wait_for(mark)
    assert received.cpu().eq(2 - context.rank).all()
    last = incoming.last()
    assert last is not None and last.what() == f"recv float32[{_ELEMENTS}] rank {1 - context.rank}"
    assert last.place.endswith("_transfers")
    outgoing = _recorder_of(communicator, f" {context.rank}>{1 - context.rank}")
    deadline = time.monotonic() + _DONE_S
    while (sent := outgoing.last()) is None or sent.dtype != "float32":
        assert time.monotonic() < deadline
    assert sent.what() == f"send float32[{_ELEMENTS}] rank {1 - context.rank}"
    assert sent.number == last.number
    communicator.destroy()


def test_each_direction_has_marks_of_its_own(backend: str, two_places: Places) -> None:
    """Given two ranks that send to each other, when they have received, then each direction has its rows and can be
    marked on the stream that it works on."""
    run_on(two_places, _transfers, backend, timeout_s=_LIMIT_S)


def _contexts() -> list[int]:
    """GPUs on which this process has a context: the driver's answer, without making one."""
    flags, active = ctypes.c_uint(), ctypes.c_int()
    driver = ctypes.CDLL("libcuda.so.1")
    found = []
    for place in range(torch.cuda.device_count()):
        assert driver.cuDevicePrimaryCtxGetState(place, ctypes.byref(flags), ctypes.byref(active)) == 0
        if active.value:
            found.append(place)
    return found


def _watched(context: RankContext) -> list[int]:
    communicator = communicator_of_all(context, "tp:0")
    for _ in range(3):
        communicator.all_reduce(_ones(communicator))
        time.sleep(1.5)  # the monitor marks, and asks the marks
    found = _contexts()
    communicator.destroy()
    return found


def test_the_monitor_makes_no_context_on_another_gpu(backend: str, two_places: Places) -> None:
    """Given ranks on a GPU each, when their calls were watched a while, then each process has its own GPU's context."""
    if two_places.is_shared:
        pytest.skip("needs a GPU for each of two ranks: with one there is no other to make a context on")
    assert run_on(two_places, _watched, backend, timeout_s=_LIMIT_S) == [[0], [1]]
