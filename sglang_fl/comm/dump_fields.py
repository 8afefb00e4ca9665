"""What each field of a dump may hold, as data: checked once, where a dump is read, so that no reader has to."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Set
from typing import Any

MOST = 2**63 - 1
LATEST_S = 253402300800  # the year 10000, seconds since 1970; a clock can show what comes before

Kind = Callable[[Any], str]
"""Where a value is none of its kind and what it is, as ``.calls[3].place is 5; allowed is a text``; "" if it is one."""


def _kind(allowed: str, holds: Callable[[Any], bool]) -> Kind:
    return lambda value: "" if holds(value) else f" is {reprlib.repr(value)}; allowed is {allowed}"


def _whole(least: int, most: int) -> Kind:
    # No bool, which is an int to isinstance.
    return _kind(f"a whole number from {least} to {most}", lambda value: type(value) is int and least <= value <= most)


def _or_none(kind: Kind) -> Kind:
    return lambda value: "" if value is None else kind(value)


def _list_of(kind: Kind, least: int = 0) -> Kind:
    def problem(value: Any) -> str:
        if not isinstance(value, list) or len(value) < least:
            return f" is {reprlib.repr(value)}; allowed is a list of {least} or more"
        found = ((place, kind(item)) for place, item in enumerate(value))
        return next((f"[{place}]{text}" for place, text in found if text), "")

    return problem


def _object_of(fields: Mapping[str, Kind], may_lack: Set[str] = frozenset()) -> Kind:
    def problem(value: Any) -> str:
        if not isinstance(value, dict):
            return f" is {reprlib.repr(value)}; allowed is an object with {', '.join(fields)}"
        lacking, unknown = sorted(fields.keys() - value - may_lack), sorted(value.keys() - fields)
        if lacking or unknown:
            return (
                f" lacks {', '.join(lacking)}" if lacking else f" has {unknown[0]!r}, which no dump of this format has"
            )
        found = ((name, kind(value[name])) for name, kind in fields.items() if name in value)
        return next((f".{name}{text}" for name, text in found if text), "")

    return problem


def _is_name(value: Any) -> bool:
    # Half a character, which JSON can hold, is none; a place in the code may have it, where a path is no UTF-8.
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


_NAME = _kind("a text of whole characters", _is_name)
_TEXT = _kind("a text", lambda value: isinstance(value, str))
_FLAG = _kind("true or false", lambda value: isinstance(value, bool))
_TIME = _kind(
    f"seconds since 1970, from 0 to below {LATEST_S}",
    lambda value: type(value) in (int, float) and 0 <= value < LATEST_S,
)
_COUNT, _NUMBER, _RANK = _whole(0, MOST), _whole(1, MOST), _whole(0, 2**31 - 1)

CALL: Mapping[str, Kind] = {
    "number": _NUMBER,
    "operation": _NAME,
    "dtype": _NAME,
    "count": _COUNT,
    "peer": _or_none(_RANK),
    "stream": _whole(0, 2**64 - 1),
    "captured": _FLAG,
    "place": _TEXT,
    "time_in_s": _TIME,
    "time_out_s": _or_none(_TIME),
    "error": _TEXT,
}
RECORD: Mapping[str, Kind] = {
    "name": _NAME,
    "ranks": _list_of(_RANK, least=1),
    "key": _or_none(_NAME),
    "device": _NAME,
    "entered": _COUNT,
    "under_way": _or_none(_object_of(CALL)),
    "done": _or_none(_COUNT),
    "left_out": _COUNT,
    "calls": _list_of(_object_of(CALL)),
}
# What dumps had before recorders were named alike on all ranks does not have it.
MAY_LACK = frozenset({"key"})
THREAD: Mapping[str, Kind] = {"name": _TEXT, "stack": _list_of(_TEXT)}
DUMP: Mapping[str, Kind] = {
    "format": _NUMBER,
    "version": _NAME,
    "host": _NAME,
    "pid": _NUMBER,
    "rank": _RANK,
    "meeting": _TEXT,
    "time_s": _TIME,
    "reason": _TEXT,
    "threads": _list_of(_object_of(THREAD)),
    "recorders": _list_of(_object_of(RECORD, MAY_LACK)),
}


def damage(document: Any) -> str:
    """The first of a dump's fields that does not hold what it may, with its place in the dump; "" if all do."""
    return (_object_of(DUMP)(document) or _broken_order(document["recorders"])).strip().lstrip(".")


def _broken_order(records: list[Mapping[str, Any]]) -> str:
    for place, record in enumerate(records):
        numbers = [call["number"] for call in record["calls"]]
        last = record["entered"]
        if numbers != list(range(last - len(numbers) + 1, last + 1)):
            shown = reprlib.repr(numbers)
            return f".recorders[{place}].calls have the numbers {shown}; allowed is each up to entered, {last}"
        under_way = record["under_way"]
        if under_way is not None and under_way["number"] > last:
            number = under_way["number"]
            return f".recorders[{place}].under_way.number is {number}; allowed is a number up to entered, {last}"
    return ""
