"""SGLANG_FLAGGEMS_RECORD: a file of the ATen operators that ran on FlagGems, one for each rank."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from sglang_fl.aten.gems import Entry

logger = logging.getLogger("sglang_fl.aten")
GEMS_LOGGER = "flag_gems"
ATEN_PREFIX = "flag_gems.ops."
# Where FlagGems writes by itself.
DEFAULT_PATH = Path("~/.flaggems/oplist.log")
_FORMAT = "[%(levelname)s] %(name)s.%(funcName)s: %(message)s"
# FlagGems' kernels for one chip lie in folders of this name, and log under names of their own.
_CHIP_FOLDER = ".ops."
_rehearsing = threading.local()


class RecordError(RuntimeError):
    """The file cannot be written; the message says which and why."""


@contextlib.contextmanager
def rehearsal() -> Iterator[None]:
    """Inside, what this thread calls is not recorded: a call that is only tried, before it is made."""
    _rehearsing.is_on = True
    try:
        yield
    finally:
        _rehearsing.is_on = False


def _is_no_rehearsal(record: logging.LogRecord) -> bool:
    return not getattr(_rehearsing, "is_on", False)


class _RecordFile(logging.FileHandler):
    """Ends with the first line that cannot be written, on a full disk for example, and says so once."""

    def __init__(self, target: Path) -> None:
        super().__init__(target, mode="a")
        self._listened: list[tuple[logging.Logger, int, bool]] = []
        self._has_failed = False

    def listen(self, name: str) -> None:
        """Write what is logged under ``name``, and nowhere else: otherwise all calls would be in the server's log."""
        source = logging.getLogger(name)
        self._listened.append((source, source.level, source.propagate))
        source.setLevel(logging.DEBUG)
        source.addHandler(self)
        source.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, as long as that succeeded."""
        if not self._has_failed:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name is logging's
        """What logging calls for a line that could not be written."""
        self._has_failed = True
        error = sys.exc_info()[1]
        for source, level, propagate in self._listened:
            source.removeHandler(self)
            source.setLevel(level)
            source.propagate = propagate
        with contextlib.suppress(OSError):
            self.close()
        logger.warning(
            "[sglang_fl] layer 1, ATen operators: not recorded from here on: %s cannot be written: %s",
            self.baseFilename,
            error,
        )


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
        RecordError: the file cannot be written.
    """
    target = path or DEFAULT_PATH
    try:
        target = path_of_rank(target.expanduser() if path is None else target, rank)
        if path is None:
            target.parent.mkdir(parents=True, exist_ok=True)
        handler = _RecordFile(target)
    except (OSError, ValueError, RuntimeError) as error:
        # ValueError: no name for a file, as "/"; RuntimeError: nobody's home.
        raise RecordError(f"{target}: {getattr(error, 'strerror', None) or error}") from error
    handler.setFormatter(logging.Formatter(_FORMAT))
    chip_loggers = frozenset(_chip_loggers(entries))
    handler.addFilter(_is_no_rehearsal)
    handler.addFilter(_AtenOnlyFilter(chip_loggers))
    if once:
        handler.addFilter(_OncePerOperator())
    beneath = {name for name in chip_loggers if name.startswith(f"{GEMS_LOGGER}.")}
    for name in {GEMS_LOGGER} | (chip_loggers - beneath):
        handler.listen(name)
    return target


def path_of_rank(path: Path, rank: int) -> Path:
    """The file that global rank ``rank`` writes."""
    return path if rank == 0 else path.with_name(f"{path.name}.rank{rank}")


def _chip_loggers(entries: Iterable[Entry]) -> Iterable[str]:
    for entry in entries:
        module_name = getattr(entry.function, "__module__", "")
        if module_name.startswith(ATEN_PREFIX) or _CHIP_FOLDER not in module_name:
            continue
        found = getattr(sys.modules.get(module_name), "logger", None)
        if isinstance(found, logging.Logger):
            yield found.name
