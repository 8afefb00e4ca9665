"""Who is missing from a call: from the processes of this machine, and from what the ranks last said of themselves."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

from sglang_fl.comm.exchange import PROCESSES
from sglang_fl.comm.monitor.board import Board
from sglang_fl.comm.monitor.verdict import Absence, Missing
from sglang_fl.comm.processes import State

SILENCE_S = 30.0
_PAUSE_S = 5.0
_STORE_HOLDER = 0  # mostly; once the store is gone, nobody else's silence says anything
_READ_LIMIT_S = 1.0
_POLL_S = 0.02
# How long a call goes on after its peer: it may have done its part before it went, and one that followed another
# rank has told so.
_PATIENCE_S = {
    Absence.KILLED: 1.0,
    Absence.ENDED: 3.0,
    Absence.FOLLOWED: 5.0,
    Absence.GONE: 1.0,
    Absence.SILENT: 0.0,
}
# On a device the last mark may lie behind long work of this rank alone, after calls that all ranks have done.
_DEVICE_PATIENCE_S = {**_PATIENCE_S, Absence.ENDED: 60.0, Absence.FOLLOWED: 60.0}
# Where the call has failed already, there is nothing to wait for but a peer's last word.
_IMPATIENCE_S = {
    Absence.KILLED: 0.0,
    Absence.ENDED: 0.0,
    Absence.FOLLOWED: 1.5,
    Absence.GONE: 0.5,
    Absence.SILENT: 0.0,
}
_WORD_LIMIT_S = 0.5
_NOT_IN_IT = frozenset({Absence.ELSEWHERE, Absence.OTHERWISE, Absence.GAVE_UP})
_TRANSFERS = ("send", "recv")


class Peers:
    """The other ranks as this one sees them."""

    def __init__(self, rank: int, board: Board | None) -> None:
        """``board``: None where the store offers no second client."""
        self.rank = rank
        self._board = board
        self._gone_s: dict[int, float] = {}
        self._vain_s = 0.0  # when the store was last asked, and did not answer in time
        self._listening_s: dict[int, tuple[float, float]] = {}  # from when, and when last

    def lost(
        self,
        ranks: Iterable[int],
        now_s: float,
        has_failed: bool = False,
        on_device: bool = False,
        call: tuple[str, int] | None = None,
    ) -> tuple[Missing, ...]:
        """Those of ``ranks`` that are gone for so long that what they took part in would be done by now.

        With them those that are stopped. Nobody as long as nobody is gone.

        ``has_failed``: it will not be done; ``on_device``: it is work that a device does in its own time; ``call``: its
        recorder's key and its number. Who had returned from it before it ended is not missing from it, unless it has
        failed.
        """
        patience_s = _DEVICE_PATIENCE_S if on_device else _PATIENCE_S
        patience_s = _IMPATIENCE_S if has_failed else patience_s
        ranks = tuple(rank for rank in ranks if has_failed or call is None or not self._is_through(rank, *call))
        found = [entry for rank in ranks if rank != self.rank and (entry := self._lost(rank, now_s)) is not None]
        gone_for_s = {entry: now_s - self._gone_s[entry.rank] for entry in found}
        if any(entry.absence is Absence.GONE and gone_for_s[entry] < _WORD_LIMIT_S for entry in found):
            return ()  # its last word may still be read
        causes = _causes(found) or found
        due = any(gone_for_s[entry] >= patience_s[entry.absence] for entry in causes)
        return self._and_stopped(causes, ranks) if due else ()

    def missing(
        self, ranks: Iterable[int], key: str, number: int, what: str = "", is_host: bool = True
    ) -> tuple[Missing, ...]:
        """Who of ``ranks`` is not in call ``number`` of the recorder ``key``, which is ``what`` here.

        The gravest first. Where nobody is known to be missing, those of whom it is not known that they are in it.
        Waits up to a second for the ranks' latest word.
        """
        others = [rank for rank in ranks if rank != self.rank]
        is_latest = self.read(others, key)
        others = [rank for rank in others if not self._is_through(rank, key, number)]
        now_s = time.monotonic()
        lost = [entry for rank in others if (entry := self._lost(rank, now_s)) is not None]
        out = self._and_stopped(_causes(lost), others)
        known = {entry.rank for entry in (*lost, *out)}
        living = [self._astray(rank, key, number, what, is_host, is_latest) for rank in others if rank not in known]
        astray = [entry for entry in living if entry is not None]
        certain = tuple(entry for entry in astray if entry.absence in _NOT_IN_IT)
        return (*out, *certain) or tuple(lost) or tuple(astray)

    def _is_through(self, rank: int, key: str, number: int) -> bool:
        """Whether it has said that it had returned from the call when it gave the group up, or ended."""
        beat = None if self._board is None else self._board.beats.get(rank)
        return beat is not None and beat.through.get(key, 0) >= number

    def _and_stopped(self, lost: list[Missing], ranks: Iterable[int]) -> tuple[Missing, ...]:
        """``lost`` and those of ``ranks`` that are stopped.

        Who ended without a word that can be read may have found out that another one was stopped, of whatever group.
        """
        is_told = any(entry.absence is not Absence.GONE for entry in lost)
        asked = ranks if is_told or not lost else PROCESSES
        stopped = tuple(entry for rank in asked if rank != self.rank and (entry := self._stopped(rank)) is not None)
        if is_told or not stopped:
            return (*lost, *stopped)
        return (*stopped, *(replace(entry, absence=Absence.AFTER) for entry in lost))

    def _lost(self, rank: int, now_s: float) -> Missing | None:
        absence = self._how_it_went(rank, now_s)
        if absence is None:
            self._gone_s.pop(rank, None)
            return None
        return Missing(rank, absence, str(PROCESSES.get(rank, "")))

    def _how_it_went(self, rank: int, now_s: float) -> Absence | None:
        process, board = PROCESSES.get(rank), self._board
        state = None if process is None else process.state()
        beat = None if board is None else board.beats.get(rank)
        if state is State.ELSEWHERE and self._is_silent(rank, now_s):
            self._gone_s.setdefault(rank, now_s)
            return Absence.SILENT
        if state is not State.GONE and not (beat is not None and beat.left):
            return None
        gone_s = self._gone_s.setdefault(rank, now_s)
        if beat is not None and beat.concluded:
            return Absence.FOLLOWED
        if beat is not None and beat.left:
            return Absence.ENDED
        # What it may have said at its end has been read by now, or never will be.
        return Absence.KILLED if board is not None and board.is_up and board.read_s >= gone_s else Absence.GONE

    def _is_silent(self, rank: int, now_s: float) -> bool:
        """Of a rank on another machine, whether it has said nothing since it is listened to."""
        board = self._board
        if board is None or not (board.is_up or rank == _STORE_HOLDER):
            return False
        since_s, last_s = self._listening_s.get(rank, (now_s, now_s))
        if now_s - last_s > _PAUSE_S:
            since_s = now_s  # beats are read only while a call is slow: what was before says nothing
        self._listening_s[rank] = (since_s, now_s)
        return now_s - max(since_s, board.heard_s.get(rank, since_s)) >= SILENCE_S

    def _stopped(self, rank: int) -> Missing | None:
        process = PROCESSES.get(rank)
        if process is None or process.state() is not State.STOPPED:
            return None
        return Missing(rank, Absence.STOPPED, str(process))

    def _astray(self, rank: int, key: str, number: int, what: str, is_host: bool, is_latest: bool) -> Missing | None:
        """What a rank that lives does instead; None where it is known, or on a device likely, to be in the call."""
        beat = None if self._board is None else self._board.beats.get(rank)
        process = str(PROCESSES.get(rank, ""))
        if beat is None or not is_latest:
            reason = "" if is_latest else "torch.distributed's store does not answer"
            return Missing(rank, Absence.UNKNOWN, process, reason)
        if beat.given_up.get(key, number) < number:
            return Missing(rank, Absence.GAVE_UP, process, f"its last call of it was number {beat.given_up[key]}")
        # A direction of a pair is known to a rank from its first call on.
        entered = max(beat.entered.get(key, 0), beat.given_up.get(key, 0))
        last = f"its last call of this group is number {entered}" if entered else "it has made no call of these"
        if beat.under_way:
            last += f", and it waits in {beat.under_way}"
        if entered < number:
            return Missing(rank, Absence.ELSEWHERE, process, last)
        inside, words = beat.calls.get(key, (None, ""))
        if inside == number and what and words and not _is_same(what, words):
            return Missing(rank, Absence.OTHERWISE, process, f"number {number}, {words}")
        # Which of a device's calls are done is seen late, and a call before this one may still be open beside it.
        has_left = is_host and (inside is None or inside > number)
        return Missing(rank, Absence.LEFT, process, last) if has_left else None

    def read(self, ranks: Iterable[int], key: str) -> bool:
        """Have the ranks' latest word, and what is told of the recorder ``key``; waits a second at most.

        Where the last wait was in vain, and the store has not answered since, there is none.

        Returns:
            whether it is the latest: False where the store does not answer.
        """
        board = self._board
        if board is None:
            return False
        asked_s = time.monotonic()
        board.ask((rank for rank in ranks if rank != self.rank), [key])
        limit_s = 0.0 if board.read_s < self._vain_s else _READ_LIMIT_S
        while board.is_up and board.read_s < asked_s and time.monotonic() < asked_s + limit_s:
            time.sleep(_POLL_S)
        is_latest = board.read_s >= asked_s
        if not is_latest and limit_s:
            self._vain_s = asked_s
            board.note_silence()
        return is_latest


def _is_same(one: str, other: str) -> bool:
    """Whether these words are of one call: a send and its receive are, each with the other's rank."""
    first, second = one.split(" "), other.split(" ")
    if first[0] in _TRANSFERS and second[0] in _TRANSFERS:
        return first[1:2] == second[1:2]
    return one == other


def _causes(lost: list[Missing]) -> list[Missing]:
    """Without the ranks that have ended because they found another one missing: they are not the ones to look at."""
    return [entry for entry in lost if entry.absence is not Absence.FOLLOWED]
