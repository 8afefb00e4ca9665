"""What a group's recorders say of its calls: rows, places, calls under way, refusal, abort; on every backend here."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang_fl.comm.communicator import CommunicatorFL
from sglang_fl.comm.errors import CommError
from sglang_fl.comm.recorder import SIZE, RecordedCall, Recorder, from_row
from sglang_fl.testing.ranks import RankContext, run_ranks
from tests.distributed.groups import communicator_of_all

LIMIT_S = 30.0
SOON_S = 6.0  # an error may ask the peers for two seconds


def _recorder_of(communicator: CommunicatorFL, direction: str = "") -> Recorder:
    name = f"{communicator.name} {communicator.backend}{direction}"
    transport = communicator.agreed.transport
    assert transport is not None
    (found,) = [recorder for recorder in transport.recorders() if recorder.name == name]
    return found


def _since(recorder: Recorder, number: int) -> list[RecordedCall]:
    return [call for call in recorder.calls() if call.number > number]


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# --- rows ---


def _call_everything(communicator: CommunicatorFL) -> None:
    size, rank = communicator.world_size, communicator.rank_in_group
    communicator.all_reduce(torch.ones(3))
    communicator.all_reduce(torch.ones(5, dtype=torch.bfloat16))
    communicator.all_reduce_new(torch.ones(4))
    communicator.all_gather_into_tensor(torch.zeros(2 * size, dtype=torch.int64), torch.ones(2, dtype=torch.int64))
    communicator.reduce_scatter_tensor(torch.zeros(6), torch.ones(6 * size))
    communicator.reduce_scatterv(torch.ones(7), sizes=[0, 7, *[0] * (size - 2)])
    communicator.broadcast(torch.ones(8, dtype=torch.float16), src=1)
    communicator.gather(torch.ones(9), dst=0)
    communicator.send(torch.ones(10), (rank + 1) % size)
    communicator.recv(torch.Size([10]), torch.float32, (rank - 1) % size)
    communicator.send(torch.ones(11, dtype=torch.bool), (rank + 1) % size)
    communicator.recv(torch.Size([11]), torch.bool, (rank - 1) % size)


def _rows(context: RankContext) -> dict[str, tuple[int, list[dict[str, Any]]]]:
    communicator = communicator_of_all(context)
    created = _recorder_of(communicator).entered()
    before_s = time.time()
    _call_everything(communicator)
    own = communicator.agreed.transport
    assert own is not None
    # A send is carried by another thread. FlagCX's directions begin with a byte that makes their connections.
    sent = _recorder_of(communicator, f" {context.rank}>{1 - context.rank}")
    _until(lambda: sent.entered() == {"torch": 2, "flagcx": 3}[communicator.backend])
    # Nor does it count as under way before somebody waits for it.
    _until(lambda: all(call.time_out_s is not None for recorder in own.recorders() for call in recorder.calls()))
    after_s = time.time()
    result = {}
    for recorder in own.recorders():
        first = created if recorder is _recorder_of(communicator) else 0
        calls = _since(recorder, first)
        # The processor's counter is read beside the clock, not from it.
        assert all(before_s - 1e-3 <= call.time_in_s <= (call.time_out_s or 0) <= after_s + 1e-3 for call in calls)
        assert recorder.entered() == calls[-1].number
        last = recorder.last()
        assert last is not None and (last.number, last.place) == (calls[-1].number, calls[-1].place)
        assert recorder.device.type == "cpu" and not recorder.has_captured()
        assert recorder.mark_now() is recorder.take_mark() is None
        result[recorder.name] = (first, [call.row() for call in calls])
    communicator.destroy()
    return result


def test_each_operation_has_a_row_on_every_rank(backend: dict[str, str]) -> None:
    """Given a group of two, when every operation is called, then each rank has the same rows: number, operation, dtype,
    elements and root; and the transfers by direction, in numbers of their own."""
    first, second = run_ranks(_rows, 2, env=backend)
    name = backend["SGLANG_FL_DIST_BACKEND"]
    assert set(first) == set(second) == {f"tp:0 {name}", f"tp:0 {name} 0>1", f"tp:0 {name} 1>0"}
    created, rows = first[f"tp:0 {name}"]
    assert [(row["number"] - created, from_row(row).what()) for row in rows] == [
        (1, "all_reduce float32[3]"),
        (2, "all_reduce bfloat16[5]"),
        (3, "all_reduce float32[4]"),
        (4, "all_gather int64[2]"),
        (5, "reduce_scatter float32[6]"),
        (6, "reduce float32[7] rank 1"),
        (7, "broadcast float16[8] rank 1"),
        (8, "gather float32[9] rank 0"),
    ]
    assert {(row["error"], row["captured"], row["stream"]) for row in rows} == {("", False, 0)}
    shown = {row["place"].rpartition(" ")[2] for row in rows}
    assert shown == {"_call_everything"}
    lines = [int(row["place"].split(":")[1].split()[0]) for row in rows]
    assert lines == list(range(lines[0], lines[0] + len(rows)))
    compared = ("number", "operation", "dtype", "count", "peer", "place")
    assert [[row[key] for key in compared] for row in second[f"tp:0 {name}"][1]] == [
        [row[key] for key in compared] for row in rows
    ]


def test_transfers_are_rows_of_their_direction(backend: dict[str, str]) -> None:
    """Given two ranks that send to each other, when they have received, then each direction has its sends on the one
    rank and its receives on the other, with equal numbers, elements and the peer's rank."""
    results = run_ranks(_rows, 2, env=backend)
    name = backend["SGLANG_FL_DIST_BACKEND"]
    for source, destination in ((0, 1), (1, 0)):
        direction = f"tp:0 {name} {source}>{destination}"
        sent, received = results[source][direction][1], results[destination][direction][1]
        compared = ("number", "dtype", "count")
        assert [[row[key] for key in compared] for row in sent] == [[row[key] for key in compared] for row in received]
        assert [(row["operation"], row["dtype"], row["count"], row["peer"]) for row in sent[-2:]] == [
            ("send", "float32", 10, destination),
            ("send", "uint8", 11, destination),
        ]
        assert {(row["operation"], row["peer"]) for row in received} == {("recv", source)}
        assert {row["place"].rpartition(" ")[2] for row in sent[-2:] + received[-2:]} == {"_call_everything"}


