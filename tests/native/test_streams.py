"""Boxed streams: one box per raw stream and communicator, freed exactly once, from any thread."""

from __future__ import annotations

import threading

from sglang_fl.comm.backends.flagcx import DataType, FlagCXCommunicator, FlagCXLibrary, ReduceOp

from .conftest import LIMIT_S
from .recorder import Recorder


def reduce_on(communicator: FlagCXCommunicator, stream: int) -> None:
    communicator.all_reduce(1, 2, 3, DataType.INT8, ReduceOp.SUM, stream)


def test_a_stream_is_boxed_once_and_every_call_gets_its_own(
    communicator: FlagCXCommunicator, recorder: Recorder
) -> None:
    streams = [0, 0x1000, 0x1000, 0, 0x2000, 0x1000, 2**64 - 16]
    for stream in streams:
        reduce_on(communicator, stream)
    assert [call["stream"] for call in recorder.calls("flagcxAllReduce")] == streams
    assert sorted(call["raw"] for call in recorder.calls("streamCopy")) == sorted(set(streams))


def test_many_streams_are_all_found_again_and_all_freed(communicator: FlagCXCommunicator, recorder: Recorder) -> None:
    streams = [0x7F0000000000 + 64 * number for number in range(500)]
    for stream in streams + streams[::-1]:
        reduce_on(communicator, stream)
    boxes = [call["box"] for call in recorder.calls("streamCopy")]
    assert len(boxes) == len(set(boxes)) == 500
    communicator.close()
    assert sorted(call["box"] for call in recorder.calls("streamFree")) == sorted(boxes)


def test_boxes_are_freed_after_the_communicator_and_not_before(
    communicator: FlagCXCommunicator, recorder: Recorder
) -> None:
    reduce_on(communicator, 5)
    communicator.close()
    communicator.close()
    assert recorder.names()[-2:] == ["flagcxCommDestroy", "streamFree"]


def test_two_communicators_share_no_boxes(library: FlagCXLibrary, recorder: Recorder) -> None:
    """Case 28: no state between communicators; closing one leaves the other's boxes."""
    pair = [FlagCXCommunicator.create(library, library.unique_id(), 1, 0, LIMIT_S) for _ in range(2)]
    for communicator in pair:
        reduce_on(communicator, 0x40)
    first, second = (call["box"] for call in recorder.calls("streamCopy"))
    pair[0].close()
    assert [call["box"] for call in recorder.calls("streamFree")] == [first]
    reduce_on(pair[1], 0x40)
    assert recorder.calls("flagcxAllReduce")[-1]["box"] == second
    pair[1].close()


def test_threads_on_different_streams_each_get_their_stream(library: FlagCXLibrary, recorder: Recorder) -> None:
    """The last-stream cache is one word: a thread never sees another's raw stream with a third one's box."""
    communicator = FlagCXCommunicator.create(library, library.unique_id(), 1, 0, LIMIT_S)
    rounds, threads = 300, 4

    def work(number: int) -> None:
        for round_number in range(rounds):
            stream = 64 * (1 + number + threads * (round_number % 5))
            communicator.send(stream, 1, DataType.INT8, 0, stream)  # the buffer says which stream is right

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    calls = recorder.calls("flagcxSend")
    assert len(calls) == rounds * threads
    assert all(call["buffer"] == call["stream"] for call in calls)
    assert len(recorder.calls("streamCopy")) == 5 * threads
    communicator.close()
    assert len(recorder.calls("streamFree")) == 5 * threads
