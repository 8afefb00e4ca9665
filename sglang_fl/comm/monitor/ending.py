"""The end of a process whose device work can no longer complete: what an abort leaves behind are wrong values."""

from __future__ import annotations

import logging
import os
import sys
import threading

EXIT_CODE = 71  # EX_OSERR of sysexits.h; SGLang and torch use none of these
_FLUSH_LIMIT_S = 1.0
logger = logging.getLogger("sglang_fl.comm")


def end_process(text: str) -> None:
    """Say ``text`` and end with :data:`EXIT_CODE`, whatever the other threads wait for. Does not return."""
    os.write(2, f"[sglang_fl] {text} This process ends with code {EXIT_CODE}.\n".encode())
    flush = threading.Thread(target=_flush, args=(text,), name="sglang_fl-end", daemon=True)
    flush.start()
    flush.join(_FLUSH_LIMIT_S)  # another thread may hold a lock of a stream for ever
    os._exit(EXIT_CODE)


def _flush(text: str) -> None:
    logger.critical("[sglang_fl] %s This process ends with code %d.", text, EXIT_CODE)
    for handler in [*logging.getLogger().handlers, *logger.handlers]:
        handler.flush()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
