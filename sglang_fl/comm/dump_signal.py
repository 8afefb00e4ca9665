"""SIGUSR1 asks a process for a dump, also while its main thread is inside a library and runs no Python."""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

logger = logging.getLogger("sglang_fl.comm")

NUMBER = signal.SIGUSR1
# From the beginning of one dump to that of the next, seconds: the folder keeps a limited number of them.
PAUSE_S = 1.0
_MOST_SIGNALS = 2**16  # what a pipe holds
_STATUS = Path("/proc/self/status")


class DumpSignal:
    """The watcher of one process: Python's own C handler writes each signal's number into a pipe, a thread reads it.

    A handler that was set before is called as well, and a descriptor that was told of signals before is told on.
    """

    def __init__(self, dump: Callable[[], object]) -> None:
        """``dump`` is called in the watcher's thread, once a ``PAUSE_S`` at most, for all signals until then."""
        self._dump = dump
        self._pid = os.getpid()
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._former_handler: Any = signal.getsignal(NUMBER)
        signal.signal(NUMBER, self._handle)
        self._former_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="sglang_fl-dump-signal", daemon=True).start()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid and not self._is_woken():
            # An event loop has, or had, the wakeup for itself: then this waits for the main thread.
            self._tell(self._write, NUMBER)
        if callable(self._former_handler):
            self._former_handler(number, frame)

    def _is_woken(self) -> bool:
        """Whether Python wrote this signal to our pipe; takes the wakeup back where it has become free."""
        current = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if current not in (self._write, -1):
            signal.set_wakeup_fd(current, warn_on_full_buffer=False)
        return current == self._write

    def give_up(self) -> None:
        """Restore what was before, in a child that inherited all but the thread."""
        with suppress(ValueError):  # a thread of the parent forked: then the wakeup is not this child's to set
            if signal.getsignal(NUMBER) == self._handle:
                signal.signal(NUMBER, signal.SIG_DFL if self._former_handler is None else self._former_handler)
            current = signal.set_wakeup_fd(-1)
            restored = self._former_wakeup if current == self._write else current
            signal.set_wakeup_fd(restored, warn_on_full_buffer=False)

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        is_wanted, next_s = False, 0.0
        while True:
            # What comes while a dump is written, or shortly after it, is answered by one more, not by one each.
            pause_s = max(0.0, next_s - time.monotonic()) if is_wanted else None
            if poll.poll(None if pause_s is None else 1000 * pause_s):
                is_wanted |= self._heard()
            if is_wanted and time.monotonic() >= next_s:
                is_wanted, next_s = False, time.monotonic() + PAUSE_S
                self._write_dump()

    def _heard(self) -> bool:
        """Whether among the signals that have come one asks for a dump; tells of each who was told before."""
        numbers = os.read(self._read, _MOST_SIGNALS)
        if self._former_wakeup != -1:
            self._tell(self._former_wakeup, *numbers)
        return NUMBER in numbers

    def _write_dump(self) -> None:
        try:
            self._dump()
        except Exception:
            # The next signal must find the watcher alive.
            logger.exception("[sglang_fl] SIGUSR1: no dump of the calls was written")

    def _tell(self, descriptor: int, *numbers: int) -> None:
        with suppress(OSError):
            os.write(descriptor, bytes(numbers))


_signal: DumpSignal | None = None
_has_told = False


def watch_signal(dump: Callable[[], object]) -> str:
    """Let SIGUSR1 call ``dump`` in a thread of its own, from now on; idempotent, for the first ``dump``.

    Returns:
        Why it does not, once, for a report; empty if it does.
    """
    global _signal, _has_told
    if _signal is not None:
        return ""
    reason = _hindrance()
    if not reason:
        _signal = DumpSignal(dump)
    has_told, _has_told = _has_told, bool(reason)
    return "" if has_told else reason


def _hindrance() -> str:
    if threading.current_thread() is not threading.main_thread():
        return "SIGUSR1 writes no dump: only the main thread can set handlers, and another made this group"
    if signal.getsignal(NUMBER) in (signal.SIG_DFL, None) and _is_caught():
        return "SIGUSR1 writes no dump: a library has a handler of its own for it (faulthandler.register?)"
    return ""


def _is_caught() -> bool:
    """Whether the kernel knows a handler, be it one that Python does not know of."""
    for line in _STATUS.read_text().splitlines():
        name, _, mask = line.partition(":")
        if name == "SigCgt":
            return bool(int(mask, 16) >> (NUMBER - 1) & 1)
    return False


def _forget() -> None:
    """A forked child has not the thread, and its parent must not hear of its signals."""
    global _signal
    if _signal is None:
        return
    former, _signal = _signal, None
    former.give_up()


os.register_at_fork(after_in_child=_forget)
