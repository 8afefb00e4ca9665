"""Calls that use one buffer come one after the other on the device, whatever streams they are made on."""

from __future__ import annotations

from typing import Any

import torch

from sglang_fl.comm.marks import raw_stream_of


class StreamOrder:
    """Lets a call's stream wait for the one of the call before, where it is another one.

    On one stream, which is the rule, this costs two questions and a comparison. The order holds between eager calls,
    and within a capture between the streams that belong to it. It does not hold between a graph's replay and calls on
    another stream than the replay's, since nobody tells when a graph is replayed: such streams must wait for each
    other by the caller's doing, as they must for SGLang's own custom all_reduce.
    """

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._device = device
        self._stream_now = raw_stream_of(device)
        # Of eager calls and of captured ones: a capture is an island, what is outside neither waits for it nor can be
        # waited for in it.
        self._last_raw: dict[bool, int | None] = {False: None, True: None}
        self._last: dict[bool, Any] = {False: None, True: None}

    def take_turn(self) -> None:
        """Called before each use of the buffer, on the stream that will use it."""
        is_captured = self._is_capturing()
        raw = self._stream_now()
        if raw != self._last_raw[is_captured]:
            self._change(raw, is_captured)

    def _change(self, raw: int, is_captured: bool) -> None:
        stream, before = self._module.current_stream(self._device), self._last[is_captured]
        # A stream of an earlier capture has nothing to wait for.
        if before is not None and (not is_captured or self._captures(before)):
            stream.wait_event(before.record_event())
        self._last[is_captured], self._last_raw[is_captured] = stream, raw

    def _captures(self, stream: Any) -> bool:
        with self._module.stream(stream):
            return self._is_capturing()

    def _is_capturing(self) -> bool:
        return bool(self._module.is_current_stream_capturing())
