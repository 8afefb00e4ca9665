"""Waiting for what the shim runs in a thread of its own, with a limit that FlagCX does not have."""

from __future__ import annotations

import socket
import struct
import time
from typing import Any

from sglang_fl.comm.backends.flagcx.errors import FlagCXError, ResultCode
from sglang_fl.comm.backends.flagcx.native import Native

# How long a signal such as Ctrl-C may have to wait.
_SLICE_S = 0.1
_MESSAGE_BYTES = 1024
# What the library says where it has nothing to say.
_NO_MESSAGE = ("", "Not implemented.", "Undefined: flagcxComm is not fully initialized.")


class TimeLimitError(Exception):
    """The limit passed before the job was done; it was given up."""


class Job:
    """One started job; a context manager, on whose exit the job is given up if it is not done."""

    def __init__(self, native: Native, handle: Any) -> None:
        self._native = native
        self.handle = handle

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self._native.lib.sglang_fl_flagcx_job_release(self.handle)
        self.handle = self._native.ffi.NULL

    def result(self, limit_s: float) -> int:
        """Wait for the job and return its result.

        Raises:
            TimeLimitError: after ``limit_s`` seconds.
        """
        deadline = time.monotonic() + limit_s
        while True:
            left_s = deadline - time.monotonic()
            if self._native.lib.sglang_fl_flagcx_job_wait(self.handle, max(0.0, min(_SLICE_S, left_s))):
                return int(self._native.lib.sglang_fl_flagcx_job_result(self.handle))
            if left_s <= 0:
                raise TimeLimitError

    def message(self) -> str:
        """What the library said of a result that is not 0; empty where it says nothing of use."""
        text = self._native.ffi.new("char[]", _MESSAGE_BYTES)
        self._native.lib.sglang_fl_flagcx_job_message(self.handle, text, _MESSAGE_BYTES)
        return useful(self._native.ffi.string(text).decode(errors="replace"))


def useful(message: str) -> str:
    """``message``, or nothing where it is one of the texts that say nothing."""
    stripped = message.strip()
    return "" if stripped in _NO_MESSAGE else stripped


def check_limit(name: str, limit_s: object) -> None:
    """Raise unless ``limit_s`` is a time: a NaN or a None would be noticed only when the job has begun.

    Raises:
        ValueError: naming the argument and its value.
    """
    if not isinstance(limit_s, int | float) or not limit_s >= 0:
        raise ValueError(f"{name} is {limit_s!r}; allowed are seconds from 0 on, math.inf for no limit")


def started(native: Native, operation: str, handle: Any, code: int) -> Job:
    """The job, or the error of its start."""
    if code != 0:
        raise FlagCXError(code, operation)
    return Job(native, handle)


def timed_out(operation: str, limit_s: float, details: str, rank: int | None = None) -> FlagCXError:
    """The error of a job that was given up."""
    return FlagCXError(ResultCode.TIMED_OUT, operation, f"The limit was {limit_s:g} s; {details}", rank=rank)


def bootstrap_address(unique_id: bytes) -> str | None:
    """host:port at which FlagCX's ranks meet, if the id carries one.

    FlagCX's ``flagcxBootstrapHandle``: 8 bytes of a magic number, a sockaddr_in or sockaddr_in6, zeros.
    """
    if len(unique_id) < 36 or any(unique_id[36:]):
        return None
    (family,) = struct.unpack_from("=H", unique_id, 8)
    (port,) = struct.unpack_from(">H", unique_id, 10)
    if port == 0:
        return None
    if family == socket.AF_INET:
        return f"{socket.inet_ntop(socket.AF_INET, unique_id[12:16])}:{port}"
    if family == socket.AF_INET6:
        return f"[{socket.inet_ntop(socket.AF_INET6, unique_id[16:32])}]:{port}"
    return None
