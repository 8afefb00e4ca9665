"""The monitor: finds calls that cannot complete, and sees to it that nobody goes on waiting for them."""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

from sglang_fl.comm.dumps import DumpError, dump_calls, meeting_place, name_recorder
from sglang_fl.comm.errors import CommError
from sglang_fl.comm.exchange import FAILED
from sglang_fl.comm.monitor.absent import Peers
from sglang_fl.comm.monitor.awake import Awake
from sglang_fl.comm.monitor.board import Board, store_of
from sglang_fl.comm.monitor.ending import end_process
from sglang_fl.comm.monitor.suspects import Suspect, suspects
from sglang_fl.comm.monitor.verdict import Absence, Missing, Stuck, Verdict, as_told
from sglang_fl.comm.monitor.watched import TICK_S, Pending, Watched
from sglang_fl.comm.processes import this_process
from sglang_fl.comm.recorder import RecordedCall, Recorder
from sglang_fl.comm.threads import LOG, aside, start_early, start_thread

SLOW_S = 0.3  # a call that takes longer is looked into
ABORT_LIMIT_S = 2.0
DUMP_LIMIT_S = 2.0
EXPLAIN_LIMIT_S = 2.0
LEAVE_LIMIT_S = 0.5
LINGER_S = 1.0
LOG_LIMIT_S = 0.5
_ASKED = 3  # calls of a device at most for which the peers are asked in turn who is missing
_KEPT = 64  # recorders that were given up, of which the peers are told
_AFTER_THE_SENDS = 50  # of multiprocessing's exit priorities, the higher the earlier
# What of a pause or a look counts as waiting; longer than that the process was stopped, and its calls with it.
_LONGEST_PAUSE_S = 1.0
_LONGEST_TICK_S = 8.0  # a verdict and its dump
_NEAR_S = 0.5  # what fails so shortly before its limit has reached it
_TROUBLE_S = 1.0  # for which the monitor tries again what it could not do for a call that is due


@dataclass(frozen=True)
class _Reason:
    """Why a call cannot complete: who is missing, if a peer told so, which; empty where its limit has passed."""

    missing: tuple[Missing, ...] = ()
    told_by: int | None = None


class Group(Protocol):
    """What is watched of a group.

    Attributes:
        key: names it alike on all its ranks; empty where its calls are refused without a word to them.
    """

    @property
    def key(self) -> str:
        """See the class."""

    def recorders(self) -> tuple[Recorder, ...]:
        """Those that it has now."""

    def operation_limit_s(self) -> float:
        """Seconds that a call may take now."""


