"""Reads the dumps of several processes, and chooses those that belong together."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from sglang_fl.comm.dump_fields import damage
from sglang_fl.comm.dumps import FORMAT, PATTERN, names_run
from sglang_fl.comm.errors import CommError
from sglang_fl.comm.recorder import RecordedCall, from_row

TOGETHER_S = 600.0


class UnreadableDumpError(CommError):
    """A file is no dump of calls that this version reads, or there is none."""


class Key(NamedTuple):
    """Names a recorder, alike on all its ranks and for good.

    Attributes:
        name, ranks: the recorder's.
        made: which one of that name and those ranks, see :func:`sglang_fl.comm.dumps.name_recorder`; empty where a dump
            does not say it, and ``#2`` for its second such one.
    """

    name: str
    ranks: tuple[int, ...]
    made: str = ""

    def which(self) -> str:
        """``made`` in words."""
        creation, _, place = self.made.removeprefix(f"{self.name} {list(self.ranks)} ").partition("#")
        words = [f"made as number {creation}"] if creation not in ("", "0") else []
        if place or not words:
            words.append(f"record {place or 1}")
        return ", ".join(words)


def told_apart(keys: Iterable[Key]) -> dict[Key, str]:
    """What to call each of ``keys``: its name, and which one it is where others have the same name and ranks."""
    distinct = dict.fromkeys(keys)
    alike = Counter((key.name, key.ranks) for key in distinct)
    return {key: key.name if alike[key.name, key.ranks] == 1 else f"{key.name} ({key.which()})" for key in distinct}


@dataclass(frozen=True)
class Record:
    """One recorder, as a dump has it.

    Attributes:
        key, device: the recorder's.
        entered: calls so far.
        calls: by number, what was kept.
        under_way: number of the oldest call that had not returned; None if all had.
        done: number of the last call whose device event was seen done; None where that is not known.
        time_s: when it was written, seconds since 1970.
    """

    key: Key
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
    """One process at one moment.

    Attributes:
        meeting: where its ranks met, and in which run: equal for all ranks of that.
        records: by key; some may be taken from earlier dumps of the process.
        taken: those, each with the dump it is from.
    """

    path: Path
    host: str
    pid: int
    rank: int
    time_s: float
    reason: str
    meeting: str
    records: Mapping[Key, Record]
    taken: Mapping[Key, Dump] = field(default_factory=dict)

    @property
    def process(self) -> tuple[str, int]:
        """Of which host, and its number there."""
        return self.host, self.pid

    @property
    def begins_s(self) -> float | None:
        """When the first call of its run was entered; None where that is no longer kept, or there was none."""
        first = [record.calls[1].time_in_s for record in self.records.values() if 1 in record.calls]
        return min(first) if len(first) == len(self.records) and first else None

    @property
    def failed(self) -> list[Key]:
        """The records whose last call failed, or which it was written for as it could not complete."""
        return [key for key, record in self.records.items() if self._has_failed(record)]

    def _has_failed(self, record: Record) -> bool:
        call = None if record.stuck is None else record.calls.get(record.stuck)
        # The monitor's verdict may fall while the call is under way; its words are then the reason of the dump.
        name, ranks = re.escape(record.key.name), re.escape(str(list(record.key.ranks)))
        verdict = rf"group {name}, global rank \d+ of {ranks}: "
        return call is not None and (bool(call.error) or re.search(verdict, self.reason) is not None)

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
    records: dict[Key, Record] = {}
    for row in document["recorders"]:
        key = _key(row, records)
        records[key] = _record(key, row, document["time_s"])
    return Dump(
        path,
        document["host"],
        document["pid"],
        document["rank"],
        document["time_s"],
        document["reason"],
        document["meeting"],
        records,
    )


def _key(row: Mapping[str, Any], before: Collection[Key]) -> Key:
    first = Key(row["name"], tuple(row["ranks"]), row.get("key") or "")
    further = (first._replace(made=f"{first.made}#{place}") for place in itertools.count(2))
    return next(key for key in itertools.chain([first], further) if key not in before)


def _record(key: Key, row: Mapping[str, Any], time_s: float) -> Record:
    calls = [from_row(call) for call in row["calls"]]
    under_way = row["under_way"]
    return Record(
        key,
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
    written within ``TOGETHER_S`` before that. A group that a process had given up by its latest dump is taken from an
    earlier one of that process where another rank's latest still has it, or an earlier one of any rank shows that it
    failed. One that all have given up after calls that returned is not: a dump from amidst them may look like a hang.
    A process that never had a group, such as a fork of the rank's, counts only where no other of that rank had one.

    Raises:
        UnreadableDumpError: a file is no dump, a path does not exist, or there is no dump at all.
    """
    dumps = [read_dump(file) for path in paths for file in _files(path)]
    newest = max(dumps, key=lambda dump: (bool(dump.records), dump.time_s))
    chosen: dict[int, Dump] = {}
    earlier: list[Dump] = []
    left_out = []
    with_groups = {dump.process for dump in dumps if dump.records}
    for dump in sorted(dumps, key=lambda dump: (dump.process not in with_groups, -dump.time_s)):
        reason = _why_not(dump, newest)
        if reason:
            left_out.append(f"{dump.path.name}: {reason}")
        elif dump.rank in chosen:
            earlier.append(dump)
        else:
            chosen[dump.rank] = dump
    wanted = {key for dump in chosen.values() for key in dump.records}
    wanted.update(key for dump in earlier for key in dump.failed)
    words = told_apart(wanted)
    for dump in earlier:
        latest = chosen[dump.rank]
        if dump.process not in with_groups and latest.process in with_groups:
            left_out.append(f"{dump.path.name}: its process, {dump.pid}, never had a group, as that of {latest} had")
            continue
        left_out.append(f"{dump.path.name}: there is a later one of rank {dump.rank}, {latest.path.name}")
        lacking = [key for key in dump.records if key in wanted and key not in latest.records]
        if lacking and dump.process == latest.process:
            chosen[dump.rank] = replace(
                latest,
                records={**latest.records, **{key: dump.records[key] for key in lacking}},
                taken={**latest.taken, **dict.fromkeys(lacking, dump)},
            )
            groups = ", ".join(sorted({words[key] for key in lacking}))
            left_out[-1] += f"; from the earlier one is taken what that no longer has, the calls of {groups}"
    return Chosen(tuple(chosen[rank] for rank in sorted(chosen)), tuple(left_out))


def _why_not(dump: Dump, newest: Dump) -> str:
    if dump.meeting != newest.meeting:
        return f"of another run: its ranks met at {dump.meeting!r}, those of the latest dump at {newest.meeting!r}"
    begins_s = newest.begins_s
    if not names_run(newest.meeting) and dump.records and begins_s is not None and dump.time_s < begins_s:
        return f"of an earlier run: it was written {begins_s - dump.time_s:.1f} s before the first call of the latest"
    if newest.time_s - dump.time_s > TOGETHER_S:
        failed = ", ".join(sorted({key.name for key in dump.failed}))
        shows = f"; it shows a failed call of {failed}: compare the files of that time" if failed else ""
        return f"{newest.time_s - dump.time_s:.0f} s older than the latest{shows}"
    return ""


def _files(path: Path) -> Iterable[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(path.glob(PATTERN))
    if not files:
        raise UnreadableDumpError(f"{path} holds no dump of calls ({PATTERN})")
    return files
