"""The recorder of a FlagCX communicator: the shim writes, this reads."""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from sglang_fl.comm.backends.flagcx.communicator import FlagCXCommunicator
from sglang_fl.comm.backends.flagcx.ending import Member, end
from sglang_fl.comm.backends.flagcx.errors import FlagCXError, ResultCode, result_name
from sglang_fl.comm.backends.flagcx.types import DataType
from sglang_fl.comm.errors import CommError
from sglang_fl.comm.marks import marker_for
from sglang_fl.comm.places import Place, in_words
from sglang_fl.comm.recorder import SIZE, Mark, RecordedCall, Recorder, day_offset_ns

logger = logging.getLogger(__name__)

# int (void *stream, int *status) of the device's runtime or driver: whether a stream is being captured.
_CAPTURE_PROBES: dict[str, tuple[tuple[str, str], ...]] = {
    "cuda": (("libcuda.so.1", "cuStreamIsCapturing"), ("libamdhip64.so", "hipStreamIsCapturing")),
    "musa": (("libmusart.so", "musaStreamIsCapturing"),),
}
# Results that no peer brings about.
_OWN_DOING = frozenset(
    {
        ResultCode.INVALID_ARGUMENT,
        ResultCode.INVALID_USAGE,
        ResultCode.NOT_SUPPORTED,
        ResultCode.MISSING_SYMBOL,
        ResultCode.NULL_HANDLE,
        ResultCode.CLOSED,
        ResultCode.OUT_OF_MEMORY,
    }
)
_DTYPES = {-1: "", **{int(dtype): dtype.name.lower() for dtype in DataType}}  # as torch calls them
_PREFIX = "SGLANG_FL_FLAGCX_"


