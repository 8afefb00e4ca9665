"""Which call the monitor names when a process has several recorders on a device, whose streams are handmade here."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from sglang_fl.comm.captures import CAPTURES
from sglang_fl.comm.monitor import monitor as monitor_module
from sglang_fl.comm.monitor.board import Beat
from sglang_fl.comm.monitor.monitor import Monitor
from sglang_fl.comm.monitor.verdict import Absence, Missing, Stuck, Verdict, as_told, to_tell
from sglang_fl.comm.recorder import Mark, RecordedCall, Recorder


@dataclass
class Work:
    """Something on a stream, done when the test says so and everything before it is."""

    is_done: bool = False


@dataclass
class Stream:
    """Does what is put on it in order."""

    handle: int = 0
    works: list[Work] = field(default_factory=list)

    def put(self, is_done: bool) -> Work:
        self.works.append(Work(is_done))
        return self.works[-1]


class Event:
    """Done once everything is that was on the stream before it."""

    def __init__(self, stream: Stream) -> None:
        self._before = list(stream.works)

    def query(self) -> bool:
        return all(work.is_done for work in self._before)


class StreamRecorder(Recorder):
    """Calls on handmade streams."""

    def __init__(self, name: str, ranks: tuple[int, ...] = (0, 1)) -> None:
        self.name = name
        self.ranks = ranks
        self.device = torch.device("cuda:0")
        self._calls: list[RecordedCall] = []
        self._streams: list[Stream] = []
        self._close: Mark | None = None

    def call(self, operation: str, stream: Stream, is_done: bool, is_marked: bool = False) -> Work:
        """One more; ``is_marked``: with an event right behind it."""
        number, now_s = len(self._calls) + 1, time.monotonic()
        self._calls.append(RecordedCall(number, operation, "float32", 8, stream=stream.handle, entered_s=now_s))
        self._streams.append(stream)
        work = stream.put(is_done)
        if is_marked:
            self._close = Mark(number, Event(stream), time.monotonic(), is_close=True)
        return work

    def entered(self) -> int:
        return len(self._calls)

    def calls(self) -> list[RecordedCall]:
        return list(self._calls)

    def under_way(self) -> RecordedCall | None:
        return None

    def ask_for_mark(self) -> None:
        """The test says which call is marked."""

    def take_mark(self) -> Mark | None:
        mark, self._close = self._close, None
        return mark

    def mark_now(self) -> Mark | None:
        return Mark(self.entered(), Event(self._streams[-1]), time.monotonic())

    def refuse(self, reason: str) -> None:
        raise AssertionError("on a device nothing is refused, the process ends")

    def abort(self, limit_s: float) -> bool:
        raise AssertionError("on a device nothing is aborted")


class Losing:
    """Stands for the monitor's peers: who is gone, and who has not entered which call."""

    def __init__(self) -> None:
        self.gone: tuple[Missing, ...] = ()
        self.elsewhere: dict[str, tuple[Missing, ...]] = {}

    def lost(self, ranks: tuple[int, ...], *_: object) -> tuple[Missing, ...]:
        return tuple(entry for entry in self.gone if entry.rank in ranks)

    def missing(self, ranks: tuple[int, ...], key: str, *_: object) -> tuple[Missing, ...]:
        return self.elsewhere.get(key, ())


class Told:
    """Stands for the board: what peers have told, and what was told to them."""

    has_concluded = False
    alarm = None

    def __init__(self) -> None:
        self.verdicts: dict[str, Verdict] = {}
        self.beats: dict[int, Beat] = {}
        self.told: list[str] = []

    def say(self, *_: object) -> None:
        """Nobody listens."""

    def ask(self, *_: object) -> None:
        """Everything is known."""

    def tell(self, key: str, verdict: Verdict) -> None:
        self.told.append(key)


class EndedError(BaseException):
    """In the place of the process's end; no trouble of the monitor's own."""


class Process:
    """A process's monitor, at whose clock the test turns."""

    limit_s = 600.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch, recorders: list[Recorder]) -> None:
        self._recorders = tuple(recorders)
        self.monitor = Monitor()
        self.peers, self.board = Losing(), Told()
        parts: dict[str, Any] = {"_peers": self.peers, "_board": self.board, "_write_dump": lambda reason: None}
        for name, part in parts.items():
            setattr(self.monitor, name, part)
        self.monitor._groups.add(self)
        self._clock = _Clock()
        monkeypatch.setattr(monitor_module, "end_process", self._end)
        monkeypatch.setattr(monitor_module, "time", self._clock)

    def recorders(self) -> tuple[Recorder, ...]:
        return self._recorders

    def operation_limit_s(self) -> float:
        return self.limit_s

    @staticmethod
    def _end(text: str) -> None:
        raise EndedError(text)

    def look(self, times: int = 12) -> str:
        """What the process says at its end; empty if it goes on. The monitor looks so often, four times a second."""
        try:
            for _ in range(times):
                self.monitor.tick()
                self._clock.ahead_s += 0.25
        except EndedError as end:
            return str(end)
        return ""


