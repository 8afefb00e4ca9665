"""The audit's book: which call of which group came from where, and which calls went around CommunicatorFL."""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch.distributed as dist

# What torch.distributed offers beside CommunicatorFL.
TORCH_CALLS = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)
_OURS = "sglang_fl/"
_SKIPPED = (_OURS, "sglang/srt/plugins/hook_registry.py", "torch/distributed/", "torch/_ops.py", "contextlib.py")


@dataclass(frozen=True)
class Entry:
    """One kind of call: ``around`` if torch.distributed was called directly."""

    group: str
    operation: str
    backend: str
    caller: str
    around: bool


@dataclass
class Ledger:
    """Counts of calls by entry; ``depth`` tells whether this thread's call happens inside CommunicatorFL."""

    counts: Counter[Entry] = field(default_factory=Counter)
    process_groups: dict[Any, str] = field(default_factory=dict)
    _thread: threading.local = field(default_factory=threading.local)

    @property
    def depth(self) -> int:
        """How many of our hooks this thread is inside."""
        found: int = getattr(self._thread, "depth", 0)
        return found

    @depth.setter
    def depth(self, value: int) -> None:
        self._thread.depth = value

    def name_group(self, name: str, device_group: Any, cpu_group: Any) -> None:
        """Let entries of torch.distributed name SGLang's groups."""
        self.process_groups.setdefault(device_group, name)
        self.process_groups.setdefault(cpu_group, f"{name} (cpu group)")

    def carried(self, group: str, operation: str, backend: str) -> None:
        """Book a call that CommunicatorFL carried, with its caller in SGLang."""
        self.counts[Entry(group, operation, backend, caller(), False)] += 1

    def rows(self) -> list[dict[str, Any]]:
        """For the report: every entry with its count, those that went around first."""
        counted = dict(self.counts)  # in one step: other threads go on counting
        ordered = sorted(counted.items(), key=lambda item: (not item[0].around, item[0].group, item[0].operation))
        return [{**vars(entry), "count": count} for entry, count in ordered]

    def watch_torch(self) -> None:
        """Book every call of ``torch.distributed.NAME(...)`` in this process that is not CommunicatorFL's own.

        A name that a module imported from torch.distributed before is not seen.
        """
        for name in TORCH_CALLS:
            setattr(dist, name, self._watched(name, getattr(dist, name)))

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def watched(*arguments: Any, **named: Any) -> Any:
            if self.depth == 0 and _OURS not in sys._getframe(1).f_code.co_filename:
                group = named.get("group") or next((a for a in arguments if isinstance(a, dist.ProcessGroup)), None)
                self.counts[Entry(self._name(group), name, _backend(group), caller(), True)] += 1
            return function(*arguments, **named)

        return watched

    def _name(self, group: Any) -> str:
        if group is None:
            return "torch.distributed's default group"
        return self.process_groups.get(group, "a group that is none of SGLang's coordinators")


def caller() -> str:
    """File and line, from the package's name on, of the nearest frame that is neither ours nor machinery."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not any(part in path for part in _SKIPPED):
            return f"{_short(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"


def _short(path: str) -> str:
    _, found, rest = path.rpartition("site-packages/")
    return rest if found else path


def _backend(group: Any) -> str:
    return f"torch.distributed ({dist.get_backend(group)})"
