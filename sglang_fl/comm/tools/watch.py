"""Ends a process that makes no progress, after it has said where it stood: a hang must not pass for patience."""

from __future__ import annotations

import faulthandler
import os
import tempfile
import threading
import time
from collections.abc import Callable
from types import TracebackType


class Watch:
    """A daemon thread that ends the process ``limit_s`` seconds after the last :meth:`step`.

    Ranks that wait inside a library cannot be woken; the process exits with code 1, and torchrun ends the others.
    """

    def __init__(self, rank: int, limit_s: float) -> None:
        self._rank = rank
        self._limit_s = limit_s
        self._doing = "start"
        self._detail: Callable[[], str] = str
        self._since = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sglang_fl-watch", daemon=True)

    def step(self, doing: str, detail: Callable[[], str] = str) -> None:
        """Say what begins now; ``detail`` is asked how far it got, if it comes to that."""
        self._doing, self._detail = doing, detail
        self._since = time.monotonic()

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(min(1.0, self._limit_s / 4)):
            waited = time.monotonic() - self._since
            if waited < self._limit_s:
                continue
            message = (
                f"rank {self._rank}: no progress for {waited:.0f} s in '{self._doing}'{self._detail()}; this process "
                f"ends. Its threads stand at:\n"
            )
            os.write(2, message.encode() + _stacks())  # in one write: the ranks share the terminal
            os._exit(1)


def _stacks() -> bytes:
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        return file.read()
