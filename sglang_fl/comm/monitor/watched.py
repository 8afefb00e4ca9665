"""One recorder under watch: what of its calls is not done, and since when."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sglang_fl.comm.captures import CAPTURES
from sglang_fl.comm.monitor.awake import Awake
from sglang_fl.comm.monitor.verdict import Verdict
from sglang_fl.comm.recorder import Mark, RecordedCall, Recorder
from sglang_fl.comm.threads import LOG

TICK_S = 0.25
_MARK_PAUSE_S = 1.0
_SIGHTINGS = 4096


@dataclass(frozen=True)
class Pending:
    """Calls ``first`` to ``last`` of a recorder are not all done.

    Attributes:
        first, last: their numbers.
        waited_s: since the last of them was entered, without what this process was stopped meanwhile.
        is_certain: ``last`` itself is not done; False where that may be what its stream had to do since.
        marked_s: on a device, when the event that is not done was recorded, ``time.monotonic()``.
        what: ``last`` in words; empty where only its number is known.
    """

    first: int
    last: int
    waited_s: float
    is_certain: bool = True
    marked_s: float = 0.0
    what: str = ""


class Watched:
    """What the monitor knows of one recorder.

    Attributes:
        recorder: the one.
        key: names it alike on all its ranks.
        limit_s: for an operation, seconds.
        lock: held while a verdict is found, so that there is one.
        verdict, dump: once a call of it cannot complete.
        done: on a device, the number of the last call that was seen done.
        sound_s: when the monitor last looked at it without trouble of its own, ``time.monotonic()``.
        trouble: of the monitor, that it cannot look at it; empty where it can.
        is_given_up: nothing more can be found of it, and its calls have been ended.
    """

    def __init__(self, recorder: Recorder, key: str, limit_s: float, awake: Awake | None = None) -> None:
        self.recorder = recorder
        self.key = key
        self.limit_s = limit_s
        self.lock = threading.Lock()
        self.verdict: Verdict | None = None
        self.dump: Path | None = None
        self.done = 0
        self.sound_s = time.monotonic()
        self.trouble = ""
        self.is_given_up = False
        self.is_host = recorder.device.type == "cpu"
        self._awake = Awake() if awake is None else awake
        self._first_seen = (0, 0.0)
        self._sightings: deque[tuple[int, float]] = deque(maxlen=_SIGHTINGS)
        self._marks: deque[Mark] = deque()
        self._marked = 0
        self._asked_s = 0.0
        self._is_broken = False

    def pending(self, now_s: float) -> Pending | None:
        """What is not done; ``now_s`` as of ``time.monotonic()``. Called once a tick."""
        return self._on_host(now_s) if self.is_host else self._on_device(now_s)

    def call(self, number: int) -> RecordedCall | None:
        """The call of that number, as long as it is kept."""
        return next((call for call in self.recorder.calls() if call.number == number), None)

    def is_idle(self) -> bool:
        """Whether it is known that no call of it is under way."""
        return self.recorder.under_way() is None if self.is_host else self.done >= self.recorder.entered()

    def unfinished(self) -> list[RecordedCall]:
        """On a device, the calls that were not seen done, without those that only a graph holds."""
        return [call for call in self.recorder.calls() if call.number > self.done and not call.captured]

    def mark_and_look(self) -> None:
        """Look at the device now, with a mark behind the last call; may wait as long as the stream takes nothing."""
        with CAPTURES.device_call() as allowed:
            if allowed and not self._is_broken:
                self._ask_device(self._mark_now)

    def _on_host(self, now_s: float) -> Pending | None:
        call = self.recorder.under_way()
        if call is None:
            return None
        if self._first_seen[0] != call.number:
            self._first_seen = (call.number, now_s)
        # Some recorders know only the time of the day, whose clock may be set while they are asked; what was first
        # seen at this tick was not under way at the last one.
        first_s = self._first_seen[1]
        entered_s = min(first_s, max(call.entered_s, first_s - 2 * TICK_S))
        return Pending(call.number, call.number, self._awake.since(entered_s, now_s), what=call.what())

    def _on_device(self, now_s: float) -> Pending | None:
        entered = self.recorder.entered()
        if not self._sightings or self._sightings[-1][0] != entered:
            self._sightings.append((entered, now_s))
        self._take(self.recorder.take_mark())
        with CAPTURES.device_call() as allowed:
            if not allowed:
                return None  # what the device has done is not known now
            if not self._is_broken:
                self._look_at_device(now_s, entered)
        while len(self._sightings) > 1 and self._sightings[0][0] <= self.done:
            self._sightings.popleft()
        if not self._marks or self._is_broken:
            return None
        last = self._marks[0].number
        since_s = next((seen_s for number, seen_s in self._sightings if number >= last), now_s)
        mark = self._marks[0]
        waited_s = self._awake.since(min(since_s, mark.time_s), now_s)
        return Pending(self.done + 1, last, waited_s, mark.is_close, mark.time_s)

    def _take(self, mark: Mark | None) -> None:
        if mark is None:
            return
        if mark.number > self._marked:
            self._marks.append(mark)
            self._marked = mark.number

    def _look_at_device(self, now_s: float, entered: int) -> None:
        self._ask_device(lambda: self._want_mark(now_s, entered))

    def _want_mark(self, now_s: float, entered: int) -> None:
        if entered <= self._marked:
            return
        if now_s - self._sightings[-1][1] >= _MARK_PAUSE_S:
            self._mark_now()  # nothing is called any more: nobody else would
        elif now_s - self._asked_s >= _MARK_PAUSE_S:
            self._asked_s = now_s
            self.recorder.ask_for_mark()

    def _mark_now(self) -> None:
        # A further mark would tell nothing before those are done, and a stream that is stuck may take no more.
        if not self._marks and self.recorder.entered() > self._marked:
            self._take(self.recorder.mark_now())

    def _ask_device(self, mark: Callable[[], object]) -> None:
        """See what is done, then ``mark`` what is to be seen next."""
        try:
            while self._marks and self._marks[0].event.query():
                self.done = self._marks.popleft().number
            mark()
        except RuntimeError as error:  # the device itself has failed: every call of the process says so
            self._is_broken = True
            LOG.error("[sglang_fl] %s: its device can no longer be watched: %s", self.recorder.name, error)
