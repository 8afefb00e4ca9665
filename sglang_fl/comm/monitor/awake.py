"""How long a call has waited while this process ran: one that was stopped as a whole (Ctrl-Z) is not late for that."""

from __future__ import annotations

from collections import deque

_KEPT = 64


class Awake:
    """The times at which the monitor did not get to run, as it saw them itself.

    A peer that is stopped makes nobody late to find it: each process has its own.
    """

    def __init__(self) -> None:
        self._asleep: deque[tuple[float, float]] = deque(maxlen=_KEPT)

    def passed(self, begin_s: float, end_s: float, longest_s: float) -> None:
        """Of what was to take less than ``longest_s`` seconds that much counts, so that time goes on in any case."""
        if end_s - begin_s > longest_s:
            self._asleep.append((begin_s + longest_s, end_s))

    def since(self, begin_s: float, now_s: float) -> float:
        """Seconds from ``begin_s`` to ``now_s``, both as of ``time.monotonic()``, without those asleep."""
        asleep_s = sum(max(0.0, min(end_s, now_s) - max(from_s, begin_s)) for from_s, end_s in tuple(self._asleep))
        return now_s - begin_s - asleep_s