# --- the ring ---


def _odd(communicator: CommunicatorFL, tensor: torch.Tensor) -> None:
    communicator.all_reduce(tensor)


def _even(communicator: CommunicatorFL, tensor: torch.Tensor) -> None:
    def deeper() -> None:
        communicator.all_reduce(tensor)

    deeper()


def _wraps(context: RankContext) -> list[tuple[int, int, str]]:
    communicator = communicator_of_all(context)
    recorder = _recorder_of(communicator)
    while recorder.entered() < SIZE + 300:
        number = recorder.entered() + 1
        (_odd if number % 2 else _even)(communicator, torch.ones(number % 7 + 1))
    calls = [(call.number, call.count, call.place.rpartition(" ")[2]) for call in recorder.calls()]
    communicator.destroy()
    return calls


def test_the_last_calls_are_kept(backend: dict[str, str]) -> None:
    """Given more calls than are kept, from two places at different depths, when they are shown, then they are the last
    ones, oldest first, each with its own place."""
    for calls in run_ranks(_wraps, 2, env=backend, timeout_s=120.0):
        numbers = range(301, SIZE + 301)
        assert [(number, count) for number, count, _ in calls] == [(number, number % 7 + 1) for number in numbers]
        assert {(number % 2, place.rpartition(".")[2]) for number, _, place in calls} == {(1, "_odd"), (0, "deeper")}


def _watched(context: RankContext) -> int:
    communicator = communicator_of_all(context)
    recorder = _recorder_of(communicator)
    created, done, problems, looks = recorder.entered(), threading.Event(), [], [0]

    def look() -> None:
        while not done.is_set() or not looks[0]:
            calls = _since(recorder, created)
            numbers = [call.number for call in calls]
            wrong = [call for call in calls if call.count != call.number % 5 + 1 or (call.time_out_s or 1e99) < 0]
            if numbers != sorted(set(numbers)) or wrong:
                problems.append(str(wrong or numbers))
            late = recorder.under_way()
            if late is not None and (late.time_out_s is not None or late.count != late.number % 5 + 1):
                problems.append(str(late))
            looks[0] += len(calls)

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(3000):
        communicator.all_reduce(torch.ones((recorder.entered() + 1) % 5 + 1))
    done.set()
    thread.join(LIMIT_S)
    communicator.destroy()
    assert problems == []
    return looks[0]


def test_rows_are_whole_while_calls_are_made(backend: dict[str, str]) -> None:
    """Given a thread that reads the rows all the time, when calls are made, then every row it sees is of one call."""
    assert min(run_ranks(_watched, 2, env=backend, timeout_s=120.0)) > 0


# --- calls that do not return ---


