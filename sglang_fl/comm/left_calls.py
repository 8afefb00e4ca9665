"""Exceptions that come into a call from outside, of a signal's handler mostly: they leave it while it is under way.

Whether the call has come to its end, or ever will, is not known then, so that the group cannot be used any more. What
torch or this package raises is another thing: it says what became of the call.
"""

from __future__ import annotations

from pathlib import Path

import torch

_OURS = tuple(f"{folder}/" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))
_MARK = "_sglang_fl_left_a_call"


def comes_from_outside(error: BaseException) -> bool:
    """Whether neither torch nor this package raised ``error``, which has just been caught around a call of torch's.

    KeyboardInterrupt and SystemExit are none of theirs.
    """
    if not isinstance(error, Exception):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and not trace.tb_frame.f_code.co_filename.startswith(_OURS)


def mark_left(error: BaseException) -> None:
    """Note on ``error`` that it left a call."""
    setattr(error, _MARK, True)


def has_left(error: BaseException) -> bool:
    """Whether ``error`` left a call."""
    return bool(getattr(error, _MARK, False))