class _Clock:
    """The monitor's; events are marked by the real one, which hardly moves meanwhile."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s

    def time(self) -> float:
        return time.time()

    def sleep(self, _: float) -> None:
        """Nobody reads what was told."""


KILLED = Missing(1, Absence.KILLED, "process 7 on a")


@pytest.mark.parametrize("order", [("flagcx", "symm"), ("symm", "flagcx")])
@pytest.mark.parametrize("watched_first", [0, 1])
def test_of_two_recorders_on_a_stream_the_one_in_flight_is_named(
    monkeypatch: pytest.MonkeyPatch, order: tuple[str, str], watched_first: int
) -> None:
    """Given a call of one recorder that is done and one of another behind it on the stream that is not, when their peer
    is gone, then the latter is named, whichever the monitor sees first; that it cannot complete is not claimed, for its
    event was recorded late. Ranks that wait for the other recorder are told as well."""
    done, open_ = (StreamRecorder(f"tp:0 {name}") for name in order)
    stream = Stream()
    done.call("reduce_scatter", stream, is_done=True)
    open_.call("all_reduce", stream, is_done=True)
    open_.call("all_reduce", stream, is_done=False)
    process = Process(monkeypatch, [[done, open_], [open_, done]][watched_first])
    process.peers.gone = (KILLED,)
    text = process.look()
    assert text.startswith(
        f"group tp:0 {order[1]}, global rank 0 of [0, 1]: call number 2, all_reduce float32[8] is not"
    )
    assert (
        "is not known to be done, and a further call of the group cannot complete: global rank 1 (process 7 on a)"
        in text
    )
    assert "reduce_scatter" not in text
    assert sorted(process.board.told) == [f"tp:0 {name} [0, 1] 0" for name in sorted(order)]


@pytest.mark.parametrize("watched_first", [0, 1])
def test_a_call_that_was_seen_done_is_not_named(monkeypatch: pytest.MonkeyPatch, watched_first: int) -> None:
    """Given a recorder whose call on its own stream is done but was never marked, and another with an event right
    behind a call that is not, when their peer is gone, then of that call alone it is said that it cannot complete."""
    done, open_ = StreamRecorder("tp:0 flagcx"), StreamRecorder("tp:0 symm")
    open_.call("all_reduce", Stream(2), is_done=False, is_marked=True)
    done.call("reduce_scatter", Stream(1), is_done=True)
    process = Process(monkeypatch, [[done, open_], [open_, done]][watched_first])
    process.peers.gone = (KILLED,)
    text = process.look()
    assert "group tp:0 symm, global rank 0 of [0, 1]: call number 1, all_reduce float32[8] cannot complete: " in text
    assert "flagcx" not in text


def test_of_calls_that_are_certainly_not_done_the_first_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given two recorders with an event right behind a call on one stream, when the peer is gone, then the first call
    is named."""
    first, second = StreamRecorder("tp:0 b"), StreamRecorder("tp:0 a")
    stream = Stream()
    first.call("all_gather", stream, is_done=False, is_marked=True)
    second.call("all_reduce", stream, is_done=False, is_marked=True)
    process = Process(monkeypatch, [second, first])
    process.peers.gone = (KILLED,)
    assert "group tp:0 b, global rank 0 of [0, 1]: call number 1, all_gather float32[8] cannot" in process.look()