class _Caller:
    """A call in a thread of its own, and how it ended."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.error: BaseException | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except CommError as error:
            self.error = error

    def join(self, limit_s: float) -> bool:
        self._thread.join(limit_s)
        return not self._thread.is_alive()


def _late(context: RankContext) -> tuple[str, bool, str] | None:
    communicator = communicator_of_all(context)
    store = context.store("late")
    if context.rank == 1:
        store.wait(["seen"])
        communicator.all_reduce(torch.ones(12))
        communicator.destroy()
        return None
    recorder = _recorder_of(communicator)
    caller = _Caller(lambda: communicator.all_reduce(torch.ones(12)))
    _until(lambda: recorder.under_way() is not None)
    call = recorder.under_way()
    assert call is not None
    store.set("seen", "1")
    assert caller.join(LIMIT_S) and caller.error is None
    assert recorder.under_way() is None
    communicator.destroy()
    return call.what(), call.time_out_s is None and call.number == recorder.entered(), call.place


def test_a_call_that_waits_for_a_peer_is_under_way(backend: dict[str, str]) -> None:
    """Given a peer that comes late, when another thread looks, then the call is under way, with its place, until the
    peer has come."""
    told = run_ranks(_late, 2, env=backend)[0]
    assert told is not None
    what, is_open, place = told
    assert (what, is_open) == ("all_reduce float32[12]", True)
    assert place.endswith("_late.<locals>.<lambda>")


def _aborted(context: RankContext) -> tuple[bool, str, float, list[str], str] | None:
    communicator = communicator_of_all(context)
    store = context.store("aborted")
    if context.rank == 1:
        store.wait(["done"])
        communicator.destroy()
        return None
    recorder = _recorder_of(communicator)
    caller = _Caller(lambda: communicator.all_reduce(torch.ones(12)))
    _until(lambda: recorder.under_way() is not None)
    recorder.refuse("rank 1 did not come")
    before_s = time.monotonic()
    aborted = recorder.abort(SOON_S)
    ended = caller.join(LIMIT_S)
    took_s = time.monotonic() - before_s
    assert ended
    number, errors = recorder.entered(), [call.error for call in recorder.calls()[-1:]]
    with pytest.raises(CommError) as raised:
        communicator.all_reduce(torch.ones(2))
    assert recorder.entered() == number and recorder.under_way() is None
    before_s = time.monotonic()
    communicator.destroy()
    assert time.monotonic() - before_s < SOON_S
    store.set("done", "1")
    return aborted, str(caller.error), took_s, errors, str(raised.value)


def test_a_call_under_way_can_be_aborted(backend: dict[str, str]) -> None:
    """Given a call whose peer never comes, when it is refused and aborted from another thread, then it raises its
    name and the reason in its thread, at once; so does the next call, which gets no number; and destroy ends."""
    told = run_ranks(_aborted, 2, env={**backend, "HOSTCX_QUIET": "1"})[0]
    assert told is not None
    aborted, error, took_s, errors, next_error = told
    assert aborted
    for text in (error, next_error):
        assert re.match(
            r"group tp:0 .*call number \d+, all_reduce float32\[12\] .* failed: rank 1 did not come; ", text
        ), text
    assert took_s < SOON_S
    assert len(errors) == 1 and errors[0] != ""


def _aborted_transfer(context: RankContext) -> tuple[bool, str] | None:
    communicator = communicator_of_all(context)
    store = context.store("aborted")
    mine = torch.ones(1)
    for first in (0, 1):  # makes both directions
        if context.rank == first:
            communicator.send(mine)
        else:
            communicator.recv(mine.shape, mine.dtype)
    if context.rank == 1:
        store.wait(["done"])
        communicator.destroy()
        return None
    caller = _Caller(lambda: communicator.recv(torch.Size([4]), torch.float32))
    recorder = _recorder_of(communicator, " 1>0")
    _until(lambda: recorder.under_way() is not None)
    call = recorder.under_way()
    assert call is not None and call.what() == "recv float32[4] rank 1"
    recorder.refuse("rank 1 does not send")
    aborted = recorder.abort(SOON_S)
    assert caller.join(SOON_S)
    store.set("done", "1")
    communicator.destroy()
    return aborted, str(caller.error)


def test_a_receive_under_way_can_be_aborted(backend: dict[str, str]) -> None:
    """Given a receive whose peer never sends, when its direction is aborted, then it raises the reason."""
    told = run_ranks(_aborted_transfer, 2, env={**backend, "HOSTCX_QUIET": "1"})[0]
    assert told is not None
    named = r"group tp:0 .* 1>0, .*call number \d+, recv float32\[4\] .* failed: rank 1 does not send; .*"
    assert told[0] and re.fullmatch(named, told[1]), told


# --- off ---


def _unrecorded(context: RankContext) -> tuple[int, str, int]:
    communicator = communicator_of_all(context)
    _call_everything(communicator)
    transport = communicator.agreed.transport
    assert transport is not None
    result = len(transport.recorders()), type(transport).__name__
    communicator.destroy()
    return *result, len(transport.recorders())


def test_nothing_is_recorded_when_it_is_off(backend: dict[str, str]) -> None:
    """Given SGLANG_FL_COMM_RECORD=0, when a group is made and used, then it has no recorder and no transport around its
    own."""
    own = {"torch": "TorchTransport", "flagcx": "FlagCXTransport"}[backend["SGLANG_FL_DIST_BACKEND"]]
    for recorders, transport, afterwards in run_ranks(_unrecorded, 2, env={**backend, "SGLANG_FL_COMM_RECORD": "0"}):
        assert (recorders, transport, afterwards) == (0, own, 0)
