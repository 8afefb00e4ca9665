"""What a rank's monitor says at once is in the store before that may go, however slowly the store takes it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed import HashStore

from sglang_fl.comm.monitor.board import Board
from sglang_fl.comm.monitor.verdict import Absence, Missing, Stuck, Verdict

_LIMIT_S = 30.0
_VERDICT = Verdict(
    0, Stuck("tp:0 torch", (0, 1), "number 2, barrier", "", 2.0, 2.1), (Missing(1, Absence.STOPPED, ""),)
)


class _Late(HashStore):
    """torch.distributed's store in this process, which takes what is set when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may = threading.Event()
        self.pause_s = 0.0
        self.taken: list[str] = []

    def set(self, key: str, value: str) -> None:
        self.may.wait(_LIMIT_S)
        time.sleep(self.pause_s)
        super().set(key, value)
        self.taken.append(key.rpartition("sglang_fl/monitor/")[2])

    def beat(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.get("sglang_fl/monitor/beat/0"))
        return found


@pytest.fixture
def store() -> Iterator[_Late]:
    late = _Late()
    yield late
    late.may.set()


@pytest.fixture
def board(store: _Late) -> Iterator[Board]:
    made = Board(lambda: store, 0)
    made.start()
    yield made
    store.may.set()
    made.leave({}, _LIMIT_S)


def test_who_gives_up_at_once_after_a_failure_has_told_of_it(board: Board, store: _Late) -> None:
    """Given a slow store, when a verdict, a refusal and the end of the group follow each other at once, then all of it
    is in the store before the end goes on, the verdict before the word that there is one."""
    store.may.set()
    store.pause_s = 0.1
    board.tell("key", _VERDICT)
    board.refuse(["group"], _VERDICT, {"key": 2})
    board.part({"key": 2}, {"key": 1}, _LIMIT_S)
    assert {"verdict/key", "beat/0"} <= set(store.taken)
    beat = store.beat()
    assert (set(beat["refuses"]), beat["given_up"], beat["through"]) == ({"group"}, {"key": 2}, {"key": 1})
    assert beat["concluded"]
    assert store.taken.index("verdict/key") < store.taken.index("beat/0")


def test_a_store_that_takes_nothing_is_waited_for_once(board: Board, store: _Late) -> None:
    """Given a store whose process is stopped, then only the first end of a group waits for it; once it goes on, the
    next one waits until it has the last word."""
    board.part({"first": 1}, {}, 0.05)
    board.part({"second": 2}, {}, 10 * _LIMIT_S)  # longer than a test may take
    assert store.taken == []
    store.may.set()
    _until(lambda: "beat/0" in store.taken)
    store.pause_s = 0.1
    board.part({"third": 3}, {}, _LIMIT_S)
    assert store.taken[-1] == "beat/0" and store.beat()["given_up"] == {"third": 3}


def test_a_store_that_ends_is_not_waited_for(board: Board, store: _Late) -> None:
    """Given a wait for a store, when torch.distributed ends, then so does the wait."""

    def ended() -> Any:
        raise RuntimeError("torch.distributed was ended")

    board._store = ended
    board.part({"key": 1}, {}, 10 * _LIMIT_S)
    assert not board.is_up


def _until(condition: Any) -> None:
    until_s = time.monotonic() + _LIMIT_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.001)
