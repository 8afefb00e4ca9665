"""Reads the dumps of several processes, and chooses those that belong together."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang_fl.comm.dump_fields import damage
from sglang_fl.comm.dumps import FORMAT, PATTERN, names_run
from sglang_fl.comm.errors import CommError
from sglang_fl.comm.recorder import RecordedCall, from_row

TOGETHER_S = 600.0


class UnreadableDumpError(CommError):
    """A file is no dump of calls that this version reads, or there is none."""


@dataclass(frozen=True)
class Record:
    """One recorder, as a dump has it.

    Attributes:
        name, ranks, device: the recorder's.
        entered: calls so far.
        calls: by number, what was kept.
        under_way: number of the oldest call that had not returned; None if all had.
        done: number of the last call whose device event was seen done; None where that is not known.
        time_s: when it was written, seconds since 1970.
    """

    name: str
    ranks: tuple[int, ...]
    device: str
    entered: int
    calls: Mapping[int, RecordedCall]
    under_way: int | None
    done: int | None
    time_s: float

    @property
    def first(self) -> int:
        """Number of the oldest call that was kept, or that will be the next."""
        return min(self.calls, default=self.entered + 1)

    @property
    def stuck(self) -> int | None:
        """Number of the call that had not returned, or of the last one if it failed."""
        last = self.calls.get(self.entered)
        if self.under_way is None and last is not None and last.error:
            return last.number
        return self.under_way


@dataclass(frozen=True)
class Dump:
    """One process at one moment; ``meeting`` is where its ranks met, and in which run: equal for all ranks of that."""

    path: Path
    host: str
    pid: int
    rank: int
    time_s: float
    reason: str
    meeting: str
    records: Mapping[tuple[str, tuple[int, ...]], Record]

    @property
    def begins_s(self) -> float | None:
        """When the first call of its run was entered; None where that is no longer kept, or there was none."""
        first = [record.calls[1].time_in_s for record in self.records.values() if 1 in record.calls]
        return min(first) if len(first) == len(self.records) and first else None

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


def read_dump(path: Path) -> Dump:
    """The dump in a file that :func:`sglang_fl.comm.dumps.write_dump` wrote.

    Raises:
        UnreadableDumpError: it cannot be read, is none, or another version's.
    """
    try:
        document = json.loads(path.read_bytes(), parse_float=_finite, parse_constant=_finite)
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no text, no JSON, or no number
        raise UnreadableDumpError(f"{path} cannot be read as a dump of calls: {error}") from error
    found = document.get("format") if isinstance(document, dict) else None
    if found != FORMAT:
        raise UnreadableDumpError(
            f"{path} is no dump of calls that this version reads: its format is {found!r}, this reads {FORMAT}. "
            "Compare dumps with the version of sglang_fl that wrote them."
        )
    problem = damage(document)
    if problem:
        raise UnreadableDumpError(f"{path} is a damaged dump of calls: {problem}")
    return _dump(path, document)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is no finite number")
    return number


def _dump(path: Path, document: Mapping[str, Any]) -> Dump:
    records = [_record(row, document["time_s"]) for row in document["recorders"]]
    return Dump(
        path,
        document["host"],
        document["pid"],
        document["rank"],
        document["time_s"],
        document["reason"],
        document["meeting"],
        {(record.name, record.ranks): record for record in records},
    )


def _record(row: Mapping[str, Any], time_s: float) -> Record:
    calls = [from_row(call) for call in row["calls"]]
    under_way = row["under_way"]
    return Record(
        row["name"],
        tuple(row["ranks"]),
        row["device"],
        row["entered"],
        {call.number: call for call in calls},
        None if under_way is None else under_way["number"],
        row["done"],
        time_s,
    )


@dataclass(frozen=True)
class Chosen:
    """The dumps to compare, one a rank and in the order of ranks, and in words what was left out."""

    dumps: tuple[Dump, ...]
    left_out: tuple[str, ...]


def choose_dumps(paths: Sequence[Path]) -> Chosen:
    """Read files, and of folders all their dumps; of one run the latest dump of each rank.

    A folder may hold dumps of other runs and of other servers: the run with the latest dump counts, and of it what was
    written within ``TOGETHER_S`` before that. A group that a process had given up by its latest dump, and that another
    rank's still has, is taken from an earlier dump of that process.

    Raises:
        UnreadableDumpError: a file is no dump, a path does not exist, or there is no dump at all.
    """
    dumps = [read_dump(file) for path in paths for file in _files(path)]
    newest = max(dumps, key=lambda dump: (bool(dump.records), dump.time_s))
    chosen: dict[int, Dump] = {}
    earlier: list[Dump] = []
    left_out = []
    for dump in sorted(dumps, key=lambda dump: -dump.time_s):
        reason = _why_not(dump, newest)
        if reason:
            left_out.append(f"{dump.path.name}: {reason}")
        elif dump.rank in chosen:
            earlier.append(dump)
        else:
            chosen[dump.rank] = dump
    wanted = {key for dump in chosen.values() for key in dump.records}
    for dump in earlier:
        latest = chosen[dump.rank]
        left_out.append(f"{dump.path.name}: there is a later one of rank {dump.rank}, {latest.path.name}")
        lacking = [key for key in dump.records if key in wanted and key not in latest.records]
        if lacking and (dump.host, dump.pid) == (latest.host, latest.pid):
            found = {key: dump.records[key] for key in lacking}
            chosen[dump.rank] = replace(latest, records={**latest.records, **found})
            groups = ", ".join(sorted({group for group, _ in lacking}))
            left_out[-1] += f"; from the earlier one is taken what that no longer has, the calls of {groups}"
    return Chosen(tuple(chosen[rank] for rank in sorted(chosen)), tuple(left_out))


def _why_not(dump: Dump, newest: Dump) -> str:
    if dump.meeting != newest.meeting:
        return f"of another run: its ranks met at {dump.meeting!r}, those of the latest dump at {newest.meeting!r}"
    begins_s = newest.begins_s
    if not names_run(newest.meeting) and dump.records and begins_s is not None and dump.time_s < begins_s:
        return f"of an earlier run: it was written {begins_s - dump.time_s:.1f} s before the first call of the latest"
    if newest.time_s - dump.time_s > TOGETHER_S:
        return f"{newest.time_s - dump.time_s:.0f} s older than the latest"
    return ""


def _files(path: Path) -> Iterable[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(path.glob(PATTERN))
    if not files:
        raise UnreadableDumpError(f"{path} holds no dump of calls ({PATTERN})")
    return files
