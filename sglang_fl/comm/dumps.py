"""Writes what the recorders of this process hold as JSON, into a private folder of limited size."""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import stat
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from sglang_fl import __version__
from sglang_fl.comm.errors import CommError
from sglang_fl.comm.recorder import RecordedCall, Recorder
from sglang_fl.comm.run_word import run_word
from sglang_fl.config.numbers import whole_number

FORMAT = 1
MAX_FILES = 64
MAX_BYTES = 64 * 2**20
# All ranks of a machine with eight devices find room beside each other.
MAX_DUMP_BYTES = 8 * 2**20
PATTERN = "sglang_fl-comm-*.json"

_RUN = ", run "
_OWN_FILE = re.compile(r"sglang_fl-comm-[\w.-]+\.json(\.partial)?")
_PARTIAL = ".partial"
_numbers = itertools.count(1)


class DumpError(CommError):
    """A dump cannot be written where it was asked for."""


class HasRecorders(Protocol):
    """A communicator, or what else keeps recorders."""

    def recorders(self) -> tuple[Recorder, ...]:
        """Those that it has now."""


# In the order in which they came, which ranks that make the same groups have in common.
_owners: WeakKeyDictionary[HasRecorders, None] = WeakKeyDictionary()
_keys: WeakKeyDictionary[Recorder, str] = WeakKeyDictionary()
# A fork has made none of its parent's calls.
os.register_at_fork(after_in_child=_owners.clear)


def include(owner: HasRecorders) -> None:
    """Write the recorders of ``owner``, as long as it lives, into every dump that :func:`dump_calls` makes."""
    _owners[owner] = None


def name_recorder(recorder: Recorder, key: str) -> None:
    """Write ``key`` with the calls of ``recorder``: it names it alike on all its ranks, for good.

    Two groups of one name and the same ranks are told apart by it, whether both live or one came after the other.
    """
    _keys[recorder] = key


def known_recorders() -> list[Recorder]:
    """Of all owners that live, each once, the oldest owner's first; groups of the same ranks may share one."""
    owners = [owner for reference in _owners.keyrefs() if (owner := reference()) is not None]
    return list(dict.fromkeys(recorder for owner in owners for recorder in owner.recorders()))


def dump_calls(
    reason: str = "on request",
    folder: Path | None = None,
    *,
    rank: int | None = None,
    done: Mapping[str, int] | None = None,
    meeting: str | None = None,
) -> Path:
    """:func:`write_dump` of all recorders of this process.

    Raises:
        DumpError: the folder cannot be used.
    """
    return write_dump(reason, known_recorders(), folder, rank=rank, done=done, meeting=meeting)


def default_folder() -> Path:
    """Where dumps go if no setting says otherwise: a folder of this user under the temporary directory."""
    return Path(tempfile.gettempdir()) / f"sglang_fl-{os.geteuid()}"


def write_dump(
    reason: str,
    recorders: Iterable[Recorder],
    folder: Path | None = None,
    *,
    rank: int | None = None,
    done: Mapping[str, int] | None = None,
    meeting: str | None = None,
) -> Path:
    """Write one dump of this process; local, from any thread. The calls go on meanwhile.

    Args:
        reason: why it is written, for the reader.
        recorders: what to write; one that occurs twice is written once.
        folder: made with mode 0700 if it does not exist; :func:`default_folder` if left out. The oldest dumps of
            sglang_fl in it go, so that at most ``MAX_FILES`` and ``MAX_BYTES`` are left. If the dump would be larger
            than ``MAX_DUMP_BYTES``, the oldest calls of each recorder are left out, and their number is in it.
        rank: this process's global rank; torch.distributed's, or the variable RANK's, or 0, if left out.
        done: recorder's name to the number of the last call whose device event was seen done.
        meeting: where the ranks met, see :func:`meeting_place`, of now if left out. The dump adds the run's word to it.

    Raises:
        DumpError: the folder is a link, belongs to another user, can be written by others, or cannot be used.
    """
    place = default_folder() if folder is None else folder
    own_rank = _rank() if rank is None else rank
    text = _fitted(
        _document(reason, own_rank, meeting_place() if meeting is None else meeting),
        list(dict.fromkeys(recorders)),
        done or {},
    )
    host = re.sub(r"[^\w.-]", "_", socket.gethostname())
    moment = time.strftime("%Y%m%dT%H%M%S")
    name = f"sglang_fl-comm-{host}-rank{own_rank}-pid{os.getpid()}-{moment}-{next(_numbers)}.json"
    with _opened(place) as descriptor:
        _write(descriptor, name, text)
        _limit(descriptor, name)
    return place / name


def check_folder(folder: Path) -> None:
    """Make ``folder`` if it does not exist, and check that a dump could be written into it.

    Raises:
        DumpError: as :func:`write_dump`.
    """
    with _opened(folder) as descriptor:
        _write(descriptor, _PROBE, "")
        os.unlink(_PROBE, dir_fd=descriptor)


_PROBE = f"sglang_fl-comm-probe-{os.getpid()}.json"
_CHANGE = "Set SGLANG_FL_COMM_DUMP_DIR to a folder of your own"


