"""The monitor in trouble of its own: what it cannot look after ends with that word, and the rest is looked after."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from sglang_fl.comm import threads
from sglang_fl.comm.errors import CommError
from sglang_fl.comm.monitor import Monitor, group_watch, watch_group
from sglang_fl.comm.monitor import monitor as monitor_module
from sglang_fl.comm.recorder import RecordedCall
from sglang_fl.comm.ring import CallRing
from sglang_fl.comm.types import GroupContext

NEVER_S = 60.0
CPU = torch.device("cpu")


class Ring(CallRing):
    """One call is under way in it, until the monitor ends it."""

    def __init__(self, name: str, device: torch.device = CPU) -> None:
        self.ended = threading.Event()
        super().__init__(f"tp:0 {name}", (0, 1), CPU, interrupt=self._interrupt)
        self.device = device
        self.enter("all_reduce", torch.float32, 8)

    def _interrupt(self) -> bool:
        self.ended.set()
        return True


class BrokenRing(Ring):
    """Nothing can be found out about its call."""

    def under_way(self) -> RecordedCall | None:
        raise MemoryError("nothing left")

    def take_mark(self) -> Any:
        raise MemoryError("nothing left")


class Group:
    """What the monitor watches."""

    def __init__(self, *recorders: Ring) -> None:
        self._recorders = recorders

    def recorders(self) -> tuple[Ring, ...]:
        return self._recorders

    def operation_limit_s(self) -> float:
        return 0.5


class BrokenGroup(Group):
    """It cannot say what is to be watched."""

    def recorders(self) -> tuple[Ring, ...]:
        raise RuntimeError("dictionary changed size during iteration")


@pytest.fixture
def monitor(tmp_path: Path) -> Iterator[Monitor]:
    """One that looks by itself, in a process that is rank 0."""
    found = Monitor()
    found.dump_folder = tmp_path / "dumps"
    thread = threading.Thread(target=found._run, daemon=True)
    found.start = thread.start  # type: ignore[attr-defined]
    yield found
    found._stop.set()
    if thread.ident is not None:
        thread.join()


def _look(monitor: Any, *groups: Group) -> None:
    for group in groups:
        monitor._groups.add(group)
    monitor.start()


UNABLE = "the monitor of this process can no longer tell whether its calls complete: MemoryError: nothing left"


def test_one_group_s_trouble_is_not_another_s(monitor: Monitor) -> None:
    """Given a group about whose call nothing can be found out, and one whose call hangs, then both calls are ended: the
    first with the monitor's trouble, the second with its own verdict."""
    broken, hanging = BrokenRing("broken"), Ring("hanging")
    groups = [Group(broken), Group(hanging)]
    _look(monitor, *groups)
    assert hanging.ended.wait(NEVER_S) and broken.ended.wait(NEVER_S)
    assert broken.refusal is not None and broken.refusal.startswith("group tp:0 broken, global rank 0 of [0, 1]: ")
    assert UNABLE in broken.refusal
    assert hanging.refusal is not None and "call number 1, all_reduce float32[8] did not complete" in hanging.refusal


def test_a_group_that_does_not_say_what_to_watch_is_one_group_s_trouble(monitor: Monitor) -> None:
    """Given a group whose recorders cannot be asked for, then what was noticed of it is watched, and the others."""
    noticed, hanging = Ring("noticed"), Ring("hanging")
    monitor._thread = threading.current_thread()
    monitor.notice(noticed, 0.5)
    groups = [BrokenGroup(noticed), Group(hanging)]
    _look(monitor, *groups)
    for ring in (noticed, hanging):
        assert ring.ended.wait(NEVER_S)
        assert ring.refusal is not None and "did not complete within 0.5 s" in ring.refusal


