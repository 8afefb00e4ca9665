"""From where a group was called: taken at every call for some 100 ns, put into words only when it is shown."""

from __future__ import annotations

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

Place = tuple[CodeType, int]
"""Code and the instruction in it, as a frame's ``f_code`` and ``f_lasti``: it keeps no frame and no variable alive."""


@cache
def is_on_the_way(file: str) -> bool:
    """Whether the code in ``file`` only hands calls on."""
    if file.endswith(_WAY_OF_OTHERS):
        return True
    return file.startswith(_WAY) and not file.startswith(_CALLERS)


class CallSite:
    """Where one operation's callers lie on the stack: looked for once, then only checked.

    A caller that counts nanoseconds does itself what :meth:`place` does, with its own frame in the place of
    ``frame``: the frame at ``depth`` must have the code ``last``, and the one behind it is the place.

    Attributes:
        depth: of the last frame on the way, counted from the operation's own, which is 0.
        last: that frame's code.
    """

    __slots__ = ("depth", "last")

    def __init__(self) -> None:
        self.depth = 0
        self.last: CodeType | None = None

    def find(self, frame: FrameType | None) -> Place | None:
        """Walk from the operation's own frame to its caller, and remember the way; None if all lies on the way."""
        depth, last = -1, None
        while frame is not None:
            code = frame.f_code
            if not is_on_the_way(code.co_filename):
                self.depth, self.last = depth, last
                return code, frame.f_lasti
            depth, last, frame = depth + 1, code, frame.f_back
        return None


def in_words(place: Place | None) -> str:
    """``file:line function``; empty for None."""
    if place is None:
        return ""
    code, instruction = place
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end and line)
    name = getattr(code, "co_qualname", code.co_name)  # from Python 3.11 on
    return f"{code.co_filename}:{next(lines, code.co_firstlineno)} {name}"
