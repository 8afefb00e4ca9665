"""An exchange ends alike on all ranks: one that comes late does not take what others left behind for an answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from sglang_fl.comm.errors import AgreementError
from sglang_fl.comm.exchange import Creation, Exchange
from sglang_fl.testing.ranks import RankContext, run_ranks

ENDLESS_S = 600.0  # longer than a test may run: what ends before does not end by this limit


def exchanged(context: RankContext, value: str, limit_s: float) -> list[str]:
    """One exchange of all ranks."""
    ranks = tuple(range(context.world_size))
    return Exchange("tp:0", ranks, context.rank, "swap", limit_s).run(value)


def refused(context: RankContext, limit_s: float) -> str:
    """The error of an exchange."""
    with pytest.raises(AgreementError) as raised:
        exchanged(context, f"old {context.rank}", limit_s)
    return str(raised.value)


def late(context: RankContext) -> tuple[str, list[str]]:
    """Rank 1 comes once rank 0 has given up; then both exchange something else."""
    store = context.store("late")
    if context.rank == 1:
        store.get("given up")
    text = refused(context, 0.5 if context.rank == 0 else ENDLESS_S)
    if context.rank == 0:
        store.set("given up", "1")
    return text, exchanged(context, f"new {context.rank}", ENDLESS_S)


def test_a_rank_that_comes_after_another_gave_up_hears_of_it() -> None:
    """Given rank 0 that has given an exchange up, when rank 1 comes, then it gets an error that names rank 0, and the
    next exchange has the values that both gave to it."""
    (first, now), (second, now_too) = run_ranks(late, 2)
    assert "global rank 0 of [0, 1]: global rank(s) [1] did not reach 'swap' within 0.5 s" in first
    assert "global rank 1 of [0, 1]: it came to 'swap' after global rank 0 had given up waiting for [1]" in second
    assert now == now_too == ["new 0", "new 1"]


class Stuck:
    """A store that answers nothing until it is let go, as one whose process is stopped."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.answers = threading.Event()

    def __getattr__(self, name: str) -> Any:
        """The store's method, once it answers."""
        call = getattr(self.store, name)

        def answered(*arguments: Any) -> Any:
            self.answers.wait()
            return call(*arguments)

        return answered


def cut_off(context: RankContext) -> str:
    """Rank 0's store does not answer until rank 0 has given up; rank 1 waits."""
    store = Stuck(distributed_c10d._get_default_store())
    if context.rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(distributed_c10d, "_get_default_store", lambda: store)
            text = refused(context, 0.2)
        store.answers.set()
        (talk,) = (thread for thread in threading.enumerate() if thread.name == "sglang_fl-exchange")
        talk.join()
        return text
    return refused(context, ENDLESS_S)


def test_who_waits_hears_that_another_was_cut_off() -> None:
    """Given rank 0 whose store answers only after rank 0 has given up, then what it has left to say is no consent, and
    rank 1, which has all values by then, hears that it failed."""
    first, second = run_ranks(cut_off, 2)
    assert "the store of torch.distributed does not answer" in first
    assert "failed on all ranks" in second and "global rank 0" in second


def waiting(context: RankContext) -> str:
    """Rank 2 stays away until the others have given up."""
    store = context.store("waiting")
    if context.rank == 2:
        for rank in (0, 1):
            store.get(f"{rank} has given up")
    text = refused(context, 0.5 if context.rank == 0 else ENDLESS_S)
    store.set(f"{context.rank} has given up", "1")
    return text


def test_who_waits_hears_that_another_gave_up() -> None:
    """Given rank 1 that waits with rank 0 for rank 2, when rank 0 gives up, then so does rank 1, which names rank 2 as
    well, and rank 2 hears it when it comes."""
    first, second, third = run_ranks(waiting, 3)
    for text in (first, second):
        assert "global rank(s) [2] did not reach 'swap'" in text
    assert "global rank 2 of [0, 1, 2]: it came to 'swap' after global rank 0 had given up waiting for [2]" in third


def creation_of(context: RankContext, limit_s: float) -> tuple[Creation, Exchange]:
    """A new creation of the group of all ranks, and its first exchange."""
    ranks = tuple(range(context.world_size))
    creation = Creation("tp:0", ranks)
    return creation, Exchange("tp:0", ranks, context.rank, "swap", limit_s, creation=creation)


