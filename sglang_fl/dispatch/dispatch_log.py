"""SGLANG_FL_DISPATCH_LOG: one line for each class of layers and the implementation that it got, for each process."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import torch

from sglang_fl.dispatch.policy import process_settings
from sglang_fl.dispatch.types import OpImpl

logger = logging.getLogger("sglang_fl.dispatch")
_lock = threading.Lock()
_written: set[tuple[Path, str]] = set()
_unwritable: set[Path] = set()


def write(class_name: str, impl: OpImpl) -> None:
    """Append ``[OOT-DISPATCH] SiluAndMul → flagos(flagos)``, once for each line; nothing where no file is configured.

    Called when a layer is bound. Global rank 0 writes the configured file, rank N the file with ``.rankN`` behind its
    name; processes that append to one file do not mix their lines. A file that cannot be written is an error in the
    log, once, and serving goes on.
    """
    configured = process_settings().ops.dispatch_log
    if configured is None:
        return
    path = path_of_rank(configured, _rank())
    line = f"[OOT-DISPATCH] {class_name} → {impl.kind.value}({impl.impl_id})\n"
    with _lock:
        if (path, line) in _written or path in _unwritable:
            return
        try:
            _append(path, line)
        except OSError as error:
            _unwritable.add(path)
            logger.error("[sglang_fl] SGLANG_FL_DISPATCH_LOG: %s cannot be written: %s", path, error)
            return
        _written.add((path, line))


def path_of_rank(path: Path, rank: int) -> Path:
    """The file that global rank ``rank`` writes."""
    return path if rank == 0 else path.with_name(f"{path.name}.rank{rank}")


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def _append(path: Path, line: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)