@pytest.mark.parametrize("part", ["_verdict", "_conclude", "_reason", "_beside"])
def test_a_verdict_that_does_not_fall_ends_the_call(
    monitor: Monitor, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given that no verdict can be found or told, then the call is ended and says so."""

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("nothing left")

    monkeypatch.setattr(monitor, part, fail)
    hanging = Ring("hanging")
    group = Group(hanging)
    _look(monitor, group)
    assert hanging.ended.wait(NEVER_S)
    assert hanging.refusal is not None and UNABLE in hanging.refusal


def test_a_monitor_that_fails_as_a_whole_ends_the_calls(monitor: Monitor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given that every look fails before anything is seen, then the calls are ended and say so."""
    hanging = Ring("hanging")
    monitor._thread = threading.current_thread()
    monitor.notice(hanging, 0.5)

    def fail() -> None:
        raise MemoryError("nothing left")

    monkeypatch.setattr(monitor, "_refresh", fail)
    _look(monitor)
    assert hanging.ended.wait(NEVER_S)
    assert hanging.refusal is not None and UNABLE in hanging.refusal


def test_a_device_that_cannot_be_looked_after_ends_the_process(
    monitor: Monitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a group on a device about whose work nothing can be found out, then the process ends and says so."""
    said: list[str] = []
    ended = threading.Event()

    def end(text: str) -> None:
        said.append(text)
        ended.set()

    monkeypatch.setattr(monitor_module, "end_process", end)
    broken = BrokenRing("broken", torch.device("cuda:0"))
    monkeypatch.setattr(broken, "refuse", lambda _: None)
    group = Group(broken)
    _look(monitor, group)
    assert ended.wait(NEVER_S)
    assert UNABLE in said[0]


@pytest.mark.parametrize("is_ready", [True, False])
def test_without_a_further_thread_the_verdict_falls(
    monitor: Monitor, is_ready: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Given no further thread to be had, then the call ends with its verdict; the one that stands by writes the dump,
    and without it the log says that there is none."""
    standby = threads.Worker("test-standby")
    monkeypatch.setattr(threads, "STANDBY", standby)
    monkeypatch.setattr(threads, "LOG", threads.Log(threads.logging.getLogger("sglang_fl.comm")))
    monkeypatch.setattr(monitor_module, "LOG", threads.LOG)
    if is_ready:
        standby.start()
    hanging = Ring("hanging")
    group = Group(hanging)
    _look(monitor, group)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert hanging.ended.wait(NEVER_S)
    assert hanging.refusal is not None and "did not complete within 0.5 s" in hanging.refusal
    assert bool(list((tmp_path / "dumps").glob("*.json"))) is is_ready
    assert (
        "no dump of the calls was written: the thread sglang_fl-dump cannot be started" in caplog.text
    ) is not is_ready


def test_a_call_whose_reason_cannot_be_found_says_its_name(monitor: Monitor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a call that failed, and a monitor that cannot look for the reason, then the error names call and both."""
    ring = Ring("torch")
    monitor._thread = threading.current_thread()
    monitor.notice(ring, 0.5)

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("nothing left")

    monkeypatch.setattr(monitor, "_cause", fail)
    row = ring.rows[1]
    assert row is not None
    told = ring.failed(row, RuntimeError("connection reset"), (8,))
    assert isinstance(told, CommError)
    assert "call number 1, all_reduce float32[8] of shape [8]" in str(told)
    assert "connection reset" in str(told) and "MemoryError: nothing left" in str(told)


def test_a_process_whose_calls_are_not_watched_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """Given groups of a process without a recorder, then its log says once that their calls may wait for ever."""
    group_watch._say_unwatched.cache_clear()
    group = cast(Any, None)  # nothing here reaches torch.distributed
    for name in ("tp:0", "pp:0"):
        watch_group(GroupContext(name, (0, 1), 0, CPU, group, group, records=False))
    watch_group(GroupContext("dp:0", (0,), 0, CPU, group, group, records=False))
    assert caplog.text.count("SGLANG_FL_COMM_RECORD=0: calls of groups are not watched") == 1
    assert "waits for ever" in caplog.text
