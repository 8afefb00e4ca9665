"""A word for the run that this process is in: equal on all its ranks, and no other run's, at whatever port they met."""

from __future__ import annotations

import sys
import uuid
import weakref
from collections.abc import Callable
from typing import Any

_KEY = "sglang_fl/run"


def learn_run(store: Any) -> None:
    """Take the word from torch.distributed's ``store``, or be the first to give it one; idempotent.

    Called with the first thing that ranks exchange, in a thread that may wait for the store.

    Raises:
        RuntimeError: the store is gone.
    """
    global _word, _world
    world = _now()
    if world is None or _world() is world:
        return
    _word = store.compare_set(_KEY, "", uuid.uuid4().hex[:12]).decode()
    _world = weakref.ref(world)


def run_word() -> str:
    """The word, also after torch.distributed has ended; empty as long as its ranks have exchanged nothing."""
    world = _now()
    return _word if world is None or _world() is world else ""


def _now() -> Any:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.group.WORLD


def _nothing() -> None:
    """No process group yet."""


_word = ""
_world: Callable[[], Any] = _nothing