def have_begun(number: int, ranks: list[int]) -> None:
    """Return once a rank is in the creation of that number."""
    distributed_c10d._get_default_store().wait([f"sglang_fl/tp:0/{ranks}/{number}/begun"])


def away(context: RankContext) -> tuple[list[str], int]:
    """Ranks 0 and 1 give a creation up for want of rank 2, and are in the next one before rank 2 comes."""
    if context.rank < 2:
        creation, exchange = creation_of(context, 0.5 if context.rank == 0 else ENDLESS_S)
        if context.rank == 0:
            have_begun(1, [0, 1, 2])
        with pytest.raises(AgreementError) as raised:
            exchange.run("old")
        creation.give_up(raised.value)
    else:
        have_begun(2, [0, 1, 2])
    creation, exchange = creation_of(context, ENDLESS_S)
    return exchange.run(f"new {context.rank}"), creation.number


def test_a_rank_joins_the_creation_in_which_the_others_wait() -> None:
    """Given a creation that two ranks gave up for want of the third, when they are in another one and the third comes
    for the first time, then it meets them there, and all have the same number of it."""
    values = ["new 0", "new 1", "new 2"]
    assert run_ranks(away, 3) == [(values, 2)] * 3


def gives_up(context: RankContext) -> tuple[str, list[str], int]:
    """Rank 1 leaves a creation with an error in the place of its exchange; then both try again."""
    creation, exchange = creation_of(context, ENDLESS_S)
    text = ""
    if context.rank == 1:
        have_begun(1, [0, 1])
        creation.give_up(MemoryError("no room"))
    else:
        with pytest.raises(AgreementError) as raised:
            exchange.run("old")
        text = str(raised.value)
        creation.give_up(raised.value)
    creation, exchange = creation_of(context, ENDLESS_S)
    return text, exchange.run(f"new {context.rank}"), creation.number


def test_who_waits_hears_that_another_left_the_creation() -> None:
    """Given rank 1 that leaves a creation with an error, then rank 0, which waits without a limit, hears of it with the
    error's words, and both meet in the next one."""
    (text, *now), (_, *now_too) = run_ranks(gives_up, 2)
    assert "'swap' failed on all ranks: global rank 1 has left the creation of the group with MemoryError: no" in text
    assert now == now_too == [["new 0", "new 1"], 2]


def read_slowly(text: str, slow_rank: int) -> str:
    """``text``, to which one rank takes its time."""
    if dist.get_rank() == slow_rank:
        time.sleep(0.3)
    return text


@dataclass(frozen=True)
class Lengthy:
    """What one rank reads as ``text`` only after a while."""

    text: str
    slow_rank: int

    def __reduce__(self) -> tuple[Callable[[str, int], str], tuple[str, int]]:
        """How it is read."""
        return read_slowly, (self.text, self.slow_rank)


def leaves_after_values(context: RankContext) -> bool:
    """All come to the exchange. Rank 0 leaves the creation for what it reads there, as rank 1 will, which is slow."""
    store = context.store("values")
    creation, exchange = creation_of(context, ENDLESS_S)
    assert exchange.run(Lengthy(f"value {context.rank}", slow_rank=1)) == ["value 0", "value 1"]
    if context.rank == 1:
        store.set("has read", "1")
    creation.give_up(AgreementError("the values differ"))
    has_read: bool = store.check(["has read"])
    return has_read


def test_the_first_rank_ends_no_creation_before_the_others_have_read_it() -> None:
    """Given rank 0 that leaves a creation for what all ranks read in it, then it does so once rank 1 has read that:
    SGLang ends a process at once for its error, and torch.distributed's store ends with rank 0's."""
    assert run_ranks(leaves_after_values, 2) == [True, True]


def stays(context: RankContext) -> None:
    """Rank 0 leaves a creation in which rank 1 has begun and stays until rank 0 has left."""
    store = context.store("stays")
    creation, _ = creation_of(context, ENDLESS_S)
    creation.begin()
    if context.rank == 1:
        creation.join(distributed_c10d._get_default_store())
        store.set("is inside", "1")
        store.get("rank 0 has left")
    else:
        store.get("is inside")
        creation.give_up(AgreementError("planted"))
        store.set("rank 0 has left", "1")


def test_the_first_rank_does_not_wait_for_ever_for_those_inside() -> None:
    """Given rank 1 that does not leave a creation, as within a library's call, then rank 0 leaves it all the same."""
    assert run_ranks(stays, 2) == [None, None]
