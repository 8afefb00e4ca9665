"""Ranks of a group hand each other a value through torch.distributed's store, within a limit, whatever the store does.

Gloo's own ``monitored_barrier`` holds its limit on its first rank only. A store is a process, too: where that one is
stopped, a call to it never returns, so the talking is done by a thread that can be left behind.

How an exchange ended is one value in the store, which the first rank sets that saw all come or gave up waiting. So it
ends alike on all ranks: one that comes late hears that it was given up, and does not take old values for an answer.

What belongs to one creation of a group is told from what belongs to the next one by the creation's number. On that the
ranks agree as they meet, since none of them can know how often the others have tried.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from sglang_fl.comm.errors import AgreementError, CommError
from sglang_fl.comm.processes import Process, State, this_process
from sglang_fl.comm.run_word import learn_run
from sglang_fl.comm.threads import aside

logger = logging.getLogger("sglang_fl.comm")
LATE_LIMIT_S = 0.5  # for ranks that are only late, while another is missing
_ANSWER_LIMIT_S = 0.5
_READ_LIMIT_S = 1.0  # for ranks that have yet to read what others told, before the process with the store may end
_LONGEST_PAUSE_S = 0.02
_LOOKOUT_S = 0.2

_OUT = (State.GONE, State.STOPPED)

# Stages at which a rank was missing. Where this process holds the store it must not take that along at once.
FAILED: list[str] = []

# What a store holds of an exchange that all ranks came to, and before the JSON of one that a rank gave up.
_DONE = b"done"

# By global rank, as they said when they first took part in an exchange.
PROCESSES: dict[int, Process] = {}


def _forget() -> None:
    """A fork has met nobody yet."""
    FAILED.clear()
    PROCESSES.clear()


os.register_at_fork(after_in_child=_forget)


class Creation:
    """One creation of a group: its ranks meet under its number, then and as long as the group lives."""

    def __init__(self, group: str, ranks: tuple[int, ...]) -> None:
        self.group = group
        self.ranks = ranks
        self._number = 0
        self.missing: list[int] = []  # from an exchange of it, for which it is given up
        self._is_joined = False
        self._is_left = False

    @property
    def number(self) -> int:
        """From 1, and the same on all ranks once they have exchanged anything; 0 before."""
        return self._number

    def begin(self) -> None:
        """Take the number that comes next here; local and idempotent."""
        if not self._number:
            self._number = _count((self.group, self.ranks))

    def join(self, store: Any, is_leaving: bool = False) -> None:
        """Take the number under which the others are, where this rank was not there when they gave up; idempotent.

        One that ``is_leaving`` before it has met anybody takes no number after one at whose end it was not missed: the
        others had errors of their own there, as where all are given the same wrong value, and it is in their next one
        once it tries again.
        """
        if self._is_joined:
            return
        while store.check([self._key("over")]) and store.check([self._key("begun", self._number + 1)]):
            if is_leaving and _own_rank() not in self._over(store)[2]:
                break
            self._number = _count((self.group, self.ranks))
        store.set(self._key("begun"), "begun")
        store.set(self._key(_by("begun", _own_rank())), "begun")
        self._is_joined = True

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Around all that a rank does for it, from the first moment: an error is told to the others, see `give_up`."""
        try:
            yield
        except BaseException as error:
            if len(self.ranks) > 1:
                self.give_up(error)
            raise

    def give_up(self, error: BaseException) -> None:
        """Tell the ranks that may still be in the creation that this one has left it with ``error``.

        Once, and for half a second at most, whatever the store does. Global rank 0, with whose process the store mostly
        ends, gives the others that can a second more to read what they were told: whoever reads its error may kill it.
        """
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_default_store

        if self._is_left or not dist.is_initialized():
            return
        self._is_left = True
        reason = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
        own = _own_rank()
        word = json.dumps([own, reason, self.missing])
        self.begin()
        FAILED.append(f"creation of {self.group}")

        told = threading.Event()

        def tell(store: Any) -> None:
            try:
                self.join(store, is_leaving=True)
                store.compare_set(self._key("over"), "", word)
                store.set(self._key(_by("left", own)), "left")
                told.set()
                if own == 0:
                    self._see_off(store)
            except RuntimeError as problem:  # the store went with the process that held it
                logger.debug("[sglang_fl] the end of a creation could not be told: %s", problem)
                told.set()

        try:
            done = aside(partial(tell, _get_default_store()), "sglang_fl-give-up")
        except CommError as problem:  # no thread can be started: the others find out at their limit
            logger.debug("[sglang_fl] the end of a creation could not be told: %s", problem)
            return
        if own != 0:
            done.wait(_ANSWER_LIMIT_S)
        elif told.wait(_ANSWER_LIMIT_S):
            done.wait(_READ_LIMIT_S)

    def _see_off(self, store: Any) -> None:
        """Return once each rank that came to the creation has left it, but for those that cannot; or too late."""
        inside = {rank for rank in self.ranks if rank != 0 and rank not in self.missing}
        until_s = time.monotonic() + _READ_LIMIT_S
        while inside and time.monotonic() < until_s:
            inside = {rank for rank in inside if self._is_inside(store, rank)}
            time.sleep(_LONGEST_PAUSE_S)

    def _is_inside(self, store: Any, rank: int) -> bool:
        begun, left = self._key(_by("begun", rank)), self._key(_by("left", rank))
        return store.check([begun]) and not store.check([left]) and state_of(rank) not in _OUT

    def cut_off(self) -> None:
        """The store does not answer: nothing can be told any more."""
        self._is_left = True

    def given_up(self, store: Any) -> tuple[int, str] | None:
        """Which rank has told that it gave up, and why; None if none has."""
        if not store.check([self._key("over")]):
            return None
        rank, reason, _ = self._over(store)
        return rank, reason

    def _over(self, store: Any) -> tuple[int, str, list[int]]:
        """Which rank was the first to give up, why, and for want of which ones."""
        rank, reason, missing = json.loads(store.get(self._key("over")))
        return rank, reason, missing

    def place(self) -> str:
        """What the keys of its exchanges begin with."""
        return f"sglang_fl/{self.group}/{list(self.ranks)}/{self._number}"

    def _key(self, word: str, number: int = 0) -> str:
        return f"sglang_fl/{self.group}/{list(self.ranks)}/{number or self._number}/{word}"


