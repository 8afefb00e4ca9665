"""SGLANG_FLAGGEMS_RECORD: a file of the ATen operators that ran on FlagGems, one for each rank."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from pathlib import Path

from sglang_fl.aten.gems import Entry

GEMS_LOGGER = "flag_gems"
ATEN_PREFIX = "flag_gems.ops."
# Where FlagGems writes by itself.
DEFAULT_PATH = Path("~/.flaggems/oplist.log")
_FORMAT = "[%(levelname)s] %(name)s.%(funcName)s: %(message)s"
# FlagGems' kernels for one chip lie in folders of this name, and log under names of their own.
_CHIP_FOLDER = ".ops."


class _AtenOnlyFilter(logging.Filter):
    """Lets through what FlagGems' replacements of ATen operators log: ``flag_gems.ops.*`` and their chip's versions.

    Kernels that layer 2 calls (``flag_gems.fused.*``, ``flag_gems.modules.*``) log as well and are kept out.
    """

    def __init__(self, chip_loggers: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self._chip_loggers = chip_loggers

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is of an ATen operator."""
        return record.name.startswith(ATEN_PREFIX) or record.name in self._chip_loggers


class _OncePerOperator(logging.Filter):
    """Lets the first record of each function through."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[tuple[str, str]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether this function has not been seen before."""
        operator = (record.name, record.funcName)
        if operator in self._seen:
            return False
        self._seen.add(operator)
        return True


def start(path: Path | None, rank: int, once: bool, entries: Iterable[Entry]) -> Path:
    """Append from now on to ``path`` (FlagGems' own default if None), rank N to the file with ``.rankN`` behind it.

    once: each operator once, otherwise every call. entries: FlagGems' list, for the chip's own versions.

    Returns the file that is written.

    Raises:
        OSError: the file cannot be written.
    """
    target = path_of_rank(path or DEFAULT_PATH.expanduser(), rank)
    if path is None:
        target.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(target, mode="a")
    handler.setFormatter(logging.Formatter(_FORMAT))
    chip_loggers = frozenset(_chip_loggers(entries))
    handler.addFilter(_AtenOnlyFilter(chip_loggers))
    if once:
        handler.addFilter(_OncePerOperator())
    beneath = {name for name in chip_loggers if name.startswith(f"{GEMS_LOGGER}.")}
    for name in {GEMS_LOGGER} | (chip_loggers - beneath):
        logger = logging.getLogger(name)
        logger.setLevel(logging.DEBUG)
        logger.addHandler(handler)
        # Without this every call would also reach the server's log.
        logger.propagate = False
    return target


def path_of_rank(path: Path, rank: int) -> Path:
    """The file that global rank ``rank`` writes."""
    return path if rank == 0 else path.with_name(f"{path.name}.rank{rank}")


def _chip_loggers(entries: Iterable[Entry]) -> Iterable[str]:
    for entry in entries:
        module_name = getattr(entry.function, "__module__", "")
        if module_name.startswith(ATEN_PREFIX) or _CHIP_FOLDER not in module_name:
            continue
        logger = getattr(sys.modules.get(module_name), "logger", None)
        if isinstance(logger, logging.Logger):
            yield logger.name