class Monitor:
    """What this process watches. Its threads start with the first group of more than one rank.

    The calls of the groups cost nothing more for it: it looks at their recorders four times a second.

    Attributes:
        dump_folder: where dumps go; None for a folder of its own.
        has_concluded: whether any call of this process could not complete; the refusals of the recorders say which.
    """

    def __init__(self) -> None:
        self.dump_folder: Path | None = None
        self._reset()

    def _reset(self) -> None:
        self._groups: WeakSet[Group] = WeakSet()
        self._watched: dict[Recorder, Watched] = {}
        self._names: Counter[str] = Counter()
        self._keys: WeakKeyDictionary[Recorder, str] = WeakKeyDictionary()
        self._given_up: dict[str, int] = {}
        self._through: dict[str, int] = {}
        self._changing = threading.RLock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._world: Callable[[], Any] = _nothing
        self._rank = 0
        self._meeting = ""
        self._board: Board | None = None
        self._peers = Peers(0, None)
        self._has_answered = False
        self._awake = Awake()
        self._troubled: set[Watched] = set()
        self._complaints: set[str] = set()
        self.has_concluded = False

    def watch(self, group: Group) -> None:
        """Watch ``group`` as long as it lives. torch.distributed must be initialised.

        Raises:
            CommError: a thread that this needs cannot be started.
        """
        with self._changing:
            start_early()
            self._meet()
            self._groups.add(group)
            if self._thread is None:
                self._thread = start_thread(self._run, "sglang_fl-monitor")
                Finalize(None, self._leave, exitpriority=_AFTER_THE_SENDS)

    def notice(self, recorder: Recorder, limit_s: float) -> None:
        """Watch a recorder that a group has just made; the group must tell of it by the next tick."""
        with self._changing:
            if self._thread is not None and recorder not in self._watched:
                self._watched[recorder] = self._new(recorder, min(limit_s, recorder.limit_s))

    def made_in(self, recorder: Recorder, creation: int) -> str:
        """What names ``recorder`` alike on all its ranks, for good: ``creation`` is the number of its group's, or 0."""
        with self._changing:
            if recorder not in self._keys:
                key = f"{recorder.name} {list(recorder.ranks)} {creation}"
                # Recorders of one creation are made in the same order on all their ranks.
                self._names[key] += 1
                self._keys[recorder] = key if self._names[key] == 1 else f"{key}#{self._names[key]}"
                name_recorder(recorder, self._keys[recorder])
            return self._keys[recorder]

    def watched(self) -> list[Watched]:
        """What is watched now."""
        with self._changing:
            return list(self._watched.values())

    def _meet(self) -> None:
        import torch.distributed as dist

        if self._world() is dist.group.WORLD:
            return
        world, rank = weakref.ref(dist.group.WORLD), dist.get_rank()
        board = Board(partial(store_of, world), rank)
        board.start()
        self._world, self._rank, self._board = world, rank, board
        self._meeting = meeting_place()
        self._peers = Peers(self._rank, self._board)
        self._has_answered = False

    def _run(self) -> None:
        begin_s = time.monotonic()
        while not self._stop.wait(TICK_S):
            woken_s = time.monotonic()
            self._awake.passed(begin_s, woken_s, _LONGEST_PAUSE_S)
            try:
                self.tick()
            except Exception as error:  # noqa: BLE001 - whatever it is: nothing else would end a call that hangs
                self._cannot_go_on(error)
            begin_s = time.monotonic()
            self._awake.passed(woken_s, begin_s, _LONGEST_TICK_S)

    def tick(self) -> None:
        """Look at everything once; what cannot be looked at does not keep it from the rest."""
        self._troubled = set()
        self._refresh()
        now_s = time.monotonic()
        everything = self.watched()
        # Before it is asked what is under way: a call that was entered by then and is not under way has ended.
        entered = {entry.key: entry.recorder.entered() for entry in everything}
        watched = [entry for entry in everything if entry.verdict is None and not entry.is_given_up]
        pending = self._pending(watched, now_s)
        slow = [(entry, found) for entry, found in pending if found.waited_s >= SLOW_S]
        board = self._board
        if board is not None:
            waits = slow[0][0] if slow else None
            board.say(
                entered,
                "" if waits is None else f"{waits.recorder.name} number {slow[0][1].last}",
                {entry.key: (found.last, found.what) for entry, found in pending},
                dict(self._given_up),
            )
            if board.alarm is not None:
                board.ask((), [entry.key for entry in watched])
            if slow:
                ranks = {rank for entry, _ in slow for rank in entry.recorder.ranks if rank != self._rank}
                board.ask(ranks, [entry.key for entry, _ in slow])
        due = self._due(slow, now_s)
        for entry, found, reason in due:
            if entry.is_host:
                with self._trouble_of(entry, limit_s=_TROUBLE_S):
                    self._conclude(entry, self._verdict(entry, found, reason))
        on_device = [one for one in due if not one[0].is_host]
        with self._trouble_of(*(entry for entry, _, _ in on_device), limit_s=_TROUBLE_S):
            self._name_on_device(on_device, watched)
        for entry in watched:
            told = self._told(entry)
            if entry.verdict is None and told is not None:  # this rank makes no call of it, and shall make none
                with self._trouble_of(entry, limit_s=_TROUBLE_S):
                    self._conclude(entry, Verdict(self._rank, told.stuck, told.missing, told.rank, entry.is_idle()))
        self._answer_alarm()
        for entry in watched:
            if entry not in self._troubled:
                entry.sound_s, entry.trouble = now_s, ""

    def _pending(self, watched: list[Watched], now_s: float) -> list[tuple[Watched, Pending]]:
        pending = []
        for entry in watched:
            with self._trouble_of(entry):
                if found := entry.pending(now_s):
                    pending.append((entry, found))
        return pending

    def _due(self, slow: list[tuple[Watched, Pending]], now_s: float) -> list[tuple[Watched, Pending, _Reason]]:
        due = []
        for entry, found in slow:
            with self._trouble_of(entry):
                if reason := self._reason(entry, found, now_s):
                    due.append((entry, found, reason))
        return due

    @contextmanager
    def _trouble_of(self, *concerned: Watched, limit_s: float = math.inf) -> Iterator[None]:
        """Around what is done for those ``concerned``: the others are watched whatever becomes of it.

        ``limit_s``: for how long it may fail, seconds; their own limit where that is less.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001 - as above
            for watched in concerned:
                self._in_trouble(watched, error, min(limit_s, watched.limit_s))

    def _cannot_go_on(self, error: Exception) -> None:
        """A whole tick failed: the next one tries again, for as long as a call may take."""
        with suppress(Exception):  # such as no memory for the words of this; then the next tick says it
            for watched in self.watched():
                if watched.verdict is None and not watched.is_given_up:
                    self._in_trouble(watched, error, watched.limit_s)

    def _in_trouble(self, watched: Watched, error: Exception, limit_s: float) -> None:
        """The monitor itself failed at ``watched``: end its calls once it has done so for ``limit_s`` seconds."""
        if watched.is_given_up:
            return
        self._troubled.add(watched)
        trouble = f"{type(error).__name__}: {error}"
        recorder = watched.recorder
        if trouble != watched.trouble:
            watched.trouble = trouble
            LOG.error("[sglang_fl] %s: the monitor cannot look after its calls now: %s", recorder.name, trouble)
        # Where there is a verdict, nobody would look again.
        if watched.verdict is None and self._awake.since(watched.sound_s, time.monotonic()) < limit_s:
            return
        watched.is_given_up = True
        text = (
            f"group {recorder.name}, global rank {self._rank} of {list(recorder.ranks)}: the monitor of this process "
            f"can no longer tell whether its calls complete: {trouble}. Look at what this process is short of: "
            f"threads, memory, file descriptors. This group cannot be used any more."
        )
        if not watched.is_host:
            end_process(text)
        LOG.error("[sglang_fl] %s", text)
        recorder.refuse(text)
        self.has_concluded = True
        recorder.abort(ABORT_LIMIT_S)

    def _told(self, watched: Watched) -> Verdict | None:
        """What a peer has found of a recorder."""
        told = None if self._board is None else self._board.verdicts.get(watched.key)
        return None if told is None or told.rank == self._rank else told

    def _refused(self, watched: Watched, pending: Pending) -> Verdict | None:
        """Why a peer will not make the pending call: another one of the group has failed there before."""
        recorder = watched.recorder
        beats = {} if self._board is None else self._board.beats
        for rank in recorder.ranks:
            beat = beats.get(rank)
            if rank == self._rank or beat is None or not beat.refuses:
                continue
            if pending.last <= max(beat.entered.get(watched.key, 0), beat.given_up.get(watched.key, 0)):
                continue
            for group in self._groups_of(recorder):
                if group in beat.refuses:
                    return as_told(beat.refuses[group])
        return None

    def _groups_of(self, recorder: Recorder) -> list[str]:
        """Their keys, of those that have one."""
        with self._changing:
            groups = list(self._groups)
        return [group.key for group in groups if group.key and recorder in (self._recorders_of(group) or ())]

    def _answer_alarm(self) -> None:
        """A rank has found a call that cannot complete: what this one did instead is half of the story."""
        board = self._board
        if board is None or board.alarm is None or self._has_answered or board.has_told:
            return
        self._has_answered = True
        if board.alarm.rank != self._rank:
            path = self._write_dump(f"global rank {board.alarm.rank} found: {board.alarm.text()}")
            LOG.error(
                "[sglang_fl] global rank %d found that a call cannot complete; the calls of this process are in %s",
                board.alarm.rank,
                path,
            )

    def _refresh(self) -> None:
        with self._changing:
            limits: dict[Recorder, float] = {}
            of_groups = [(group, self._recorders_of(group)) for group in list(self._groups)]
            for group, recorders in of_groups:
                limit_s = group.operation_limit_s()
                for recorder in recorders or ():
                    limits[recorder] = min(limits.get(recorder, limit_s), limit_s, recorder.limit_s)
            # What is known of a group that could not say it is watched on.
            are_all_told = all(recorders is not None for _, recorders in of_groups)
            gone = [recorder for recorder in self._watched if recorder not in limits] if are_all_told else []
            for recorder in gone:
                # A thread may still wait in a call of a group that another one has given up.
                if recorder.device.type != "cpu" or recorder.under_way() is None:
                    self._give_up(self._watched.pop(recorder))
            for recorder, limit_s in limits.items():
                if recorder not in self._watched:
                    self._watched[recorder] = self._new(recorder, limit_s)
                self._watched[recorder].limit_s = limit_s

    def _recorders_of(self, group: Group) -> tuple[Recorder, ...] | None:
        """None where it cannot say it now."""
        try:
            return group.recorders()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this group's alone
            text = f"{type(error).__name__}: {error}"
            if text not in self._complaints:
                self._complaints.add(text)
                LOG.error("[sglang_fl] a group cannot say what is to be watched of it: %s", text)
            return None

    def _give_up(self, watched: Watched) -> None:
        self._given_up[watched.key] = watched.recorder.entered()
        self._through.update(_through([watched]))
        while len(self._given_up) > _KEPT:
            oldest = next(iter(self._given_up))
            del self._given_up[oldest]
            self._through.pop(oldest, None)

    def _new(self, recorder: Recorder, limit_s: float) -> Watched:
        key = self.made_in(recorder, 0)
        self._given_up.pop(key, None)
        self._through.pop(key, None)
        watched = Watched(recorder, key, limit_s, self._awake)
        recorder.explainer = partial(self._explain, watched)
        recorder.leaver = partial(self._left, watched)
        return watched

    def _name_on_device(self, due: list[tuple[Watched, Pending, _Reason]], watched: list[Watched]) -> None:
        """End the process if anything is ``due``, with the name of the call that is at fault."""
        reasons = {entry: reason for entry, _, reason in due}
        lost = frozenset(missing.rank for reason in reasons.values() for missing in reason.missing)
        found = _suspects([Suspect(entry, pending) for entry, pending, _ in due], watched, lost) if due else []
        if not found:
            return
        common = max(reasons.values(), key=lambda reason: len(reason.missing))
        verdicts = (
            (one.watched, self._verdict(one.watched, one.pending, reasons.get(one.watched, common), one.others))
            for one in found[:_ASKED]
        )
        asked: list[tuple[Watched, Verdict]] = []
        for entry, verdict in verdicts:  # each may ask the peers
            asked.append((entry, verdict))
            if verdict.missing:
                break
        named, verdict = asked[-1] if asked[-1][1].missing else asked[0]
        for entry in reasons:
            if entry is not named and self._board is not None:
                self._board.tell(entry.key, verdict)
        self._conclude(named, verdict)

    def _reason(self, watched: Watched, pending: Pending, now_s: float, has_failed: bool = False) -> _Reason | None:
        """Why ``pending`` is not to be waited for any longer; None while it is."""
        ranks = watched.recorder.ranks
        # In this order: of who has ended because of what it found, that is known at least as early.
        call = (watched.key, pending.last)
        lost = self._peers.lost(ranks, now_s, has_failed, not watched.is_host, call)
        told = self._told(watched)
        if told is not None:
            return _Reason(told.missing, told.rank)
        if not lost and (refused := self._refused(watched, pending)) is not None:
            return _Reason(refused.missing, refused.rank)
        return _Reason(lost) if lost or pending.waited_s >= watched.limit_s else None

    def _verdict(self, watched: Watched, pending: Pending, reason: _Reason, others: tuple[str, ...] = ()) -> Verdict:
        recorder = watched.recorder
        number = pending.last
        missing = tuple(entry for entry in reason.missing if entry.rank in recorder.ranks) or reason.missing
        is_own = not missing and reason.told_by is None
        if is_own:
            number = self._hanging(watched, pending)
        call = watched.call(number)
        what, place = (call.what(), call.place) if call is not None else ("no longer recorded", "")
        if is_own:
            missing = self._peers.missing(
                recorder.ranks, watched.key, number, "" if call is None else what, watched.is_host
            )
        words, limit_s = f"number {number}, {what}", watched.limit_s
        stuck = Stuck(
            recorder.name, recorder.ranks, words, place, limit_s, pending.waited_s, pending.is_certain, others
        )
        return Verdict(self._rank, stuck, missing, reason.told_by)

    def _left(self, watched: Watched, number: int, error: BaseException) -> None:
        """This rank has left a call under way, as by Ctrl-C: no call of it here can be its peers' any more."""
        call = watched.call(number)
        waited_s = 0.0 if call is None else time.monotonic() - call.entered_s
        own = Missing(self._rank, Absence.INTERRUPTED, str(this_process()), type(error).__name__)
        self._conclude(watched, self._verdict(watched, Pending(number, number, waited_s), _Reason((own,))))

    def _hanging(self, watched: Watched, pending: Pending) -> int:
        """Which of the pending calls hangs: the first that a peer has not entered, or else the last."""
        if pending.first == pending.last or self._board is None:
            return pending.last
        beats = [self._board.beats.get(rank) for rank in watched.recorder.ranks if rank != self._rank]
        entered = [beat.entered.get(watched.key, pending.last) for beat in beats if beat is not None]
        return max(pending.first, min([pending.last, *(number + 1 for number in entered)]))

    def _conclude(self, watched: Watched, verdict: Verdict) -> None:
        """Dump, tell the peers, and end the waiting: on host memory in the calling thread, on a device the process."""
        with watched.lock:
            if watched.verdict is not None:
                return
            watched.dump = self._write_dump(verdict.text())
            if self._board is not None:
                self._board.tell(watched.key, verdict)  # before the caller's error may end the process
            watched.verdict = verdict
        text = verdict.text(dump=watched.dump)
        if not watched.is_host:
            missing = {entry.rank for entry in verdict.missing}
            if set(watched.recorder.ranks) - missing - {self._rank}:
                if self._board is not None:
                    self._board.settle(LEAVE_LIMIT_S)
                self._linger()
            end_process(text)
        LOG.error("[sglang_fl] %s", text)  # waits for nobody, unlike what follows
        watched.recorder.refuse(text)
        beside = self._beside(watched.recorder)
        for other in beside:
            if other.refusal is None:
                other.refuse(text)
        if self._board is not None:
            entered = {self.made_in(other, 0): other.entered() for other in (watched.recorder, *beside)}
            refusal = verdict.refusal(str(this_process()))
            self._board.refuse(self._groups_of(watched.recorder), refusal, entered)
        self.has_concluded = True
        watched.recorder.abort(ABORT_LIMIT_S)

    def _write_dump(self, reason: str) -> Path | None:
        """None where there is no dump within the limit; then the log says why, and a verdict falls all the same."""
        written: list[Path] = []
        done = {entry.recorder.name: entry.done for entry in self.watched() if not entry.is_host}

        def write() -> None:
            try:
                written.append(dump_calls(reason, self.dump_folder, rank=self._rank, done=done, meeting=self._meeting))
            except DumpError as error:
                LOG.error("[sglang_fl] %s", error)
            except Exception as error:  # noqa: BLE001 - such as no memory left
                LOG.error("[sglang_fl] no dump of the calls was written: %s: %s", type(error).__name__, error)

        # A folder on a network's disk may not answer.
        try:
            if not aside(write, "sglang_fl-dump").wait(DUMP_LIMIT_S):
                LOG.error("[sglang_fl] the dump of the calls is not written after %g s", DUMP_LIMIT_S)
        except CommError as error:
            LOG.error("[sglang_fl] no dump of the calls was written: %s", error)
        return written[0] if written else None

    def _explain(self, watched: Watched, error: CommError, shape: tuple[int, ...]) -> CommError:
        """What a call that failed raises; in its thread. Looks for the reason for up to two seconds."""
        try:
            return self._explained(watched, error, shape)
        except Exception as trouble:  # noqa: BLE001 - whatever it is, the call ends with an error that names it
            text = f"{type(trouble).__name__}: {trouble}"
            LOG.error("[sglang_fl] %s: why a call failed cannot be found out: %s", watched.recorder.name, text)
            return _named(error, watched.recorder, _failed_call(watched.recorder), shape, text, self._rank)

    def _explained(self, watched: Watched, error: CommError, shape: tuple[int, ...]) -> CommError:
        recorder = watched.recorder
        call = _failed_call(recorder)
        if call is None or math.prod(shape) != call.count:
            shape = ()  # of a call that was refused after another one had failed
        until_s = time.monotonic() + EXPLAIN_LIMIT_S
        while True:
            with watched.lock:
                verdict = watched.verdict
            if verdict is not None:
                return verdict.kind(verdict.text(shape, watched.dump))
            if (refused := self._refused_beside(watched)) is not None:
                return refused
            if call is not None and (cause := self._cause(watched, call)) is not None:
                self._conclude(watched, cause)
            elif (earlier := self._earlier(watched)) or time.monotonic() > until_s:
                return _named(error, recorder, call, shape, earlier or self._alarm(recorder), self._rank)
            else:
                time.sleep(TICK_S / 5)

    def _earlier(self, watched: Watched) -> str:
        """What has already failed of the group: gloo ends all its connections with one call that reaches its limit."""
        texts = [verdict.text(dump=dump) for verdict, dump in self._failed_beside(watched)]
        return texts[0] if texts else ""

    def _refused_beside(self, watched: Watched) -> CommError | None:
        """Why a call was refused that was never begun: of another one of its group that cannot complete."""
        recorder = watched.recorder
        last = recorder.last()
        if recorder.refusal is None or recorder.under_way() is not None or (last is not None and last.error):
            return None
        errors = [verdict.kind(verdict.text(dump=dump)) for verdict, dump in self._failed_beside(watched)]
        return errors[0] if errors else None

    def _failed_beside(self, watched: Watched) -> list[tuple[Verdict, Path | None]]:
        with self._changing:
            entries = [self._watched.get(recorder) for recorder in self._beside(watched.recorder)]
        return [(entry.verdict, entry.dump) for entry in entries if entry is not None and entry.verdict is not None]

    def _beside(self, recorder: Recorder) -> list[Recorder]:
        """The other recorders of its groups."""
        with self._changing:
            groups = [self._recorders_of(group) or () for group in list(self._groups)]
        beside = itertools.chain(*(recorders for recorders in groups if recorder in recorders))
        return [other for other in dict.fromkeys(beside) if other is not recorder]

    def _alarm(self, recorder: Recorder) -> str:
        """What a rank has told of any group with ranks of this one."""
        alarm = None if self._board is None else self._board.alarm
        return "" if alarm is None or set(alarm.stuck.ranks).isdisjoint(recorder.ranks) else alarm.text()

    def _cause(self, watched: Watched, call: RecordedCall) -> Verdict | None:
        pending = Pending(call.number, call.number, self._waited_s(watched, call))
        self._peers.read(watched.recorder.ranks, watched.key)
        reason = self._reason(watched, pending, time.monotonic(), has_failed=True)
        return None if reason is None else self._verdict(watched, pending, reason)

    def _waited_s(self, watched: Watched, call: RecordedCall) -> float:
        """For how long a failed call was waited for: to look for the reason takes time, in which no limit passes."""
        waited_s = self._awake.since(call.entered_s, time.monotonic())
        took_s = waited_s if call.time_out_s is None else call.time_out_s - call.time_in_s
        # A library's own limit may be a little less.
        return took_s if took_s < watched.limit_s - _NEAR_S else waited_s

    def part(self) -> None:
        """A group of this process is given up: say so at once, since the store may go next, before the process."""
        self._refresh()
        board = self._board
        if board is not None:
            with self._changing:
                given_up, through = dict(self._given_up), dict(self._through)
            board.part(given_up, through, LEAVE_LIMIT_S)

    def _leave(self) -> None:
        """Say that this process ends, and end; the process does not wait for anything that does not answer."""
        self._stop.set()
        if self._board is not None:
            self._board.leave({**self._through, **_through(self.watched())}, LEAVE_LIMIT_S)
        LOG.drain(LOG_LIMIT_S)
        if FAILED or (self._board is not None and self._board.has_told):
            self._linger()

    def _linger(self) -> None:
        """The store mostly lives in rank 0: the others shall read what was told before it goes."""
        if self._rank == 0:
            time.sleep(LINGER_S)

    def after_fork(self) -> None:
        """A fork has none of the threads, nor those of a library that carry calls, and watches nothing yet."""
        for recorder in list(self._watched):
            recorder.forked(
                f"group {recorder.name}, global rank {self._rank} of {list(recorder.ranks)}: this is process "
                f"{os.getpid()}, a fork of process {os.getppid()} that made the group, and no rank of it. Start "
                "processes that call groups with multiprocessing's method spawn, and make groups of their own in them."
            )
        self._reset()


