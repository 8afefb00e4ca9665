"""Device events behind recorded calls: how the monitor learns what a device has done."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang_fl.comm.captures import CAPTURES

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.00005, 0.002


@dataclass(frozen=True)
class DeviceEvent:
    """An event that any thread may ask: one that never set its device would otherwise make a context on device 0."""

    event: Any
    device: torch.device
    module: Any

    def query(self) -> bool:
        """Whether everything before it is done."""
        with self.module.device(self.device):
            return bool(self.event.query())

    def wait_on_host(self) -> None:
        """Block the calling thread, and no stream, until everything before it is done.

        While the process captures a graph the event is not asked, which would end the capture.
        """
        pause_s = _SHORTEST_PAUSE_S
        while not self._was_seen_done():
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _was_seen_done(self) -> bool:
        with CAPTURES.device_call() as allowed:
            return allowed and self.query()


class Marker:
    """Records events on one device's streams, never on one that is being captured."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self.is_capturing: Callable[[], bool] = getattr(self._module, "is_current_stream_capturing", _never)

    def here(self) -> DeviceEvent | None:
        """An event on the calling thread's current stream; None while that is being captured."""
        if self.is_capturing():
            return None
        event = self._module.current_stream(self._device).record_event()
        return DeviceEvent(event, self._device, self._module)

    def on(self, raw_stream: int) -> DeviceEvent | None:
        """An event on a stream, from any thread; None while that is being captured, or if torch cannot name it."""
        stream = self._stream(raw_stream)
        if stream is None:
            return None
        with self._module.device(self._device), self._module.stream(stream):
            return self.here()

    def _stream(self, raw_stream: int) -> Any:
        if raw_stream == 0:
            return self._module.default_stream(self._device)
        external = getattr(self._module, "ExternalStream", None)
        return None if external is None else external(raw_stream, device=self._device)


def marker_for(device: torch.device) -> Marker | None:
    """None for host memory, which has nothing to mark."""
    return None if device.type == "cpu" else Marker(device)


def raw_stream_of(device: torch.device) -> Callable[[], int]:
    """The current stream's raw handle, as cheaply as the device's torch gives it; 0 for host memory."""
    if device.type == "cpu":
        return _no_stream
    if device.type == "cuda":
        index = device.index or 0
        get = torch._C._cuda_getCurrentRawStream
        return lambda: get(index)
    module = torch.get_device_module(device)
    return lambda: raw_stream(module.current_stream(device))


def raw_stream(stream: Any) -> int:
    """The device runtime's own handle of a torch stream: ``cuda_stream``, ``npu_stream``, ..."""
    return int(getattr(stream, f"{stream.device.type}_stream"))


def _no_stream() -> int:
    return 0


def _never() -> bool:
    return False