def test_nothing_in_flight_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given calls that are done, when the peer is gone, then the process goes on; with its next call it ends."""
    recorders = [StreamRecorder("tp:0 flagcx"), StreamRecorder("tp:0 symm")]
    stream = Stream()
    for recorder in recorders:
        recorder.call("all_reduce", stream, is_done=True)
    process = Process(monkeypatch, list[Recorder](recorders))
    process.peers.gone = (KILLED,)
    assert process.look(40) == ""
    recorders[0].call("all_gather", stream, is_done=False)
    assert "group tp:0 flagcx, global rank 0 of [0, 1]: call number 2, all_gather" in process.look(40)


@pytest.mark.parametrize("is_marked", [False, True])
def test_own_work_behind_a_call_is_not_called_the_call(monkeypatch: pytest.MonkeyPatch, is_marked: bool) -> None:
    """Given a call that is done and work of the rank behind it on the stream that is not, when the peer is gone, then
    the process goes on if an event lies between; else it is not claimed that the call cannot complete."""
    recorder, stream = StreamRecorder("tp:0 flagcx"), Stream()
    recorder.call("all_reduce", stream, is_done=True, is_marked=is_marked)
    stream.put(is_done=False)
    process = Process(monkeypatch, [recorder])
    process.peers.gone = (KILLED,)
    text = process.look()
    assert ("call number 1, all_reduce float32[8] is not known to be done" in text) is not is_marked
    assert "float32[8] cannot complete" not in text and bool(text) is not is_marked


@pytest.mark.parametrize("watched_first", [0, 1])
def test_all_streams_that_do_not_go_on_are_named(monkeypatch: pytest.MonkeyPatch, watched_first: int) -> None:
    """Given two streams that do not go on, when the peer is gone, then the first call is named and the other with it;
    a third stream's, which is done, is not."""
    first, second, done = (StreamRecorder(f"tp:0 {name}") for name in ("b", "a", "done"))
    first.call("all_gather", Stream(1), is_done=False)
    second.call("all_reduce", Stream(2), is_done=False)
    done.call("reduce", Stream(3), is_done=True)
    process = Process(monkeypatch, [[first, second, done], [done, second, first]][watched_first])
    process.peers.gone = (KILLED,)
    text = process.look()
    assert "group tp:0 b, global rank 0 of [0, 1]: call number 1, all_gather float32[8] is not known to be done" in text
    assert ", nor is tp:0 a call number 1, all_reduce float32[8], and a further call" in text
    assert "tp:0 done" not in text


def test_a_group_without_the_lost_rank_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a call with the lost rank and behind it one of other ranks, when neither is done, then the first is named:
    the other ranks live."""
    with_it, without = StreamRecorder("tp:0 flagcx"), StreamRecorder("pp:0 flagcx", (0, 2))
    stream = Stream()
    with_it.call("all_reduce", stream, is_done=False)
    without.call("all_gather", stream, is_done=False)
    process = Process(monkeypatch, [without, with_it])
    process.peers.gone = (KILLED,)
    text = process.look()
    assert text.startswith("group tp:0 flagcx, ") and "pp:0" not in text


def test_a_call_behind_the_event_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given an event that is not done, when another recorder's call follows it on the stream, then that call is not
    what holds the event up."""
    before, after = StreamRecorder("tp:0 flagcx"), StreamRecorder("tp:0 symm")
    stream = Stream()
    before.call("all_gather", stream, is_done=False)
    process = Process(monkeypatch, [after, before])
    assert process.look() == ""
    after.call("all_reduce", stream, is_done=False)
    process.peers.gone = (KILLED,)
    assert process.look().startswith("group tp:0 flagcx, ")


@pytest.mark.parametrize("watched_first", [0, 1])
def test_at_the_limit_the_call_that_a_peer_has_not_entered_is_named(
    monkeypatch: pytest.MonkeyPatch, watched_first: int
) -> None:
    """Given two calls on a stream, the first of which a living peer has not entered, when the limit has passed, then
    the first is named; that it did not complete is not claimed."""
    skipped, entered = StreamRecorder("tp:0 flagcx"), StreamRecorder("tp:0 symm")
    stream = Stream()
    skipped.call("all_gather", stream, is_done=False)
    entered.call("all_reduce", stream, is_done=False)
    process = Process(monkeypatch, [[skipped, entered], [entered, skipped]][watched_first])
    process.limit_s = 2.0
    process.peers.elsewhere = {"tp:0 flagcx [0, 1] 0": (Missing(1, Absence.ELSEWHERE),)}
    text = process.look(20)
    assert text.startswith("group tp:0 flagcx, global rank 0 of [0, 1]: call number 1, all_gather float32[8] was not ")
    assert "was not seen to complete within 2 s: global rank 1 is alive and has not entered the call" in text


