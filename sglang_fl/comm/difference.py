"""Finds the first call in which the ranks' recorded calls differ, and says who did what instead."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from sglang_fl.comm.dump_files import Dump, Key, Record, told_apart
from sglang_fl.comm.recorder import RecordedCall

# Between two ranks' dumps a call may begin; what a rank has waited for less long than this is no evidence.
LATE_S = 1.0
# How far apart two swapped calls are looked for, and how many calls in a row may have been skipped.
LOOK_AHEAD = 16
_TRANSFERS = ("send", "recv")


class Kind(str, Enum):
    """What the named ranks did in the first call in which the ranks differ."""

    MISSING = "missing"
    SKIPPED = "skipped"
    SWAPPED = "swapped"
    OPERATION = "another operation"
    ROOT = "another root"
    DTYPE = "another dtype"
    SHAPE = "another shape"
    NO_RECORD = "no record"


@dataclass(frozen=True)
class Difference:
    """The first difference of one recorder.

    Attributes:
        group: the recorder's name, and which one it is where others have the same name and ranks.
        ranks: its ranks.
        number: of the first call in which they differ.
        kind: what ``who`` did.
        who: the ranks that stand out; all that differ where none is in the majority.
        words: one sentence.
        calls: what each rank with a dump called as that number; None for a rank that did not.
        time_s: when the first rank entered it.
    """

    group: str
    ranks: tuple[int, ...]
    number: int
    kind: Kind
    who: tuple[int, ...]
    words: str
    calls: Mapping[int, RecordedCall | None]
    time_s: float


@dataclass(frozen=True)
class Comparison:
    """All differences, that of the earliest call first, and what a reader should know beside them."""

    differences: tuple[Difference, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Views:
    """One recorder on all ranks that have a dump with it.

    Attributes:
        key: the recorder's.
        words: what to call this recorder and the others.
        dumps: each rank's, the one that its record is from.
        records: by rank.
        gave_up: the ranks whose latest dump does not have it any more.
        notes: what a reader should know beside the differences.
    """

    key: Key
    words: Mapping[Key, str]
    dumps: Mapping[int, Dump]
    records: Mapping[int, Record]
    gave_up: frozenset[int]
    notes: list[str] = field(default_factory=list)

    @property
    def group(self) -> str:
        return self.words[self.key]

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.key.ranks

    def call(self, rank: int, number: int) -> RecordedCall | None:
        return self.records[rank].calls.get(number)

    def at(self, number: int) -> dict[int, RecordedCall | None]:
        return {rank: self.call(rank, number) for rank in self.records}


def compare(dumps: Sequence[Dump]) -> Comparison:
    """Compare the dumps of a run's ranks, at most one a rank."""
    by_key: defaultdict[Key, dict[int, Record]] = defaultdict(dict)
    for dump in dumps:
        for key, record in dump.records.items():
            by_key[key][dump.rank] = record
    sources = [source for dump in dumps for source in (dump, *dump.taken.values())]
    words = told_apart(key for source in sources for key in source.records)
    differences: list[Difference] = []
    notes: list[str] = []
    for key, records in by_key.items():
        from_dumps = {dump.rank: dump.taken.get(key, dump) for dump in dumps}
        gave_up = frozenset(dump.rank for dump in dumps if key in dump.taken)
        views = _Views(key, words, from_dumps, dict(sorted(records.items())), gave_up, notes)
        difference = _first_difference(views) or _absent(views)
        if difference is not None:
            differences.append(difference)
    expected = {rank for key in by_key for rank in key.ranks}
    silent = sorted(expected - {dump.rank for dump in dumps})
    if silent:
        notes.append(f"{in_words(silent)} left no dump: gone, or its dump is not among these")
    return Comparison(tuple(sorted(differences, key=lambda each: each.time_s)), tuple(notes))


