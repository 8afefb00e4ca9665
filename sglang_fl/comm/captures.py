"""When the process captures a graph, the monitor makes no device call: one lock that both take."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Captures:
    """Captures of this process, as far as they announce themselves."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._device_calls = 0

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Around a capture: waits for the monitor's device call under way, which is short; keeps further ones out."""
        with self._changed:
            self._changed.wait_for(lambda: not self._device_calls)
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1

    @contextmanager
    def device_call(self) -> Iterator[bool]:
        """Around the monitor's device calls; yields False, and they are left out, while a capture runs."""
        with self._changed:
            allowed = not self._running
            self._device_calls += allowed
        try:
            yield allowed
        finally:
            with self._changed:
                self._device_calls -= allowed
                self._changed.notify_all()


CAPTURES = Captures()