def test_what_is_done_when_it_is_looked_at_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a call that becomes done between two looks of the monitor, when the peer is gone, then the process goes
    on."""
    recorder, other, stream = StreamRecorder("tp:0 flagcx"), StreamRecorder("tp:0 symm"), Stream(1)
    work = recorder.call("all_reduce", stream, is_done=False)
    process = Process(monkeypatch, [recorder, other])
    assert process.look() == ""
    process.peers.gone = (KILLED,)
    other.call("all_gather", Stream(2), is_done=True)

    def finish() -> Mark | None:
        work.is_done = True
        return StreamRecorder.mark_now(other)

    monkeypatch.setattr(other, "mark_now", finish)
    assert process.look(1) == ""
    assert work.is_done


def test_what_is_marked_and_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a call that is not done, when its recorder is looked at, then it is marked once, and no further call before
    that mark is done: the stream may take no more. During a capture the device is let alone."""
    recorder, stream = StreamRecorder("tp:0 flagcx"), Stream()
    work = recorder.call("all_reduce", stream, is_done=False)
    process = Process(monkeypatch, [recorder])
    process.look(1)
    (watched,) = process.monitor.watched()
    made: list[int] = []

    def mark() -> Mark | None:
        made.append(recorder.entered())
        return StreamRecorder.mark_now(recorder)

    monkeypatch.setattr(recorder, "mark_now", mark)
    with CAPTURES.capture():
        watched.mark_and_look()
    assert made == []
    watched.mark_and_look()
    recorder.call("all_reduce", stream, is_done=True)
    watched.mark_and_look()
    assert made == [1] and watched.done == 0
    work.is_done = True
    with CAPTURES.capture():
        watched.mark_and_look()
    assert watched.done == 0 and not watched.is_idle()
    watched.mark_and_look()
    watched.mark_and_look()
    assert made == [1, 2] and watched.is_idle()


@pytest.mark.parametrize("watched_first", [0, 1])
def test_a_call_that_is_certainly_not_done_is_named_before_others(
    monkeypatch: pytest.MonkeyPatch, watched_first: int
) -> None:
    """Given a call that is done, work of the rank behind it that is not, and then another recorder's call with an event
    right behind it, when the peer is gone, then that call is named."""
    done, open_ = StreamRecorder("tp:0 flagcx"), StreamRecorder("tp:0 symm")
    stream = Stream()
    done.call("all_gather", stream, is_done=True)
    stream.put(is_done=False)
    process = Process(monkeypatch, [[done, open_], [open_, done]][watched_first])
    assert process.look() == ""
    open_.call("all_reduce", stream, is_done=False, is_marked=True)
    process.peers.gone = (KILLED,)
    text = process.look()
    assert "group tp:0 symm, global rank 0 of [0, 1]: call number 1, all_reduce float32[8] cannot complete: " in text
    assert "flagcx" not in text


@pytest.mark.parametrize("watched_first", [0, 1])
def test_the_first_event_that_is_not_done_counts(monkeypatch: pytest.MonkeyPatch, watched_first: int) -> None:
    """Given two calls on a stream, each with an event after a while, when the first is not done, then it is named."""
    first, second = StreamRecorder("tp:0 flagcx"), StreamRecorder("tp:0 symm")
    stream = Stream()
    first.call("all_gather", stream, is_done=False)
    process = Process(monkeypatch, [[first, second], [second, first]][watched_first])
    assert process.look() == ""
    second.call("all_reduce", stream, is_done=True)
    assert process.look() == ""
    process.peers.gone = (KILLED,)
    assert process.look().startswith("group tp:0 flagcx, ")


@pytest.mark.parametrize("is_done", [False, True])
def test_a_rank_that_is_told_says_whether_it_is_in_a_call(monkeypatch: pytest.MonkeyPatch, is_done: bool) -> None:
    """Given a peer's word that its call cannot complete, when this rank has no call of it under way, then it says so
    and that it cannot go on; where it has one, it names it."""
    recorder = StreamRecorder("tp:0 flagcx")
    recorder.call("all_gather", Stream(), is_done=is_done, is_marked=True)
    process = Process(monkeypatch, [recorder])
    assert process.look() == ""
    stuck = Stuck("tp:0 flagcx", (0, 1, 2), "number 2, all_reduce float32[8]", "model.py:3 forward", 600.0, 1.0)
    process.board.verdicts["tp:0 flagcx [0, 1] 0"] = as_told(to_tell(Verdict(2, stuck, (KILLED,))))
    text = process.look()
    idle = (
        "no call of it was under way here, but it cannot go on; on the rank that found it: call number 2, all_reduce "
        "float32[8] called at model.py:3 forward cannot complete: "
    )
    assert (idle if is_done else "call number 1, all_gather float32[8] cannot complete: ") in text
    assert "(found by global rank 2)" in text


def test_other_calls_survive_their_way_to_a_peer() -> None:
    """Given a verdict with other calls, when it is told, then the peer reads the same."""
    stuck = Stuck("tp:0 a", (0, 1), "number 4, all_reduce", "", 600.0, 1.0, is_certain=False, others=("b", "c"))
    verdict = Verdict(0, stuck, (KILLED,), is_idle=True)
    assert as_told(to_tell(verdict)) == verdict
