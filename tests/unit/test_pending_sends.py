"""Buffers of sends that nobody has received yet: what is held, what is told of those that failed, when it all ends."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import torch

from sglang_fl.comm import point_to_point
from sglang_fl.comm.errors import CollectiveTimeout, CommError, PeerLost
from sglang_fl.comm.point_to_point import P2PWork, PendingSends

LIMIT_S = 30.0


class MadeWork:
    """Is done, or fails, when the test says so."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._is_done = threading.Event()

    def end(self, error: Exception | None = None) -> None:
        self.error = error
        self._is_done.set()

    def wait(self) -> None:
        assert self._is_done.wait(LIMIT_S)
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        return self._is_done.is_set()


def _begin(work: MadeWork, size: int = 1) -> Callable[[], P2PWork]:
    return lambda: P2PWork(work, torch.zeros(size, dtype=torch.uint8))


def _sends_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "sglang_fl-sends"]


def _refuses() -> P2PWork:
    raise TypeError("cannot be sent")


def test_a_send_that_cannot_begin_holds_nothing() -> None:
    """Given sends that raise before they begin, however often, then nothing is held, none counts as lost, and the next
    one finds room."""
    sends = PendingSends("pp:0", LIMIT_S, limit_bytes=10)
    for _ in range(3):
        with pytest.raises(TypeError, match="cannot be sent"):
            sends.start(8, 1, _refuses)
        assert sends.held_bytes == 0
    work = MadeWork()
    sends.start(8, 1, _begin(work, 8))
    work.end()
    assert sends.close(LIMIT_S) == ""


def test_a_send_without_room_ends_with_who_does_not_receive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given sends under way that nobody receives, when the next one does not fit within the limit, then it raises
    CollectiveTimeout with the group, the limit and the ranks that do not receive."""
    monkeypatch.setattr(point_to_point, "_MOMENT_S", 0.0)
    sends, works = PendingSends("pp:0", 0.05, limit_bytes=10), [MadeWork() for _ in range(3)]
    for work, dst in zip(works, (3, 3, 2), strict=True):
        sends.start(3, dst, _begin(work, 3))
    with pytest.raises(CollectiveTimeout) as raised:
        sends.start(4, 1, _begin(MadeWork(), 4))
    assert str(raised.value) == (
        "group pp:0: send of 4 bytes to global rank 1 found no room within 0.05 s: 9 of 10 bytes are held for sends "
        "that no rank has received, 1 to global rank 2, 2 to global rank 3; each must call recv"
    )
    for work in works:
        work.end()
    assert sends.close(LIMIT_S) == ""


def test_every_send_that_failed_is_counted() -> None:
    """Given sends that failed, one that is under way and one that was received, when what is lost is asked for, then
    each but the last is counted with its destination, and the first error is told; the next send raises it."""
    sends, works = PendingSends("pp:0", LIMIT_S), [MadeWork() for _ in range(4)]
    for work, dst in zip(works, (1, 2, 1, 1), strict=True):
        sends.start(1, dst, _begin(work))
    works[0].end()
    works[1].end(PeerLost("it is gone"))
    works[2].end(ValueError("broken"))
    deadline = threading.Event()
    while sends.held_bytes > 1:
        assert not deadline.wait(0.001)
    wanted = "3 send(s) that no rank received: 2 to global rank 1, 1 to global rank 2; what failed first: it is gone"
    assert sends.drain(0.0) == wanted
    with pytest.raises(PeerLost, match="an earlier send failed: it is gone"):
        sends.start(1, 1, _refuses)
    works[3].end()
    assert sends.close(LIMIT_S) == wanted.replace("3 send", "2 send").replace(
        "2 to global rank 1", "1 to global rank 1"
    )


def test_a_closed_one_refuses_and_its_thread_has_ended() -> None:
    """Given a send that was received, when the sends are closed, then their thread has ended, and a further one is
    refused, also one that was waiting for room."""
    before = _sends_threads()
    sends, work, waits = PendingSends("pp:0", LIMIT_S, limit_bytes=1), MadeWork(), threading.Event()
    texts: list[str] = []

    def no_room() -> None:
        waits.set()
        with pytest.raises(CommError) as raised:
            sends.start(1, 1, _refuses)
        texts.append(str(raised.value))

    sends.start(1, 1, _begin(work))
    waiting = threading.Thread(target=no_room)
    waiting.start()
    assert waits.wait(LIMIT_S)
    assert sends.close(0.0) == "1 send(s) that no rank received: 1 to global rank 1"
    waiting.join(LIMIT_S)
    work.end()
    thread = sends._thread
    assert thread is not None
    thread.join(LIMIT_S)
    no_room()
    assert texts == ["group pp:0 is destroyed; make a new one"] * 2
    assert _sends_threads() == before


def test_dropped_sends_end_their_thread_once_all_are_received() -> None:
    """Given sends that are dropped without an end while one is under way, when it has been received, then nothing of
    them is left, nor is their thread."""
    sends, work = PendingSends("pp:0", LIMIT_S), MadeWork()
    sends.start(1, 1, _begin(work))
    reference, thread = weakref.ref(sends), sends._thread
    assert thread is not None
    del sends
    gc.collect()
    assert reference() is not None and thread.is_alive()  # what is under way must not be lost at the process's end
    work.end()
    thread.join(LIMIT_S)
    gc.collect()
    assert reference() is None and not thread.is_alive()


def test_what_is_lost_is_told_at_the_exit(caplog: pytest.LogCaptureFixture) -> None:
    """Given groups that were dropped, destroyed or kept with a send that failed, when the process ends, then those that
    have not told it yet do so."""
    groups = [PendingSends(name, LIMIT_S) for name in ("dropped", "kept", "destroyed")]
    for sends in groups:
        work = MadeWork()
        sends.start(1, 1, _begin(work))
        work.end(CommError("it is gone"))
        sends.drain(LIMIT_S)
    assert "it is gone" in groups[2].close(LIMIT_S)
    kept = groups[1]
    del groups, sends
    gc.collect()
    with caplog.at_level("ERROR", logger="sglang_fl.comm"):
        point_to_point._drain_all()
    lost = "the process ends with 1 send(s) that no rank received: 1 to global rank 1; what failed first: it is gone"
    assert sorted(caplog.messages) == [f"[sglang_fl] group {name}: {lost}" for name in ("dropped", "kept")]
    kept.close(0.0)
    for sends in list(point_to_point._with_losses):
        sends.close(0.0)
