"""Waiting for torch.distributed's work on host memory with a limit of ours: gloo's own may be half an hour and more."""

from __future__ import annotations

import ctypes
import time
from datetime import timedelta
from typing import Any

from sglang_fl.comm.backends.torch_dist.quiet_exit import exit_quietly
from sglang_fl.comm.errors import CommError

_SLICE_S = 0.25
_SLICE = timedelta(seconds=_SLICE_S)
_SHORTEST_S = 0.01  # to torch, less than a millisecond is no limit at all


class Waiting:
    """How one transport waits.

    Attributes:
        limit_s: for one operation, seconds.
        interrupted: set from another thread; who waits for a collective then gets an error within a moment.
    """

    def __init__(self, limit_s: float, group: Any) -> None:
        """``group``: torch's, whose works are waited for."""
        self.limit_s = limit_s
        self._group = group
        self.interrupted = False
        exit_quietly()

    def finish(self, work: Any) -> None:
        """Wait for a collective's work; None is none.

        Raises:
            CommError: it failed, was interrupted, or was not done within the limit.
        """
        if work is None:
            return
        try:
            work.wait(_SLICE)
        except RuntimeError as error:
            self._go_on(work, error)

    def finish_transfer(self, work: Any) -> None:
        """Wait for a send's or receive's work: a wait for those that timed out cannot be taken up again.

        Raises:
            CommError: it failed, or was not done within the limit.
        """
        try:
            work.wait(timedelta(seconds=max(_SHORTEST_S, self.limit_s)))
        except RuntimeError as error:
            raise _failed(error) from error

    def _go_on(self, work: Any, error: RuntimeError) -> None:
        deadline_s = time.monotonic() + self.limit_s - _SLICE_S
        while not work.is_completed():  # it is where the wait has failed, and is not where it only took too long
            left_s = deadline_s - time.monotonic()
            if self.interrupted:
                _never_end(self._group)
                raise CommError("torch.distributed: the wait was interrupted") from error
            if left_s <= 0:
                _never_end(self._group)
                raise CommError(f"torch.distributed: not done within {self.limit_s:g} s") from error
            try:
                work.wait(timedelta(seconds=max(_SHORTEST_S, min(_SLICE_S, left_s))))
            except RuntimeError as again:
                error = again
            else:
                return
        if not _has_succeeded(work):
            raise _failed(error) from error


class BoundedWork:
    """A work whose wait ends at the transport's limit."""

    __slots__ = ("_is_transfer", "_waiting", "_work")

    def __init__(self, work: Any, waiting: Waiting, is_transfer: bool) -> None:
        self._work = work
        self._waiting = waiting
        self._is_transfer = is_transfer

    def wait(self) -> None:
        """Block until it is done.

        Raises:
            CommError: it failed, or was not done within the limit.
        """
        if self._is_transfer:
            self._waiting.finish_transfer(self._work)
        else:
            self._waiting.finish(self._work)

    def is_completed(self) -> bool:
        """Whether it is done."""
        return bool(self._work.is_completed())


def _never_end(group: Any) -> None:
    """Leave a group to the end of the process: a thread of gloo's is still in its call, and the end of the group, in
    the interpreter's, waits for that thread until torch's own limit.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _has_succeeded(work: Any) -> bool:
    """It may have come to its end between the last wait and the question."""
    try:
        work.wait(_SLICE)
    except RuntimeError:
        return False
    return True


def _failed(error: RuntimeError) -> CommError:
    lines = str(error).strip().splitlines()
    return CommError(f"torch.distributed: {lines[0] if lines else type(error).__name__}")
