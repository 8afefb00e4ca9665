"""A recorder in Python: the last calls of a transport whose library has no recorder of its own."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch

from sglang_fl.comm.errors import CommError
from sglang_fl.comm.left_calls import has_left
from sglang_fl.comm.marks import marker_for
from sglang_fl.comm.places import Place, in_words
from sglang_fl.comm.recorder import SIZE, Mark, RecordedCall, Recorder, day_offset_ns
from sglang_fl.comm.types import Work

_NUMBER, _OPERATION, _DTYPE, _COUNT, _PEER, _STREAM, _CAPTURED, _PLACE, TIME_IN, TIME_OUT, _ERROR, ENDED = range(12)
Row = list[Any]
"""One call: what the indexes above say, with times in nanoseconds of ``time.monotonic_ns()``: the clock of the day may
be set while a call waits. It is replaced as a whole, never taken again."""


class CallRing(Recorder):
    """The last ``size`` calls. One thread at a time may enter; the others' methods are for any thread.

    What counts nanoseconds does what :meth:`enter` and :meth:`leave` do itself.
    """

    def __init__(
        self,
        name: str,
        ranks: Iterable[int],
        device: torch.device,
        size: int = SIZE,
        interrupt: Callable[[], bool] | None = None,
    ) -> None:
        """``interrupt`` makes a call under way end with an error soon, as :meth:`Transport.interrupt`."""
        self.name = name
        self.ranks = tuple(ranks)
        self.device = device
        self.number = 0
        self.rows: list[Row | None] = [None] * size
        self.mark_wanted = False
        self.refusal: str | None = None
        self._interrupt = interrupt
        self.has_captured_calls = False
        self.marker = marker_for(device)
        self.stream_behind: int | None = None  # raw handle, where one is behind every call
        self._marks: deque[Mark] = deque(maxlen=1)
        self._works: WeakValueDictionary[int, RecordedWork] = WeakValueDictionary()

    def enter(
        self,
        operation: str,
        dtype: torch.dtype | None = None,
        count: int = 0,
        peer: int | None = None,
        stream: int = 0,
        captured: bool = False,
        place: Place = 0,
    ) -> Row:
        """Record that a call begins; the row is for :meth:`leave`.

        Raises:
            CommError: it was refused.
        """
        if self.refusal is not None:
            raise self.refused()
        self.has_captured_calls |= captured
        number = self.number + 1
        row = [number, operation, dtype, count, peer, stream, captured, place, time.monotonic_ns(), None, "", False]
        self.rows[number % len(self.rows)] = row
        self.number = number
        return row

    def leave(self, row: Row, error: BaseException | None = None) -> None:
        """Record that the call has returned, or with what error it ended; a mark is made if one was asked for."""
        self.enqueued(row)
        if error is not None:
            row[_ERROR] = _first_line(error)
        elif self.mark_wanted:
            self.mark(row, is_close=True)

    def enqueued(self, row: Row) -> None:
        """Record that the call has returned; on a device its work may still be under way."""
        row[TIME_OUT] = time.monotonic_ns()
        row[ENDED] = True

    def mark(self, row: Row, is_close: bool = False) -> None:
        """Record an event behind ``row``'s call, unless what it would be on is being captured.

        On the current stream, or on the one that is behind all calls of this ring. ``is_close``: the call has only
        just returned.
        """
        if self.marker is None:
            return
        event = self.marker.here() if self.stream_behind is None else self.marker.on(self.stream_behind)
        if event is None:
            return
        self.mark_wanted = False
        self._marks.append(Mark(row[_NUMBER], event, time.monotonic(), is_close))

    def refused(self, shape: Sequence[int] = ()) -> CommError:
        """The error of a call that is refused."""
        return self.explained(CommError(self.refusal or ""), shape)

    def failed(self, row: Row, error: BaseException, shape: Sequence[int] = ()) -> BaseException:
        """Record that the call ended with ``error``; what its caller is to be told in its place, or ``error``."""
        self.leave(row, error)
        if self.marker is None and has_left(error):
            self.left(row[_NUMBER], error)
            return error
        if not isinstance(error, RuntimeError):
            return error
        if self.refusal is not None:
            return self.refused(shape)
        told = error if isinstance(error, CommError) else CommError(str(error))
        explained = self.explained(told, shape)
        return error if explained is told else explained

    def watch(self, row: Row, work: Work, shape: Sequence[int]) -> RecordedWork:
        """``work``, whose wait is what ends the call of ``row`` on a tensor of ``shape``."""
        recorded = RecordedWork(self, row, work, shape)
        self._works[row[_NUMBER]] = recorded
        return recorded

    def entered(self) -> int:
        """See :meth:`Recorder.entered`."""
        return self.number

    def calls(self) -> list[RecordedCall]:
        """See :meth:`Recorder.calls`."""
        rows = [row for row in self.rows if row is not None]
        offset_ns = day_offset_ns()
        return [_shown(row, offset_ns) for row in sorted(rows, key=lambda row: int(row[_NUMBER]))]

    def under_way(self) -> RecordedCall | None:
        """See :meth:`Recorder.under_way`. A work counts once it is waited for, or asked: before, nobody is late."""
        works = [work for reference in self._works.valuerefs() if (work := reference()) is not None]
        rows = [work.row for work in works if work.is_waited_for]
        last = self.rows[self.number % len(self.rows)]
        if last is not None and all(work.row is not last for work in works):
            rows.append(last)
        # A copy first: a row may end while it is looked at.
        open_rows = [row for row in map(list, rows) if not row[ENDED] and row[TIME_OUT] is None]
        oldest = min(open_rows, key=lambda row: int(row[_NUMBER]), default=None)
        return None if oldest is None else _shown(oldest, day_offset_ns())

    def ask_for_mark(self) -> None:
        """See :meth:`Recorder.ask_for_mark`."""
        self.mark_wanted = self.marker is not None

    def take_mark(self) -> Mark | None:
        """See :meth:`Recorder.take_mark`."""
        try:
            return self._marks.pop()
        except IndexError:
            return None

    def mark_now(self) -> Mark | None:
        """See :meth:`Recorder.mark_now`."""
        last = self.rows[self.number % len(self.rows)]
        if last is None or self.marker is None:
            return None
        event = self.marker.on(last[_STREAM])
        return None if event is None else Mark(last[_NUMBER], event, time.monotonic())

    def refuse(self, reason: str) -> None:
        """See :meth:`Recorder.refuse`."""
        self.refusal = reason

    def abort(self, limit_s: float) -> bool:
        """See :meth:`Recorder.abort`; True once it is interrupted, a moment before the call returns."""
        return self.marker is None and self._interrupt is not None and self._interrupt()

    def has_captured(self) -> bool:
        """See :meth:`Recorder.has_captured`."""
        return self.has_captured_calls


class RecordedWork:
    """A transfer under way whose call ends when it is waited for or found done; no one knows of one that is dropped."""

    __slots__ = ("__weakref__", "_ring", "_shape", "_work", "is_waited_for", "row")

    def __init__(self, ring: CallRing, row: Row, work: Work, shape: Sequence[int]) -> None:
        self._ring = ring
        self._work = work
        self._shape = shape
        self.is_waited_for = False
        self.row = row

    def wait(self, *arguments: Any) -> Any:
        """As the work's own."""
        self.is_waited_for = True
        try:
            result = self._work.wait(*arguments)
        except BaseException as error:
            told = self._ring.failed(self.row, error, self._shape)
            if told is error:
                raise
            raise told from error
        self._end()
        return result

    def is_completed(self) -> bool:
        """As the work's own."""
        self.is_waited_for = True  # whoever asks waits in a way of its own
        done = self._work.is_completed()
        if done:
            self._end()
        return done

    def _end(self) -> None:
        if not self.row[ENDED]:
            self._ring.enqueued(self.row)  # of host memory, which has no marks
        elif self._ring.mark_wanted:
            self._ring.mark(self.row)

    def __del__(self, ended: int = ENDED) -> None:  # at the interpreter's end the module's names are gone
        """Nobody waits any more."""
        self.row[ended] = True


def _shown(row: Row, offset_ns: int) -> RecordedCall:
    time_out = row[TIME_OUT]
    return RecordedCall(
        number=row[_NUMBER],
        operation=row[_OPERATION],
        dtype="" if row[_DTYPE] is None else str(row[_DTYPE]).removeprefix("torch."),
        count=row[_COUNT],
        peer=row[_PEER],
        stream=row[_STREAM],
        captured=row[_CAPTURED],
        place=in_words(row[_PLACE]),
        time_in_s=(row[TIME_IN] + offset_ns) / 1e9,
        time_out_s=None if time_out is None else (time_out + offset_ns) / 1e9,
        error=row[_ERROR],
        entered_s=row[TIME_IN] / 1e9,
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
