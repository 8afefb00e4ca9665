"""Leaves no name in /dev/shm for SGLang's message queues: its processes are killed, and nobody could remove them."""

from __future__ import annotations

from typing import Any

from sglang_fl.sglang_hooks.registration import Hook, HookKind

_MESSAGE_QUEUE = "sglang.srt.distributed.device_communicators.shm_broadcast.MessageQueue"


def hooks() -> list[Hook]:
    """A hook on the moment from which every reader has the memory and the name serves nobody."""
    return [Hook(f"{_MESSAGE_QUEUE}.wait_until_ready", _remove_name, HookKind.AFTER)]


def _remove_name(result: Any, self: Any) -> None:
    buffer = self.buffer
    if not self._is_writer or buffer is None or not buffer.is_creator:
        return
    # Its own destructor would do that once more.
    buffer.is_creator = False
    buffer.shared_memory.unlink()
