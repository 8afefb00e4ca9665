"""The end of a process whose device work can no longer complete: what an abort leaves behind are wrong values."""

from __future__ import annotations

import logging
import os
import sys
import time
from functools import partial

from sglang_fl.comm.threads import LOG, aside

EXIT_CODE = 71  # EX_OSERR of sysexits.h; SGLang and torch use none of these
_WORDS_LIMIT_S = 1.0
logger = logging.getLogger("sglang_fl.comm")


def end_process(text: str) -> None:
    """Say ``text`` and end with :data:`EXIT_CODE`, whatever the other threads wait for. Does not return."""
    try:
        _say(f"[sglang_fl] {text} This process ends with code {EXIT_CODE}.")
    finally:
        os._exit(EXIT_CODE)  # also where nothing can be said: a reader that is gone, no thread, no memory


def _say(line: str) -> None:
    """Standard error may be a pipe that nobody reads, and another thread may hold a lock of a stream for ever."""
    ends_s = time.monotonic() + _WORDS_LIMIT_S
    ways = [aside(partial(_write, line), "sglang_fl-end"), aside(partial(_log, line), "sglang_fl-end-log")]
    for done in ways:
        done.wait(max(0.0, ends_s - time.monotonic()))


def _write(line: str) -> None:
    try:
        os.write(2, f"{line}\n".encode(errors="replace"))
    except OSError:
        return  # nobody hears it there; the log may say it


def _log(line: str) -> None:
    LOG.drain(_WORDS_LIMIT_S)
    logger.critical("%s", line)
    streams = [*logging.getLogger().handlers, *logger.handlers, sys.stdout, sys.stderr]
    for stream in streams:
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue  # closed, or none at all: the others are to be written all the same
