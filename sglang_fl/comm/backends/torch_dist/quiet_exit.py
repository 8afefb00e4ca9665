"""A daemon thread that is inside a call at the interpreter's exit must not take the process's exit code along.

Such a thread comes back while Python ends, where it may not go on: Python ends it with pthread_exit, which cannot pass
the C++ frames of torch's bindings, so that C++ would abort the process. Instead the thread stays where it is.

To leave with ``os._exit`` before Python ends would be simpler, but nothing that runs then knows the exit code: that of
``sys.exit`` is in the interpreter's C frames, and Ctrl-C's is a signal that comes last of all. Nor can the thread be
kept from coming back: a wait for a transfer is one call, which ends when the peer does.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping
from multiprocessing.util import Finalize
from pathlib import Path
from types import FrameType

logger = logging.getLogger("sglang_fl.comm")
EXIT_LIMIT_S = 60
_COMM = str(Path(__file__).parents[2])
_AFTER_ALL = -100  # of multiprocessing's exit priorities: nobody is to finish a call any more
_registered_in: set[int] = set()


def exit_quietly() -> None:
    """See to it for this process; may be called again."""
    if os.getpid() not in _registered_in:
        _registered_in.add(os.getpid())
        Finalize(None, _at_exit, exitpriority=_AFTER_ALL)


def _at_exit() -> None:
    main = threading.main_thread()
    if any(thread is not main and not thread.daemon for thread in threading.enumerate()):
        atexit.register(_let_stay)  # multiprocessing is earlier than Python, which waits for those threads
        return
    _let_stay()


def _let_stay() -> None:
    frames = sys._current_frames()
    inside = [thread.name for thread in threading.enumerate() if thread.daemon and _is_inside(frames, thread.ident)]
    if not inside:
        return
    try:
        set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
    except (OSError, AttributeError) as error:
        logger.warning("[sglang_fl] the process ends while threads %s are in a call, and may abort: %s", inside, error)
        return
    set_terminate.argtypes, set_terminate.restype = [ctypes.c_void_p], ctypes.c_void_p
    set_terminate(ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p))
    # What would have aborted the main thread must not make it wait for ever.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(EXIT_LIMIT_S)


def _is_inside(frames: Mapping[int, FrameType], ident: int | None) -> bool:
    """Whether a thread is inside a call of this package, other than waiting for other threads."""
    frame: FrameType | None = frames.get(ident or 0)
    if frame is None or frame.f_code.co_filename == threading.__file__:
        return False
    while frame is not None:
        if frame.f_code.co_filename.startswith(_COMM):
            return True
        frame = frame.f_back
    return False