def in_words(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0 and 2``, ``ranks 0, 1 and 2``."""
    names = [str(rank) for rank in ranks]
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def _first_difference(views: _Views) -> Difference | None:
    if len(views.records) < 2:
        return None
    first = max(record.first for record in views.records.values())
    last = max(record.entered for record in views.records.values())
    for number in range(first, last + 1):
        calls = views.at(number)
        absent = [rank for rank, call in calls.items() if call is None]
        if absent:
            return _missing(views, number, first, absent)
        if len({_common(call) for call in calls.values()}) > 1:
            return _otherwise(views, number, first)
    return None


def _common(call: RecordedCall | None) -> tuple[object, ...]:
    """What all ranks of a call must share; a send and its receive are one transfer."""
    assert call is not None
    if call.operation in _TRANSFERS:
        return ("transfer", call.dtype, call.count, None)
    return (call.operation, call.dtype, call.count, call.peer)


def _site(call: RecordedCall) -> str:
    """The caller's place as far as it is equal on machines that keep the code in different folders."""
    return call.place.rpartition("/")[2]


# --- a rank that is not in a call ---


def _missing(views: _Views, number: int, first: int, absent: list[int]) -> Difference | None:
    calls = views.at(number)
    present = {rank: call for rank, call in calls.items() if call is not None}
    entered_s = min(call.time_in_s for call in present.values())
    late = [rank for rank in absent if views.records[rank].time_s - entered_s < LATE_S]
    lost = [rank for rank in absent if rank not in late]
    if not lost:
        views.notes.append(
            f"{views.group}: call {number} is not compared, {in_words(late)} may have been about to enter it: the "
            f"dumps were written less than {LATE_S:g} s after the first rank did, or before"
        )
        return None
    skipped = _skipped_by_place(views, lost, min(present), first, number)
    if skipped is not None:
        return skipped
    words = f"{in_words(lost)} did not enter it; {'; '.join(_whereabouts(views, rank) for rank in lost)}"
    return _difference(views, number, Kind.MISSING, tuple(lost), words)


def _skipped_by_place(
    views: _Views, suspects: Sequence[int], reference: int, first: int, end: int
) -> Difference | None:
    """A call that was left out although the next ones are alike: from there on the places are the next one's."""
    skipped = {rank: _shifted_from(views, rank, reference, first, end) for rank in suspects}
    found = min((number for number in skipped.values() if number is not None), default=None)
    if found is None:
        return None
    who = tuple(rank for rank in suspects if skipped[rank] == found)
    return _difference(views, found, Kind.SKIPPED, who, _skipped_words(views, who, reference, found, 1))


def _shifted_from(views: _Views, rank: int, reference: int, first: int, end: int) -> int | None:
    for number in range(first, end):
        own, other = views.call(rank, number), views.call(reference, number)
        if own is None or other is None or not own.place or not other.place:
            return None
        if _site(own) == _site(other):
            continue
        # A difference from the first call on is two ways through the code, which are allowed.
        is_shifted = number > first and all(
            _site_at(views, rank, later) == _site_at(views, reference, later + 1) for later in range(number, end)
        )
        return number if is_shifted else None
    return None


def _site_at(views: _Views, rank: int, number: int) -> str | None:
    call = views.call(rank, number)
    return None if call is None else _site(call)


def _whereabouts(views: _Views, rank: int) -> str:
    """Where the process of a rank that is missing from a call was instead."""
    last = views.call(rank, views.records[rank].entered)
    elsewhere = _elsewhere(views, rank, 0.0 if last is None else last.time_in_s)
    if elsewhere is not None:
        key, call = elsewhere
        end = ", which failed" if call.error else ""
        return f"rank {rank} was in call {call.number} of {views.words[key]}, {call.what()}{_at(call)}{end}"
    if last is None:
        return f"rank {rank} has called nothing in this group"
    return f"rank {rank}'s last was call {last.number}, {last.what()}{_at(last)}"


def _elsewhere(views: _Views, rank: int, since_s: float) -> tuple[Key, RecordedCall] | None:
    """A call of another group that had not returned, or else the latest that failed and was entered after ``since_s``.

    A failed call is not under way any more, but where others wait for its process it has mostly gone no further.
    """
    others = [record for key, record in views.dumps[rank].records.items() if key != views.key]
    stuck = [
        (record.key, call)
        for record in others
        if record.stuck is not None and (call := record.calls.get(record.stuck)) is not None
    ]
    here = [each for each in stuck if not each[1].error]
    failed = [each for each in stuck if each[1].error and each[1].time_in_s >= since_s]
    return here[0] if here else max(failed, key=lambda each: each[1].time_in_s, default=None)


def _absent(views: _Views) -> Difference | None:
    """A rank whose dump does not know the group or the call, or which left none, while others are, or failed, in it."""
    waiting = {rank: stuck for rank, record in views.records.items() if (stuck := record.stuck) is not None}
    if not waiting:
        return None
    number = min(waiting.values())
    old = _too_old(views, number)
    lacking = [rank for rank in views.ranks if rank not in views.records or rank in old]
    if not lacking:
        return None
    gave_up = [rank for rank in old if rank in views.gave_up]
    without_dump = [rank for rank in lacking if rank not in views.dumps or (rank in old and rank not in gave_up)]
    if without_dump:
        words = f"{in_words(without_dump)} left no dump: gone, or stopped"
        if old:
            words += f"; what {in_words(old)} wrote was written before the others entered the call"
        return _difference(views, number, Kind.NO_RECORD, tuple(without_dump), words)
    words = f"{in_words(lacking)} has no record of this {'call' if gave_up else 'group'}"
    if gave_up:
        words += (
            f"; what {in_words(gave_up)} wrote of the group was written before the others entered the call, and later "
            "the group was given up"
        )
    return _difference(views, number, Kind.NO_RECORD, tuple(lacking), words)


def _too_old(views: _Views, number: int) -> list[int]:
    """The ranks whose dump says nothing of a call that others are stuck in: it was written before they entered it."""
    calls = {rank: call for rank, call in views.at(number).items() if call is not None}
    entered_s = min(call.time_in_s for call in calls.values())
    # One that had only just begun as the dump was written is none to be stuck in.
    if not any(call.error or views.records[rank].time_s - call.time_in_s >= LATE_S for rank, call in calls.items()):
        return []
    return [rank for rank in views.records if rank not in calls and entered_s - views.records[rank].time_s > LATE_S]


# --- ranks that made different calls ---


def _otherwise(views: _Views, number: int, first: int) -> Difference:
    reference, odd = _sides(views, number, first)
    one = odd[0]
    who = tuple(rank for rank in odd if _alike(views, rank, number, one, number))
    skipped = _skipped_by_place(views, who, reference, first, number)
    if skipped is None and len(views.records) == 2:
        skipped = _skipped_by_place(views, (reference,), one, first, number)
    if skipped is not None:
        return skipped
    partner = _swapped_with(views, one, reference, number)
    if partner is not None:
        words = (
            f"{in_words(who)} swapped calls {number} and {partner}: "
            f"{_what(views, one, number)} came before {_what(views, one, partner)}"
        )
        return _difference(views, number, Kind.SWAPPED, who, words)
    own, other = views.call(one, number), views.call(reference, number)
    assert own is not None and other is not None
    other_kind = _of_another_kind(views, number, who, own, other)
    if own.operation == other.operation and _go_on_alike(views, one, reference, number, _site(own) == _site(other)):
        return other_kind
    return (
        _skipped_by_calls(views, number, who, reference)
        or _by_what_came_next_before(views, number, first, who, reference)
        or other_kind
    )


def _skipped_by_calls(views: _Views, number: int, who: tuple[int, ...], reference: int) -> Difference | None:
    one = who[0]
    for distance in range(1, LOOK_AHEAD):
        if _runs_ahead(views, one, reference, number, distance):
            words = _skipped_words(views, who, reference, number, distance)
            return _difference(views, number, Kind.SKIPPED, who, words)
        if len(views.records) == 2 and _runs_ahead(views, reference, one, number, distance):
            words = _skipped_words(views, (reference,), one, number, distance)
            return _difference(views, number, Kind.SKIPPED, (reference,), words)
    return None


def _sides(views: _Views, number: int, first: int) -> tuple[int, list[int]]:
    """A rank of the majority, and those that differ from it; of two ranks, what came next before decides."""
    groups: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for rank, call in views.at(number).items():
        groups[_common(call)].append(rank)
    expected = _expected(views, min(views.records), number, first)
    as_before = [ranks for common, ranks in groups.items() if expected is not None and common == _common(expected)]
    largest = max(len(ranks) for ranks in groups.values())
    majority = [ranks for ranks in groups.values() if len(ranks) == largest]
    side = as_before[0] if len(majority) > 1 and as_before else majority[0]
    return side[0], [rank for rank in views.records if rank not in side]


def _expected(views: _Views, rank: int, number: int, first: int) -> RecordedCall | None:
    """What followed the last time after a call like the one before ``number``, up to which all ranks are alike."""
    before = views.call(rank, number - 1)
    if before is None:
        return None
    for earlier in range(number - 2, first - 1, -1):
        call = views.call(rank, earlier)
        if call is not None and _is_like(call, before):
            return views.call(rank, earlier + 1)
    return None


def _is_like(one: RecordedCall, other: RecordedCall) -> bool:
    return _common(one) == _common(other) and _site(one) == _site(other)


def _swapped_with(views: _Views, rank: int, reference: int, number: int) -> int | None:
    for partner in range(number + 1, number + LOOK_AHEAD):
        crosses = _alike(views, rank, number, reference, partner) and _alike(views, rank, partner, reference, number)
        if crosses and all(_alike(views, rank, k, reference, k) for k in range(number + 1, partner)):
            return partner
    return None


def _alike(views: _Views, rank: int, number: int, other: int, other_number: int) -> bool:
    one, two = views.call(rank, number), views.call(other, other_number)
    return one is not None and two is not None and _common(one) == _common(two)


def _go_on_alike(views: _Views, rank: int, reference: int, number: int, if_none: bool) -> bool:
    """Whether after ``number`` both made the same calls; ``if_none`` where one of them made none."""
    last = min(views.records[rank].entered, views.records[reference].entered)
    later = range(number + 1, last + 1)
    return all(_alike(views, rank, k, reference, k) for k in later) if later else if_none


def _runs_ahead(views: _Views, rank: int, reference: int, number: int, distance: int) -> bool:
    """Whether ``rank``'s calls from ``number`` on are those that ``reference`` made ``distance`` later."""
    last = min(views.records[rank].entered, views.records[reference].entered - distance)
    return last >= number and all(
        _alike(views, rank, k, reference, k + distance) for k in range(number, min(last, number + LOOK_AHEAD) + 1)
    )


def _by_what_came_next_before(
    views: _Views, number: int, first: int, who: tuple[int, ...], reference: int
) -> Difference | None:
    """All are stuck in this call: what followed it earlier tells that ``who`` are already in the next one."""
    own, other = views.call(who[0], number), views.call(reference, number)
    assert own is not None and other is not None
    for earlier in range(number - 1, first - 1, -1):
        call, following = views.call(reference, earlier), views.call(reference, earlier + 1)
        if call is None or following is None or not _is_like(call, other):
            continue
        if not _is_like(following, own):
            return None
        words = (
            f"{in_words(who)} skipped {other.what()}, or swapped it with the call that follows it: it is already in "
            f"{own.what()}{_at(own)}, which came after it as call {earlier + 1}"
        )
        return _difference(views, number, Kind.SKIPPED, who, words)
    return None


def _of_another_kind(
    views: _Views, number: int, who: tuple[int, ...], own: RecordedCall, other: RecordedCall
) -> Difference:
    tests = (
        (Kind.OPERATION, _common(own)[0] != _common(other)[0]),
        (Kind.ROOT, own.operation not in _TRANSFERS and own.peer != other.peer),
        (Kind.DTYPE, own.dtype != other.dtype),
        (Kind.SHAPE, own.count != other.count),
    )
    kinds = [kind for kind, differs in tests if differs]
    verb = "made" if kinds[0] is Kind.OPERATION else "sent"
    if len(views.records) == 2:
        one, two = sorted(views.records)
        what = f"{_what(views, one, number)} on rank {one}, {_what(views, two, number)} on rank {two}"
        return _difference(views, number, kinds[0], (one, two), f"the ranks {verb} {_and(kinds, 'different')}: {what}")
    words = f"{in_words(who)} {verb} {_and(kinds, 'another')}: {own.what()}, the others {other.what()}"
    return _difference(views, number, kinds[0], who, words)


def _and(kinds: Sequence[Kind], adjective: str) -> str:
    nouns = [kind.value.removeprefix("another ") for kind in kinds]
    if adjective == "different":
        nouns = [f"{noun}s" for noun in nouns]
    return f"{adjective} {' and '.join(nouns)}"


# --- words ---


def _skipped_words(views: _Views, who: Iterable[int], reference: int, number: int, distance: int) -> str:
    skipped = [_what(views, reference, k) for k in range(number, number + distance)]
    calls = f"call {number}" if distance == 1 else f"calls {number} to {number + distance - 1}"
    return f"{in_words(who)} skipped {calls}: {', '.join(skipped)}"


def _what(views: _Views, rank: int, number: int) -> str:
    call = views.call(rank, number)
    return "a call that is no longer kept" if call is None else f"{call.what()}{_at(call)}"


def _at(call: RecordedCall) -> str:
    return f" at {call.place}" if call.place else ""


def _difference(views: _Views, number: int, kind: Kind, who: tuple[int, ...], words: str) -> Difference:
    calls = views.at(number)
    times = [call.time_in_s for call in calls.values() if call is not None]
    return Difference(views.group, views.ranks, number, kind, who, words, calls, min(times, default=0.0))
