"""Waiting for torch.distributed's work on host memory with a limit of ours: gloo's own may be half an hour and more."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sglang_fl.comm.backends.torch_dist.quiet_exit import exit_quietly
from sglang_fl.comm.errors import CommError
from sglang_fl.comm.left_calls import comes_from_outside, mark_left

_SLICE_S = 0.25
_SLICE = timedelta(seconds=_SLICE_S)
_LONGEST_SLICE_S = 1.0  # what took longer than that was a stop of the process (Ctrl-Z), for which no peer is late
_AT_ONCE = timedelta(milliseconds=1)
_END_LIMIT = timedelta(seconds=1)
_NOBODYS_TAG = 2**31 - 73  # of a message that is never sent
_SHORTEST_S = 0.01  # to torch, less than a millisecond is no limit at all


class Waiting:
    """How one transport begins its calls and waits for them.

    A call may be left in the midst, by the limit or by what a signal's handler raises, while a thread of gloo's goes on
    with it and with its tensor. Then the group's connections are ended, here and so on all its ranks: none can come to
    the end of a call that another one has left, with what that has written into its tensor since.

    Attributes:
        limit_s: for one operation, seconds.
    """

    def __init__(self, limit_s: float, group: Any) -> None:
        """``group``: torch's, whose works are waited for."""
        self.limit_s = limit_s
        self._group = group
        self._is_interrupted = False
        exit_quietly()

    def interrupt(self) -> None:
        """From another thread: who waits for a call of the group gets an error within a moment, on its peers as well.

        No call of the group can be made any more.
        """
        self._is_interrupted = True
        end_connections(self._group)

    def run(self, call: Callable[..., Any], *arguments: Any) -> None:
        """``call``, a collective of torch.distributed, with these arguments in the group, to its end.

        Raises:
            CommError: it failed, was interrupted, or was not done within the limit.
        """
        work = None
        try:
            work = call(*arguments, group=self._group, async_op=True)
            if work is None:
                return
            try:
                work.wait(_SLICE)
                return
            except RuntimeError as error:
                failure = _of_the_wait(error)
            self._go_on(work, failure)
        except BaseException as error:
            self._leave(work, error)
            raise

    def begin(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """The work of ``call`` in the group, which is for :meth:`finish` or :meth:`finish_transfer`."""
        try:
            return call(*arguments, group=self._group, **options)
        except BaseException as error:
            self._leave(None, error)
            raise

    def finish(self, work: Any) -> None:
        """Wait for a collective's work.

        Raises:
            CommError: it failed, was interrupted, or was not done within the limit.
        """
        try:
            if (failure := _failure(work, _SLICE)) is not None:
                self._go_on(work, failure)
        except BaseException as error:
            self._leave(work, error)
            raise

    def finish_transfer(self, work: Any) -> None:
        """Wait for a send's or receive's work: a wait for those that timed out cannot be taken up again.

        Raises:
            CommError: it failed, or was not done within the limit.
        """
        try:
            failure = _failure(work, timedelta(seconds=max(_SHORTEST_S, self.limit_s)))
        except BaseException as error:
            mark_left(error)
            raise
        if failure is not None:
            raise _failed(failure) from failure

    def abandon(self, work: Any) -> None:
        """Nobody waits for a collective's work any more."""
        if not work.is_completed():
            _never_end(self._group)

    def _go_on(self, work: Any, failure: RuntimeError) -> None:
        deadline_s = time.monotonic() + self.limit_s - _SLICE_S
        while not work.is_completed():  # it is where the wait has failed, and is not where it only took too long
            now_s = time.monotonic()
            left_s = deadline_s - now_s
            if self._is_interrupted:
                raise CommError("torch.distributed: the wait was interrupted") from failure
            if left_s <= 0:
                raise CommError(f"torch.distributed: not done within {self.limit_s:g} s") from failure
            again = _failure(work, timedelta(seconds=max(_SHORTEST_S, min(_SLICE_S, left_s))))
            if again is None:
                return
            failure = again
            deadline_s += max(0.0, time.monotonic() - now_s - _LONGEST_SLICE_S)
        # It may have come to its end between the last wait and the question.
        if _failure(work, _SLICE) is not None:
            raise _failed(failure) from failure

    def _leave(self, work: Any, error: BaseException) -> None:
        """``error`` ends the waiting; without a work it came while the call was begun, maybe when it was under way."""
        is_from_outside = comes_from_outside(error)
        if is_from_outside:
            mark_left(error)
        may_be_under_way = is_from_outside if work is None else not work.is_completed()
        if not may_be_under_way:
            return
        try:
            end_connections(self._group)
            if work is not None:
                _failure(work, _END_LIMIT)  # from when gloo has let go, the tensor is its owner's alone
        finally:  # another signal may come meanwhile
            if work is None or not work.is_completed():
                _never_end(self._group)


class BoundedWork:
    """A work whose wait ends at the transport's limit. All waits for it end as the first one has ended.

    Gloo's second wait for a transfer would be for a further message, and end the group when that does not come.
    """

    __slots__ = ("_error", "_has_ended", "_is_transfer", "_lock", "_waiting", "_work")

    def __init__(self, work: Any, waiting: Waiting, is_transfer: bool) -> None:
        self._work = work
        self._waiting = waiting
        self._is_transfer = is_transfer
        self._lock = threading.Lock()
        self._has_ended = False
        self._error: CommError | None = None

    def wait(self) -> None:
        """Block until it is done.

        Raises:
            CommError: it failed, or was not done within the limit.
        """
        with self._lock:
            if not self._has_ended:
                try:
                    finish = self._waiting.finish_transfer if self._is_transfer else self._waiting.finish
                    finish(self._work)
                except CommError as error:
                    self._error = error
                self._has_ended = True
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """Whether it is done."""
        return bool(self._work.is_completed())

    def __del__(self) -> None:
        """What ended its caller may have come before the wait. Of transfers gloo has no thread."""
        if not self._is_transfer:
            self._waiting.abandon(self._work)


def end_connections(group: Any) -> None:
    """End all calls of a gloo group that are under way, here and on its peers; any thread. Nothing on other groups.

    Gloo has no function for it, but closes all connections of a group when one of its transfers times out.
    """
    try:
        backends = str(dist.get_backend_config(group)).split(",")
    except (TypeError, ValueError):
        return  # torch.distributed has ended it
    if "cpu:gloo" not in backends:
        return
    nothing = torch.empty(1, dtype=torch.uint8)
    for rank in range(group.size()):
        if rank != group.rank():
            with suppress(RuntimeError):
                group.recv([nothing], rank, _NOBODYS_TAG).wait(_AT_ONCE)


def _never_end(group: Any) -> None:
    """Leave a group to the end of the process: a thread of gloo's may still be in its call, and the end of the group,
    in the interpreter's, waits for that thread until torch's own limit.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _failure(work: Any, limit: timedelta) -> RuntimeError | None:
    """What the wait for ``work`` ended with: torch tells a limit that has passed by the same class of error.

    Raises what came from outside.
    """
    try:
        work.wait(limit)
    except RuntimeError as error:
        return _of_the_wait(error)
    return None


def _of_the_wait(error: RuntimeError) -> RuntimeError:
    """``error`` to be shown without the wait; raised where it is none of torch's."""
    if comes_from_outside(error):
        raise error
    return error.with_traceback(None)


def _failed(error: RuntimeError) -> CommError:
    lines = str(error).strip().splitlines()
    return CommError(f"torch.distributed: {lines[0] if lines else type(error).__name__}")
