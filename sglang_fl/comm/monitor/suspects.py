"""Which call is named where a device does not go on.

An event behind a call tells of everything before it on its stream: of other recorders' calls, too, and, unless it was
recorded right behind the call, of what the rank does there by itself. So a call is not at fault because its recorder's
event is not done.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_fl.comm.monitor.watched import Pending, Watched
from sglang_fl.comm.recorder import RecordedCall
from sglang_fl.comm.threads import aside

_LOOK_LIMIT_S = 0.5
_EVENT_S = 0.05  # for what is done to be seen done


@dataclass(frozen=True)
class Suspect:
    """A recorder on a device, what of it is not done, and calls on other streams that may be at fault as well."""

    watched: Watched
    pending: Pending
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Unfinished:
    watched: Watched
    call: RecordedCall

    @property
    def stream(self) -> Any:
        """Of which device, and which."""
        return self.watched.recorder.device, self.call.stream


def suspects(due: Sequence[Suspect], watched: Iterable[Watched], lost: frozenset[int]) -> list[Suspect]:
    """Whose call to name for those of ``due``, the likeliest first; empty where everything of them is done by now.

    Of calls that are certainly not done the first. Else, on each stream that does not go on, the last call before the
    event that is not done: whichever is at fault, that one is behind it.

    Args:
        due: what has not been done for too long.
        watched: all recorders of the process. Those on a device are marked and looked at; takes half a second at most.
        lost: ranks that are gone: only what one of them takes part in is named. Empty where none is known to be.
    """
    certain = [suspect for suspect in due if suspect.pending.is_certain]
    if certain:
        return sorted(certain, key=_entered_s)
    concerned = [
        entry for entry in watched if not entry.is_host and (not lost or not lost.isdisjoint(entry.recorder.ranks))
    ]
    _look_at(concerned)
    due = [suspect for suspect in due if suspect.watched.done < suspect.pending.last]
    found = [_Unfinished(entry, call) for entry in concerned for call in entry.unfinished()]
    # On each stream the first event that is not done counts.
    due.sort(key=lambda suspect: -suspect.pending.marked_s)
    stopped = {_stream_of(suspect): suspect.pending.marked_s for suspect in due}
    behind = [one for one in found if one.call.entered_s <= stopped.get(one.stream, float("inf"))]
    behind.sort(key=lambda one: (one.call.entered_s, one.call.number), reverse=True)
    last: dict[Any, _Unfinished] = {}
    for one in behind:
        last.setdefault(one.stream, one)
    heads = sorted(last.values(), key=lambda one: (one.stream not in stopped, one.call.entered_s))
    rest = [one for one in behind if one.stream in stopped and one not in heads]
    named = [one for one in heads if one.stream in stopped] + rest
    # Where the calls are no longer kept, there is what was due.
    return [_suspect(one, due, heads) for one in _one_each(named)] or list(due)


def _look_at(watched: Iterable[Watched]) -> None:
    """In a thread: a stream that takes nothing more holds up whoever marks it."""

    def look() -> None:
        for entry in watched:
            entry.mark_and_look()
        time.sleep(_EVENT_S)
        for entry in watched:
            entry.mark_and_look()

    aside(look, "sglang_fl-look").wait(_LOOK_LIMIT_S)


def _stream_of(suspect: Suspect) -> Any:
    call = suspect.watched.call(suspect.pending.last)
    return suspect.watched.recorder.device, None if call is None else call.stream


def _entered_s(suspect: Suspect) -> float:
    call = suspect.watched.call(suspect.pending.last)
    return 0.0 if call is None else call.entered_s


def _one_each(found: Iterable[_Unfinished]) -> list[_Unfinished]:
    first: dict[Watched, _Unfinished] = {}
    for one in found:
        first.setdefault(one.watched, one)
    return list(first.values())


def _suspect(one: _Unfinished, due: Iterable[Suspect], heads: Iterable[_Unfinished]) -> Suspect:
    others = tuple(
        f"{other.watched.recorder.name} call number {other.call.number}, {other.call.what()}"
        for other in heads
        if other.stream != one.stream
    )
    for suspect in due:
        if suspect.watched is one.watched and suspect.pending.last == one.call.number:
            return Suspect(one.watched, suspect.pending, others)
    waited_s = time.monotonic() - one.call.entered_s
    return Suspect(one.watched, Pending(one.watched.done + 1, one.call.number, waited_s, is_certain=False), others)
