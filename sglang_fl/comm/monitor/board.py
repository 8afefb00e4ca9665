"""Where the ranks' monitors leave word for each other: torch.distributed's store, used by a thread of its own.

Not by a client of its own: each new connection has the store's process look up a name, and where no name service
answers, no rank is served for five seconds. The store is not held either, so that it goes with its process group.
A call to a store whose process is stopped never returns, and the monitor must go on without it: everything that it
asks for is what this thread has read last.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from sglang_fl.comm.monitor.verdict import Verdict, as_told, to_tell
from sglang_fl.comm.threads import LOG, start_thread

BEAT_S = 1.0
UNCHANGED_BEAT_S = 5.0
_VERDICT_LIMIT_S = 2.0
_STUCK_LIMIT_S = 0.2
_PREFIX = "sglang_fl/monitor"


@dataclass
class Beat:
    """What a rank says of itself.

    Attributes:
        count: of its beats so far; a rank whose count stands still is silent.
        entered: recorder's key to the number of the last call that it has entered.
        under_way: what it waits in now: recorder and call in words; empty if nothing.
        calls: recorder's key to number and words of the call that it is in; only where it is in one.
        given_up: recorder's key to the number of the last call, where it has given the group up.
        through: recorder's key to the number of the call up to which all have returned here without an error; only of
            those in host memory that it has given up or leaves by its end.
        refuses: group's key to the verdict, as it is told, for which it makes no further call of the group.
        left: it ends in good order, or with an exception; nothing comes after this.
        concluded: it has found that a call cannot complete; if it is gone, that is why.
    """

    count: int = 0
    entered: dict[str, int] = field(default_factory=dict)
    under_way: str = ""
    calls: dict[str, tuple[int, str]] = field(default_factory=dict)
    given_up: dict[str, int] = field(default_factory=dict)
    through: dict[str, int] = field(default_factory=dict)
    refuses: dict[str, str] = field(default_factory=dict)
    left: bool = False
    concluded: bool = False


class Board:
    """This rank's word to the others and theirs to it. Its thread starts with the first :meth:`start`."""

    def __init__(self, store: Callable[[], Any], rank: int) -> None:
        """``store`` gives torch.distributed's; RuntimeError once that has ended."""
        self.rank = rank
        self.beats: dict[int, Beat] = {}
        self.heard_s: dict[int, float] = {}  # when a peer's count was last seen to change
        self.read_s = 0.0  # what was asked for by then has been read
        self.verdicts: dict[str, Verdict] = {}
        self.alarm: Verdict | None = None  # the first that any rank has told, of whatever recorder
        self.has_told = False
        self._store = store
        lock = threading.RLock()
        self._wanted = threading.Condition(lock)
        self._taken = threading.Condition(lock)
        self._own = Beat()
        self._is_fresh = False
        self._is_urgent = False
        # What is to be said at once has numbers: of the last one, of the last verdict, and of what the store has taken.
        self._word = self._verdict_word = self._taken_word = 0
        self._is_stuck = False  # a wait for the store was in vain, and it has taken nothing since
        self._peers: tuple[int, ...] = ()
        self._keys: tuple[str, ...] = ()
        self._to_tell: list[tuple[str, str]] = []
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start to talk.

        Raises:
            CommError: its thread cannot be started.
        """
        self._thread = start_thread(self._run, "sglang_fl-board")

    @property
    def is_up(self) -> bool:
        """False once the store is gone with the process that held it."""
        return self._thread is not None and self._thread.is_alive()

    def say(
        self,
        entered: dict[str, int],
        under_way: str,
        calls: dict[str, tuple[int, str]],
        given_up: dict[str, int],
    ) -> None:
        """What the next beat says."""
        with self._wanted:
            self._own.entered, self._own.under_way, self._is_fresh = entered, under_way, True
            self._own.calls, self._own.given_up = calls, given_up

    def ask(self, peers: Iterable[int], keys: Iterable[str]) -> None:
        """Read the peers' beats and what is told of the recorders of ``keys``; both come into this object later."""
        with self._wanted:
            asked = set(peers)
            self._peers = tuple(sorted(asked.union(self._peers)))
            self._keys = tuple(sorted({*self._keys, *keys}))
            if asked:
                self._wanted.notify()  # else with the next beat

    def tell(self, key: str, verdict: Verdict) -> None:
        """Tell the peers that the recorder of ``key`` cannot go on."""
        with self._wanted:
            self._to_tell.append((key, to_tell(verdict)))
            self.has_told = True
            # Who has left a call by itself does not end for what it found of others.
            self._own.concluded |= all(missing.rank != self.rank for missing in verdict.missing)
            self._is_urgent = True
            self._word = self._verdict_word = self._word + 1
            self._wanted.notify()

    def refuse(self, groups: Iterable[str], verdict: Verdict, entered: dict[str, int]) -> None:
        """Tell the peers that this rank makes no further call of ``groups``; ``entered``: see :class:`Beat`."""
        text = to_tell(verdict)
        with self._wanted:
            for group in groups:
                self._own.refuses.setdefault(group, text)
            self._own.entered = {**self._own.entered, **entered}
            self._is_urgent = True
            self._word = self._verdict_word = self._word + 1
            self._wanted.notify()

    def part(self, given_up: dict[str, int], through: dict[str, int], limit_s: float) -> None:
        """Say at once which recorders are given up, before the store may go; at most ``limit_s`` seconds."""
        with self._wanted:
            self._own.given_up, self._own.through = given_up, through
            self._is_urgent = True
            self._word += 1
            self._wanted.notify()
        self.settle(limit_s)

    def settle(self, limit_s: float) -> None:
        """Wait until the store has what was said so far, which goes with it otherwise: ``limit_s`` seconds at most.

        For a verdict ``_VERDICT_LIMIT_S`` at least. Where the last wait was in vain there is none.
        """
        with self._wanted:
            word, limit_s = self._word, self._limit_s(limit_s)
            if self.is_up and not self._is_stuck:
                is_taken = self._taken.wait_for(lambda: self._taken_word >= word or self._done.is_set(), limit_s)
                self._is_stuck = not is_taken

    def note_silence(self) -> None:
        """Somebody has waited for the store in vain: until it takes a word, nobody else needs to."""
        with self._wanted:
            self._is_stuck = True

    def _limit_s(self, limit_s: float) -> float:
        if self._is_stuck:
            return min(limit_s, _STUCK_LIMIT_S)
        return limit_s if self._verdict_word <= self._taken_word else max(limit_s, _VERDICT_LIMIT_S)

    def leave(self, through: dict[str, int], limit_s: float) -> None:
        """Say that this process ends; at most ``limit_s`` seconds, and no matter whether anybody hears it."""
        with self._wanted:
            self._own.left, self._is_fresh = True, True
            self._own.through = through
            self._wanted.notify()
            limit_s = self._limit_s(limit_s)
        self._done.wait(limit_s if self.is_up else 0.0)

    def _run(self) -> None:
        said_s = -math.inf
        try:
            while not self._own.left or self._is_fresh or self._to_tell:
                with self._wanted:
                    if not (self._to_tell or self._peers or self._own.left or self._is_urgent):
                        self._wanted.wait(BEAT_S)
                    told, self._to_tell = self._to_tell, []
                    peers, self._peers = self._peers, ()
                    keys = self._keys
                    asked_s = time.monotonic()
                    beat = self._beat(asked_s - said_s, bool(told))
                    word = self._word
                for key, text in told:
                    self._store().set(f"{_PREFIX}/verdict/{key}", text)
                    self._store().set(f"{_PREFIX}/alarm", text)
                if beat:
                    self._store().set(f"{_PREFIX}/beat/{self.rank}", beat)
                    said_s = asked_s
                    self._has_taken(word)
                self._read(peers, keys, asked_s)
                if self.alarm is None and (text := self._get("alarm")):
                    self.alarm = as_told(text)
        except (
            RuntimeError,
            ValueError,
            TypeError,
            KeyError,
        ) as error:  # gone, or what is in it is no word of a monitor
            LOG.debug("[sglang_fl] the monitor's store no longer serves: %s", str(error).partition("\n")[0])
        finally:
            with self._wanted:
                self._done.set()
                self._taken.notify_all()

    def _beat(self, since_s: float, is_due: bool) -> str:
        """What is to be said now, ``since_s`` seconds after the last word; empty where nothing is."""
        pause_s = BEAT_S if self._is_fresh else UNCHANGED_BEAT_S
        if since_s < pause_s and not (is_due or self._own.left or self._is_urgent):
            return ""
        self._own.count += 1
        self._is_fresh = self._is_urgent = False
        return json.dumps(asdict(self._own))

    def _has_taken(self, word: int) -> None:
        with self._wanted:
            self._taken_word, self._is_stuck = word, False
            self._taken.notify_all()

    def _read(self, peers: Iterable[int], keys: Iterable[str], asked_s: float) -> None:
        beats = {rank: Beat(**json.loads(text)) for rank in peers if (text := self._get(f"beat/{rank}"))}
        # After the beats: who says there that it has found something has told it here before.
        told = {key: text for key in keys if key not in self.verdicts and (text := self._get(f"verdict/{key}"))}
        # What is told is known here before it is known that who told it has gone.
        for key, text in told.items():
            self._learn(key, text)
        for rank, beat in beats.items():
            known = self.beats.get(rank)
            if known is None or known.count != beat.count:
                self.beats[rank], self.heard_s[rank] = beat, time.monotonic()
        self.read_s = asked_s

    def _get(self, key: str) -> str:
        store, name = self._store(), f"{_PREFIX}/{key}"
        return str(store.get(name).decode()) if store.check([name]) else ""

    def _learn(self, key: str, text: str) -> None:
        try:
            self.verdicts[key] = as_told(text)
        except (ValueError, TypeError, KeyError) as error:
            LOG.error("[sglang_fl] what a peer tells of %s cannot be read: %s", key, error)


def store_of(world: Callable[[], Any]) -> Any:
    """torch.distributed's store, as long as its process group is still the one of ``world``.

    Raises:
        RuntimeError: it has ended.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    if not dist.is_initialized() or dist.group.WORLD is not world():
        raise RuntimeError("torch.distributed was ended")
    return _get_default_store()