class FlagCXRecorder(Recorder):
    """Reads the shim's ring of one communicator. It keeps the ring, not the communicator, alive."""

    def __init__(
        self,
        communicator: FlagCXCommunicator,
        name: str,
        ranks: Sequence[int],
        device: torch.device,
        peers: Sequence[int] | None = None,
    ) -> None:
        """Record from now on.

        ``peers``: the rank within the group of each of the library's ranks, where they are not the same.

        Raises:
            FlagCXError: it is recorded already, or there is no memory.
        """
        self.name = name
        self.ranks = tuple(ranks)
        self.device = device
        self.refusal: str | None = None
        self._peers = tuple(range(len(self.ranks))) if peers is None else tuple(peers)
        self._lib, self._ffi = communicator.library.native
        code = self._lib.sglang_fl_flagcx_record(communicator.handle, SIZE, _capture_probe(device.type))
        if code:
            raise FlagCXError(code, "record", rank=communicator.rank)
        self._handle = self._ffi.gc(communicator.handle, self._lib.sglang_fl_flagcx_free_calls)
        self._member = Member(
            communicator.library.native, communicator.handle, communicator.world_size, communicator.rank
        )
        self._marker = marker_for(device)
        self._marks: deque[Mark] = deque(maxlen=1)

    def entered(self) -> int:
        """See :meth:`Recorder.entered`."""
        return int(self._lib.sglang_fl_flagcx_calls_entered(self._handle))

    def calls(self) -> list[RecordedCall]:
        """See :meth:`Recorder.calls`."""
        rows = self._ffi.new("sglang_fl_flagcx_call[]", SIZE)
        count = self._lib.sglang_fl_flagcx_read_calls(self._handle, rows, SIZE)
        return [self._shown(rows[index]) for index in range(count)]

    def under_way(self) -> RecordedCall | None:
        """See :meth:`Recorder.under_way`."""
        return self._one(self._lib.sglang_fl_flagcx_call_under_way)

    def last(self) -> RecordedCall | None:
        """See :meth:`Recorder.last`."""
        return self._one(self._lib.sglang_fl_flagcx_read_call, self.entered())

    def has_captured(self) -> bool:
        """See :meth:`Recorder.has_captured`."""
        return bool(self._lib.sglang_fl_flagcx_has_captured(self._handle))

    def ask_for_mark(self) -> None:
        """See :meth:`Recorder.ask_for_mark`."""
        if self._marker is not None:
            self._lib.sglang_fl_flagcx_ask_for_mark(self._handle)

    def take_mark(self) -> Mark | None:
        """See :meth:`Recorder.take_mark`."""
        try:
            return self._marks.pop()
        except IndexError:
            return None

    def mark_now(self) -> Mark | None:
        """See :meth:`Recorder.mark_now`."""
        row = self._ffi.new("sglang_fl_flagcx_call *")
        if self._marker is None or not self._lib.sglang_fl_flagcx_read_call(self._handle, self.entered(), row):
            return None
        event = self._marker.on(int(row.stream))
        return None if event is None else Mark(int(row.number), event, time.monotonic())

    def refuse(self, reason: str) -> None:
        """See :meth:`Recorder.refuse`."""
        self.refusal = reason
        self._lib.sglang_fl_flagcx_refuse(self._handle)

    def abort(self, limit_s: float) -> bool:
        """See :meth:`Recorder.abort`; what the call wrote is undefined, and the communicator has ended."""
        if self._marker is not None:
            return False
        try:
            end(self._member, self._lib.sglang_fl_flagcx_start_interrupt, "abort", limit_s, limit_s)
        except FlagCXError:
            return False
        return True

    def next_place(self, place: Place) -> None:
        """From where the next call comes; for calls that do not take it as an argument."""
        self._lib.sglang_fl_flagcx_next_place(self._handle, place)

    def settle(self, code: int, error: Callable[[], FlagCXError], shape: Sequence[int]) -> None:
        """Deal with a result that is not 0: make the mark that was asked for, or raise.

        Raises:
            CommError: ``error()``, or what is known of the reason.
        """
        if code == ResultCode.MARK_DUE:
            self._mark()
            return
        found = error()
        if self.refusal is not None:
            raise self.explained(CommError(self.refusal), shape) from found
        raise found if code in _OWN_DOING else self.explained(found, shape)

    def _mark(self) -> None:
        mark = self.mark_now()
        if mark is not None:
            self._lib.sglang_fl_flagcx_mark_made(self._handle)
            self._marks.append(replace(mark, is_close=True))

    def _one(self, read: Callable[..., int], *arguments: int) -> RecordedCall | None:
        row = self._ffi.new("sglang_fl_flagcx_call *")
        return self._shown(row) if read(self._handle, *arguments, row) else None

    def _shown(self, row: Any) -> RecordedCall:
        names = self._ffi.typeof("enum sglang_fl_flagcx_operation").elements
        return RecordedCall(
            number=int(row.number),
            operation=names[row.operation].removeprefix(_PREFIX).lower(),
            dtype=_DTYPES.get(row.dtype, str(row.dtype)),
            count=int(row.count),
            peer=self._peer(row.peer),
            stream=int(row.stream),
            captured=bool(row.captured),
            place=in_words(int(row.place)),
            time_in_s=row.time_in_ns / 1e9,
            time_out_s=row.time_out_ns / 1e9 if row.time_out_ns else None,
            error=result_name(row.result) if row.result else "",
            entered_s=(int(row.time_in_ns) - day_offset_ns()) / 1e9,
        )

    def _peer(self, peer: int) -> int | None:
        if peer < 0:
            return None
        return self._peers[peer] if peer < len(self._peers) else peer


def close_within(communicator: FlagCXCommunicator, limit_s: float) -> None:
    """Close it within ``limit_s`` seconds, or leave it to the end of the process and say why."""
    recorder = communicator.recorder
    if recorder is not None and recorder.has_captured():
        # The library would wait for graphs that hold its calls, for half a minute where they are still alive.
        logger.warning("%s: its calls were captured in a graph; it is left to the end of the process", recorder.name)
        return
    try:
        communicator.close(limit_s, limit_s / 2)
    except FlagCXError as error:
        name = "a FlagCX communicator" if recorder is None else recorder.name
        logger.warning("%s could not be closed and is left to the end of the process: %s", name, error)


def _capture_probe(device_type: str) -> int:
    """Address of the function that tells a captured stream, in a library that torch has loaded; 0 if there is none."""
    for name, symbol in _CAPTURE_PROBES.get(device_type, ()):
        try:
            library = ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
            function = getattr(library, symbol)
        except (OSError, AttributeError):
            continue
        return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0