def _rank() -> int:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        rank: int = distributed.get_rank()
        return rank
    return whole_number(os.environ.get("RANK", "")) or 0


def meeting_place() -> str:
    """Where the ranks met, in words that are equal on all of them and differ from those of another server of that time.

    Empty where torch.distributed is not initialised, or no longer.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return ""
    store = distributed.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    port, path = getattr(store, "port", None), getattr(store, "path", None)
    return f"{type(store).__name__} {path if port is None else f'port {port}'}"


def names_run(meeting: str) -> bool:
    """Whether a dump's ``meeting`` has the word of one run; else a later run at the same port has the same."""
    return _RUN in meeting


def _document(reason: str, rank: int, meeting: str) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": __version__,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "rank": rank,
        "meeting": f"{meeting}{_RUN}{word}" if (word := run_word()) else meeting,
        "time_s": time.time(),
        "reason": reason,
        "threads": _threads(),
    }


def _threads() -> list[dict[str, Any]]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    # Taken whole before a line is formatted: a frame that ends meanwhile no longer knows who called it.
    stacks = {identity: list(_outwards(frame)) for identity, frame in sys._current_frames().items()}
    return [
        {"name": names.get(identity, "not Python's"), "stack": [line.strip() for line in _formatted(stack)]}
        for identity, stack in stacks.items()
    ]


def _outwards(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


def _formatted(stack: Sequence[tuple[FrameType, int]]) -> list[str]:
    return traceback.StackSummary.extract(iter(reversed(stack))).format()


def _fitted(document: dict[str, Any], recorders: list[Recorder], done: Mapping[str, int]) -> str:
    records = [_record(recorder, done.get(recorder.name)) for recorder in recorders]
    longest = max((len(record["calls"]) for record in records), default=0)
    while True:
        text = json.dumps({**document, "recorders": records}, separators=(",", ":"))
        if len(text) <= MAX_DUMP_BYTES or not longest:
            return text
        longest //= 2
        for record in records:
            left_out = max(0, len(record["calls"]) - longest)
            record["left_out"] += left_out
            record["calls"] = record["calls"][left_out:]


def _record(recorder: Recorder, done: int | None) -> dict[str, Any]:
    under_way = recorder.under_way()
    entered = recorder.entered()
    calls = _unbroken(recorder.calls(), entered)
    return {
        "name": recorder.name,
        "ranks": list(recorder.ranks),
        "key": _keys.get(recorder),
        "device": str(recorder.device),
        # A call may have been counted whose row was not written yet.
        "entered": calls[-1].number if calls else entered,
        "under_way": None if under_way is None else under_way.row(),
        "done": done,
        "left_out": 0,
        "calls": [call.row() for call in calls],
    }


def _unbroken(calls: Sequence[RecordedCall], last: int) -> list[RecordedCall]:
    """The latest of ``calls`` up to number ``last`` that follow each other.

    While they were read others were entered, some of which are seen, and the oldest made room for them.
    """
    kept: list[RecordedCall] = []
    for call in reversed(calls):
        if call.number > last:
            continue
        if kept and call.number != kept[-1].number - 1:
            break
        kept.append(call)
    return kept[::-1]


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """A descriptor of the folder, which from here on is the same one whatever becomes of its name."""
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        if folder.is_symlink():
            raise DumpError(f"the folder of dumps {folder} is a link to {folder.readlink()}. {_CHANGE}, not to a link.")
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            _check(folder, os.fstat(descriptor))
            yield descriptor
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DumpError(f"no dump of the calls can be written into {folder}: {error}. {_CHANGE}.") from error


def _check(folder: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise DumpError(
            f"the folder of dumps {folder} belongs to user {found.st_uid}, this process runs as {os.geteuid()}. "
            f"{_CHANGE}."
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise DumpError(
            f"the folder of dumps {folder} has mode {stat.S_IMODE(found.st_mode):04o}: others can write into it. "
            f"chmod 700 {folder}, or set SGLANG_FL_COMM_DUMP_DIR to another one."
        )


def _write(folder: int, name: str, text: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(name + _PARTIAL, flags, 0o600, dir_fd=folder), "w") as file:
        file.write(text)
    os.rename(name + _PARTIAL, name, src_dir_fd=folder, dst_dir_fd=folder)


def _limit(folder: int, newest: str) -> None:
    """Remove the oldest; other processes write and remove here too, and nothing but dumps is touched."""
    files = sorted(_own_files(folder), reverse=True)
    kept, size = 1, next((size for _, name, size in files if name == newest), 0)
    for _, name, bytes_ in files:
        if name == newest:
            continue
        if kept < MAX_FILES and size + bytes_ <= MAX_BYTES:
            kept, size = kept + 1, size + bytes_
            continue
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)


def _own_files(folder: int) -> Iterator[tuple[int, str, int]]:
    """Time of the last change in nanoseconds, name and bytes of each dump."""
    for name in os.listdir(folder):
        if not _OWN_FILE.fullmatch(name):
            continue
        with suppress(FileNotFoundError):
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            yield found.st_mtime_ns, name, found.st_size
