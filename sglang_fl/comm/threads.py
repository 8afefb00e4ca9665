"""Threads for what may never return, and log lines of threads that must never wait."""

from __future__ import annotations

import logging
import os
import queue
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress

from sglang_fl.comm.errors import CommError

_MOST = 1000  # log lines that wait while nobody reads the process's output; what comes then is left out


def start_thread(target: Callable[[], object], name: str) -> threading.Thread:
    """A daemon thread that runs ``target``, started.

    Raises:
        CommError: none can be started now.
    """
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        raise CommError(
            f"the thread {name} cannot be started: {str(error) or type(error).__name__}. Look at what this process "
            f"may have: threads (ulimit -u, its container's limit of pids), address space (ulimit -v), memory."
        ) from error
    return thread


class Worker:
    """A thread that is there before it is needed, and does one thing after the other."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, once.

        Raises:
            CommError: it cannot be started.
        """
        if self._thread is None:
            self._thread = start_thread(self._run, self._name)

    @property
    def is_started(self) -> bool:
        """Whether there is a thread."""
        return self._thread is not None

    def take(self, job: Callable[[], object]) -> bool:
        """Have ``job`` done; returns at once, False where there is no thread or no room."""
        if self._thread is None or self._jobs.qsize() >= _MOST:
            return False
        self._jobs.put(job)
        return True

    def forget(self) -> None:
        """In a fork, which has not the thread."""
        self._jobs, self._thread = queue.SimpleQueue(), None

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                job()
            except Exception:  # noqa: BLE001 - whatever it is, what comes next is to be done all the same
                with suppress(Exception):
                    traceback.print_exc()


def aside(job: Callable[[], object], name: str) -> threading.Event:
    """Have ``job`` done in a thread of its own, or in the one that stands by where no further one can be started.

    Returns:
        set once it is done; the caller waits as long as it wants.

    Raises:
        CommError: there is no thread for it.
    """
    done = threading.Event()

    def run() -> None:
        try:
            job()
        finally:
            done.set()

    try:
        start_thread(run, name)
    except CommError:
        if not STANDBY.take(run):
            raise
    return done


class Log:
    """The logger of the communication layer for threads that others rely on: its output may be a full pipe.

    A thread hands the lines to it; before :meth:`start`, and in a fork, the caller does.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._worker = Worker("sglang_fl-log")

    def start(self) -> None:
        """See :meth:`Worker.start`."""
        self._worker.start()

    def forget(self) -> None:
        """See :meth:`Worker.forget`."""
        self._worker.forget()

    def error(self, text: str, *arguments: object) -> None:
        """As the logger's own."""
        self._line(logging.ERROR, text, arguments)

    def debug(self, text: str, *arguments: object) -> None:
        """As the logger's own."""
        self._line(logging.DEBUG, text, arguments)

    def drain(self, limit_s: float) -> None:
        """Wait until what was said so far is written, ``limit_s`` seconds at most."""
        done = threading.Event()
        if self._worker.take(done.set):
            done.wait(limit_s)

    def _line(self, level: int, text: str, arguments: tuple[object, ...]) -> None:
        if not self._worker.is_started:
            self._logger.log(level, text, *arguments)
        elif self._logger.isEnabledFor(level):
            line = text % arguments  # what it is about may have changed by the time it is written
            self._worker.take(lambda: self._logger.log(level, "%s", line))


STANDBY = Worker("sglang_fl-standby")
LOG = Log(logging.getLogger("sglang_fl.comm"))


def start_early() -> None:
    """Start what stands by, while a thread can still be started.

    Raises:
        CommError: it cannot be.
    """
    STANDBY.start()
    LOG.start()


def _forget() -> None:
    STANDBY.forget()
    LOG.forget()


os.register_at_fork(after_in_child=_forget)
