"""Leaves no name in /dev/shm for what SGLang's processes make there: they are killed, and nobody could remove it.

Nobody but they themselves: multiprocessing's resource tracker, whose work that would be, is killed with them.
"""

from __future__ import annotations

import threading
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


def keep_bars_in_process() -> None:
    """Give tqdm, whose bars SGLang shows while it loads a model, a lock for the threads of this process.

    Its own is for processes that inherit it as well: where processes are spawned, as a server's are, a semaphore with a
    name. A scheduler has no such processes. Nothing where tqdm has a lock already.
    """
    from tqdm import tqdm

    if not hasattr(tqdm, "_lock"):
        tqdm.set_lock(threading.RLock())