def _suspects(due: list[Suspect], watched: list[Watched], lost: frozenset[int]) -> list[Suspect]:
    try:
        return suspects(due, watched, lost)
    except RuntimeError as error:  # no thread to look with: what is due does not complete all the same
        LOG.error("[sglang_fl] the streams cannot be looked at, and what is named is what was due first: %s", error)
        return due


def _nothing() -> None:
    """No process group yet."""


def _through(watched: Iterable[Watched]) -> dict[str, int]:
    """Of those in host memory, by key, the number of the call up to which all have returned without an error."""
    found = {}
    for entry in watched:
        if entry.is_host:
            calls = entry.recorder.calls()
            not_returned = [call.number for call in calls if call.error or call.time_out_s is None]
            found[entry.key] = min(not_returned) - 1 if not_returned else entry.recorder.entered()
    return found


def _failed_call(recorder: Recorder) -> RecordedCall | None:
    failed = [call for call in recorder.calls() if call.error]
    return failed[-1] if failed else recorder.under_way() or recorder.last()


def _named(
    error: CommError, recorder: Recorder, call: RecordedCall | None, shape: tuple[int, ...], earlier: str, rank: int
) -> CommError:
    """What a library said of a call, with the call's name; a backend with errors of its own says that itself."""
    if type(error) is not CommError or call is None:
        return error
    shaped = f" of shape {list(shape)}" if shape else ""
    place = f" called at {call.place}" if call.place else ""
    before = f"what failed before it is: {earlier}" if earlier else "no rank is known to be missing from it"
    return CommError(
        f"group {recorder.name}, global rank {rank} of {list(recorder.ranks)}: call number {call.number}, "
        f"{call.what()}{shaped}{place} failed: {str(error).rstrip('.')}; {before}"
    )


MONITOR = Monitor()
_forked: Callable[[], None] = MONITOR.after_fork
os.register_at_fork(after_in_child=_forked)