@dataclass
class Exchange:
    """One exchange of one group, from the view of one rank. All of ``ranks`` must run it.

    Attributes:
        group, ranks, rank: name, global ranks in group order, this rank within the group.
        stage: what is exchanged; in keys and errors.
        limit_s: within which all must have come, seconds.
        whole_limit_s: where that is what is left of a longer one, as of a creation with several steps, this one.
        creation: the group's; None where it belongs to none.
    """

    group: str
    ranks: tuple[int, ...]
    rank: int
    stage: str
    limit_s: float
    whole_limit_s: float = 0.0
    creation: Creation | None = None
    _values: list[Any] | None = None
    _missing: list[int] | None = None
    _given_up_by: int | None = None
    _reason: str = ""
    _problem: str = ""
    _is_over: bool = False
    _keys: list[str] = field(default_factory=list)
    _end_key: str = ""

    def run(self, value: Any) -> list[Any]:
        """Every rank's ``value`` in group order.

        Raises:
            AgreementError: a rank did not come within the limit, its process has ended or it has left the creation with
                an error; names it. Or this rank came after another had given the exchange up; names that one.
        """
        from torch.distributed.distributed_c10d import _get_default_store

        if self.creation is not None:
            self.creation.begin()
        start_s = time.monotonic()
        try:
            talk = aside(partial(self._talk, _get_default_store(), value), "sglang_fl-exchange")
        except CommError as error:
            raise AgreementError(f"{self._head()} it cannot take part in '{self.stage}': {error}") from error
        talk.wait(self.limit_s + LATE_LIMIT_S + _ANSWER_LIMIT_S)
        if self._values is not None:
            return self._values
        self._is_over = True
        if self.creation is not None:
            self.creation.missing = self._missing or []
            if self._missing is None:
                self.creation.cut_off()
        FAILED.append(self.stage)
        raise AgreementError(self._text(time.monotonic() - start_s))

    def _talk(self, store: Any, value: Any) -> None:
        try:
            learn_run(store)
            self._find_place(store)
            store.set(self._keys[self.rank], pickle.dumps((this_process(), value)).hex())
            self._missing = self._ended(store, self._wait(store))
            if not self._missing and not self._is_over:
                answers = [pickle.loads(bytes.fromhex(store.get(key).decode())) for key in self._keys]
                PROCESSES.update(zip(self.ranks, (process for process, _ in answers), strict=True))
                self._values = [answer for _, answer in answers]
        except RuntimeError as error:  # the store went with the process that held it
            self._problem = str(error).strip().partition("\n")[0] or type(error).__name__

    def _find_place(self, store: Any) -> None:
        if self.creation is None:
            group = f"sglang_fl/{self.group}/{list(self.ranks)}"
        else:
            self.creation.join(store)
            group = f"{self.creation.place()}/{list(self.ranks)}"
        place = f"{group}/{self.stage}"
        place += f"/{_count(place)}"
        self._keys = [f"{place}/{rank}" for rank in self.ranks]
        self._end_key = f"{place}/end"

    def _ended(self, store: Any, missing: list[int]) -> list[int]:
        """The ranks for want of which the exchange is given up on all ranks; the first word on it counts."""
        own = self.ranks[self.rank]
        word = _DONE
        if missing or self._is_over:
            word = json.dumps([own, missing, self._reason]).encode()
        found = store.compare_set(self._end_key, "", word.decode())
        if found == _DONE:
            return []
        self._given_up_by, named, self._reason = json.loads(found)
        if self._reason:
            return list(named)
        return missing or named or [self._given_up_by]

    def _wait(self, store: Any) -> list[int]:
        """The ranks that do not come: those whose processes have ended, or else all that are missing at the limit.

        Or the one that has left the creation. None where another rank has given the exchange up.
        """
        now_s = time.monotonic()
        deadline_s, lookout_s, pause_s = now_s + self.limit_s, now_s + _LOOKOUT_S, 0.0005
        while not store.check(self._keys):
            now_s = time.monotonic()
            if now_s > deadline_s:
                return self._late(store, now_s + min(LATE_LIMIT_S, self.limit_s))
            if now_s > lookout_s:
                lookout_s = now_s + _LOOKOUT_S
                left = None if self.creation is None else self.creation.given_up(store)
                ended = [rank for rank in self.ranks if is_gone(rank)]
                lost = [rank for rank in self._absent(store) if rank in ended]
                if lost or store.check([self._end_key]):
                    return lost
                if left is not None:
                    self._reason = left[1]
                    return [left[0]]
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return []

    def _late(self, store: Any, until_s: float) -> list[int]:
        while True:
            missing = self._absent(store)
            if not missing or time.monotonic() > until_s:
                return missing
            time.sleep(_LONGEST_PAUSE_S)

    def _absent(self, store: Any) -> list[int]:
        return [rank for rank, key in zip(self.ranks, self._keys, strict=True) if not store.check([key])]

    def _text(self, waited_s: float) -> str:
        missing, own, head = self._missing, self.ranks[self.rank], self._head()
        if missing and self._reason:
            return (
                f"{head} '{self.stage}' failed on all ranks: global rank {missing[0]} has left the creation of the "
                f"group with {self._reason.rstrip('.')}. Mend that; then the group can be made again."
            )
        if missing and own in missing:
            return (
                f"{head} it came to '{self.stage}' after global rank {self._given_up_by} had given up waiting for "
                f"{missing}, so that it failed on all ranks. Look at what held this rank up."
            )
        if missing == [self._given_up_by]:
            return (
                f"{head} '{self.stage}' failed on all ranks: global rank {self._given_up_by} had no answer from "
                f"torch.distributed's store in time. Look at the process and the network of the store, which is mostly "
                f"global rank 0's."
            )
        if not missing:  # the store does not answer, or is gone: what is known of the processes must do
            missing = [rank for rank in self.ranks if state_of(rank) in _OUT]
        nobody = "the process that holds torch.distributed's store, mostly that of global rank 0, was lost at"
        who = f"global rank(s) {missing} did not reach" if missing else nobody
        states = {rank: state for rank in missing if (state := state_of(rank)) in _OUT and state is not None}
        known = "; ".join(
            f"global rank {rank} was {PROCESSES[rank]}, which {state.value}" for rank, state in states.items()
        )
        limit = self._limit() if waited_s >= self.limit_s else f"in {waited_s:.1f} s"
        store = f" ({self._problem or 'the store of torch.distributed does not answer'})" if not self._missing else ""
        return (
            f"{head} {who} '{self.stage}' "
            f"{limit}{f' ({known})' if known else ''}. Look at the log of the missing rank: has "
            f"its process ended, is the plugin installed and loaded there?{store}"
        )

    def _head(self) -> str:
        return f"group {self.group}, global rank {self.ranks[self.rank]} of {list(self.ranks)}:"

    def _limit(self) -> str:
        whole, left = (f"{round(limit_s, 1):g} s" for limit_s in (max(self.whole_limit_s, self.limit_s), self.limit_s))
        steps = "" if whole == left else f" for all steps, of which this one had {left} left"
        return f"within {whole}{steps}"


def _by(word: str, rank: int) -> str:
    return f"{word} by {rank}"


def _own_rank() -> int:
    import torch.distributed as dist

    return dist.get_rank()


def state_of(rank: int) -> State | None:
    """What has become of the process of a global rank; None if none of its is known."""
    process = PROCESSES.get(rank)
    return None if process is None else process.state()


def is_gone(rank: int) -> bool:
    """Whether the process of a global rank is known to have ended."""
    return state_of(rank) is State.GONE


# How often this process has been at a place, since torch.distributed was initialised.
_counts: WeakKeyDictionary[Any, Counter[Any]] = WeakKeyDictionary()


def _count(place: Any) -> int:
    import torch.distributed as dist

    counts = _counts.setdefault(dist.group.WORLD, Counter())
    counts[place] += 1
    return counts[place]
