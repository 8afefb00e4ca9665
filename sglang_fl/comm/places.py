"""From where a group was called: taken at every call for some 100 ns, put into words only when it is shown."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

_PACKAGE = Path(__file__).resolve().parents[1]
# Code that only hands a call on to the library says nothing about who made it.
_WAY = tuple(f"{_PACKAGE / folder}/" for folder in ("comm", "sglang_hooks"))
_WAY_OF_OTHERS = (
    "/sglang/srt/distributed/parallel_state.py",
    "/sglang/srt/distributed/communication_op.py",
    "/sglang/srt/plugins/hook_registry.py",
    "/torch/_ops.py",
    "/torch/_library/custom_ops.py",
    "/torch/_library/autograd.py",
    "/torch/_compile.py",
    "/torch/_dynamo/eval_frame.py",
)
# These call groups on their own account.
_CALLERS = tuple(str(_PACKAGE / "comm" / name) for name in ("selftest.py", "bench.py", "tools/"))
_MOST_PLACES = 65536

Place = int
"""A number of this process for a line of code; 0 for an unknown one. :func:`in_words` says which it is."""


@dataclass
class _Numbers:
    """Code and instruction of each place; they keep the code alive, so that its identity stays its own."""

    known: list[tuple[CodeType, int]] = field(default_factory=list)
    numbers: dict[tuple[int, int], Place] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def number(self, code: CodeType, instruction: int) -> Place:
        key = (id(code), instruction)
        with self.lock:
            if key not in self.numbers and len(self.known) < _MOST_PLACES:
                self.known.append((code, instruction))
                self.numbers[key] = len(self.known)
            return self.numbers.get(key, 0)


_numbers = _Numbers()


@cache
def is_on_the_way(file: str) -> bool:
    """Whether the code in ``file`` only hands calls on."""
    if file.endswith(_WAY_OF_OTHERS):
        return True
    return file.startswith(_WAY) and not file.startswith(_CALLERS)


class CallSite:
    """Where the callers of one operation lie on the stack: walked to at the first call from a place, then known.

    A caller that counts nanoseconds looks itself: if the frame at ``depth``, counted from the operation's own, stands
    at an instruction that is ``known`` for its code, it is at that place; otherwise :meth:`find` tells. A frame further
    out cannot be taken for the caller, since it stands at the call that leads to the caller.

    Attributes:
        depth: at which the last caller lay.
        known: of each instruction from which a caller called, the code of the last such caller, and the place.
    """

    __slots__ = ("_depths", "_places", "depth", "known")

    def __init__(self) -> None:
        self.depth = 1
        self.known: dict[int, tuple[CodeType, Place]] = {}
        self._depths: list[int] = []
        self._places: dict[tuple[int, int], Place] = {}  # by code, which its number keeps alive, and instruction

    def find(self) -> Place:
        """The place of the caller of the operation that calls this; 0 if the whole stack is on the way."""
        for depth in self._depths:
            try:
                frame = sys._getframe(1 + depth)
            except ValueError:
                continue
            place = self._places.get((id(frame.f_code), frame.f_lasti))
            if place is not None:
                return self._found(frame, depth, place)
        return self._walk(sys._getframe(1))

    def _walk(self, frame: FrameType | None) -> Place:
        depth = 0
        while frame is not None and is_on_the_way(frame.f_code.co_filename):
            frame, depth = frame.f_back, depth + 1
        if frame is None:
            return 0
        place = _numbers.number(frame.f_code, frame.f_lasti)
        if place == 0:
            return 0
        self._places[id(frame.f_code), frame.f_lasti] = place
        if depth not in self._depths:
            self._depths.append(depth)
        return self._found(frame, depth, place)

    def _found(self, frame: FrameType, depth: int, place: Place) -> Place:
        self.depth = depth
        self.known[frame.f_lasti] = (frame.f_code, place)
        return place


def in_words(place: Place) -> str:
    """``file:line function``; empty for 0."""
    if place == 0:
        return ""
    code, instruction = _numbers.known[place - 1]
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end and line)
    name = getattr(code, "co_qualname", code.co_name)  # from Python 3.11 on
    return f"{code.co_filename}:{next(lines, code.co_firstlineno)} {name}"
