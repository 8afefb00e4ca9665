"""What the monitor found of a call that cannot complete, in words, for the error, the log, the dump and the peers."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path

from sglang_fl.comm.errors import CollectiveTimeout, CommError, PeerLost


class Absence(str, Enum):
    """Why a rank is not in a call."""

    KILLED = "was killed or crashed"
    ENDED = "ended by itself; its log may hold an error"
    FOLLOWED = "ended because it had found another rank missing; its log says which"
    GONE = "has ended"
    AFTER = "has ended, maybe because it had found another rank missing; its log says"
    SILENT = "has given no sign for a long time: it, its machine or the network is gone"
    STOPPED = "is stopped (SIGSTOP, a debugger)"
    ELSEWHERE = "is alive and has not entered the call"
    OTHERWISE = "is alive and has made another call in its place"
    GAVE_UP = "is alive and has given the group up"
    REFUSES = "is alive and refuses every further call of the group, since one of it failed there"
    LEFT = "is alive and no longer in the call, which has returned or failed there"
    INTERRUPTED = "has left the call, which was under way"
    UNKNOWN = "has told nothing of its calls"


_LOST = frozenset({Absence.KILLED, Absence.ENDED, Absence.FOLLOWED, Absence.GONE, Absence.SILENT, Absence.INTERRUPTED})
_AT_FAULT = _LOST | {Absence.STOPPED, Absence.AFTER, Absence.REFUSES}
_ASTRAY = frozenset({Absence.ELSEWHERE, Absence.OTHERWISE, Absence.GAVE_UP, Absence.LEFT})


@dataclass(frozen=True)
class Missing:
    """One rank that is missing from a call: its global rank, why, and what is known of it besides."""

    rank: int
    absence: Absence
    process: str = ""
    last: str = ""

    def __str__(self) -> str:
        process = f" ({self.process})" if self.process else ""
        return f"global rank {self.rank}{process} {self.absence.value}{f': {self.last}' if self.last else ''}"


@dataclass(frozen=True)
class Stuck:
    """A call that does not complete.

    Attributes:
        recorder: name of the recorder: group and backend, for a transfer also its direction.
        ranks: global ranks that take part.
        call: number and what it is: ``number 17, all_reduce float32[1024]``.
        place: the code that called; empty where unknown.
        limit_s: of the group's operations, seconds.
        waited_s: how long it has been waited for, seconds.
        is_certain: False where it may be done, and only what its stream has to do behind it is not.
        others: calls of which the same may be said, on other streams.
    """

    recorder: str
    ranks: tuple[int, ...]
    call: str
    place: str
    limit_s: float
    waited_s: float
    is_certain: bool = True
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """Why a call cannot complete.

    Attributes:
        rank: the global rank that found it.
        stuck: the call.
        missing: who is not in it, each with what became of it; where nobody is known to be missing, of whom it is not
            known. Empty where all are in it and it does not move all the same.
        told_by: the global rank that told this one of it; None where this rank found it itself.
        is_idle: the rank itself has no call of the recorder under way; ``stuck`` is that of ``told_by``.
        pid: the process that found it.
    """

    rank: int
    stuck: Stuck
    missing: tuple[Missing, ...] = ()
    told_by: int | None = None
    is_idle: bool = False
    pid: int = field(default_factory=os.getpid)

    def refusal(self, process: str) -> Verdict:
        """What the peers are told of the group's other calls: who is at fault, or else that ``rank`` makes none."""
        at_fault = tuple(missing for missing in self.missing if missing.absence in _AT_FAULT)
        own = Missing(self.rank, Absence.REFUSES, process, self.text())
        return replace(self, missing=at_fault or (own,), told_by=None)

    @property
    def kind(self) -> type[CommError]:
        """PeerLost where a process is gone, or has left the call, that may be the reason, else CollectiveTimeout."""
        is_lost = any(missing.absence in _LOST for missing in self.missing)
        return PeerLost if is_lost else CollectiveTimeout

    def text(self, shape: Sequence[int] = (), dump: Path | None = None) -> str:
        """The error's words; ``shape`` is the caller's own tensor's."""
        stuck = self.stuck
        shaped = f" of shape {list(shape)}" if shape else ""
        place = f" called at {stuck.place}" if stuck.place else ""
        found = "" if self.told_by is None else f" (found by global rank {self.told_by})"
        dumped = f" The calls of this process are in {dump}." if dump else ""
        group = f"group {stuck.recorder}, global rank {self.rank} of {list(stuck.ranks)}: "
        if self.is_idle:
            group += "no call of it was under way here, but it cannot go on; on the rank that found it: "
        return (
            f"{group}call {stuck.call}{shaped}{place} {self._outcome()}: {self._who()}{found}.{dumped} {self._advice()}"
        )

    def _outcome(self) -> str:
        stuck = self.stuck
        if self.kind is PeerLost or (self.told_by is not None and stuck.waited_s < stuck.limit_s):
            if stuck.is_certain:
                return "cannot complete"
            return f"is not known to be done{self._nor('is')}, and a further call of the group cannot complete"
        if stuck.is_certain:
            return f"did not complete within {stuck.limit_s:g} s"
        return f"was not seen to complete within {stuck.limit_s:g} s{self._nor('was')}"

    def _nor(self, verb: str) -> str:
        return "".join(f", nor {verb} {other}" for other in self.stuck.others)

    def _who(self) -> str:
        if self.missing:
            return "; ".join(str(missing) for missing in self.missing)
        itself = "it does not" if self.stuck.is_certain else "it, or what is behind it on its stream, does not"
        return f"all ranks have entered it, and {itself} move: the library, a device or the network does not work"

    def _advice(self) -> str:
        ranks = sorted({missing.rank for missing in self.missing if missing.absence not in _ASTRAY})
        if self.missing and not ranks:
            return (
                "The ranks do not make the same calls: compare the dumps of all ranks with "
                "python -m sglang_fl comm-diff. If the call may take that long, raise SGLANG_FL_COMM_TIMEOUT_S."
            )
        if ranks:
            return f"Look at the log of global rank(s) {ranks} first; this group cannot be used any more."
        return "This group cannot be used any more."


def to_tell(verdict: Verdict) -> str:
    """The verdict as the peers read it."""
    return json.dumps(asdict(verdict))


def as_told(text: str) -> Verdict:
    """What :func:`to_tell` wrote.

    Raises:
        ValueError, TypeError, KeyError: it is something else, such as another version's.
    """
    row = json.loads(text)
    tuples = {name: tuple(row["stuck"][name]) for name in ("ranks", "others")}
    stuck = Stuck(**{**row["stuck"], **tuples})
    missing = tuple(Missing(**{**entry, "absence": Absence(entry["absence"])}) for entry in row["missing"])
    return Verdict(**{**row, "stuck": stuck, "missing": missing})
