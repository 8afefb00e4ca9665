"""The monitor's view of a device, with a device that is handmade: no real one can be made to hang on demand here."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from sglang_fl.comm.captures import CAPTURES
from sglang_fl.comm.monitor import EXIT_CODE
from sglang_fl.comm.monitor.watched import Watched
from sglang_fl.comm.recorder import Mark, RecordedCall, Recorder

ROOT = Path(__file__).parents[2]


@dataclass
class Event:
    """A device event that is done when the test says so; counts how often it was asked."""

    is_done: bool = False
    asked: int = 0

    def query(self) -> bool:
        self.asked += 1
        return self.is_done


@dataclass(eq=False)
class DeviceRecorder(Recorder):
    """Calls on a device that is handmade."""

    name: str = "tp:0 made"
    ranks: tuple[int, ...] = (0, 1)
    number: int = 0
    marks: list[Mark] = field(default_factory=list)
    wanted: int = 0
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.device = torch.device("cuda:0")

    def entered(self) -> int:
        return self.number

    def calls(self) -> list[RecordedCall]:
        return [RecordedCall(number, "all_reduce", "float32", 8) for number in range(1, self.number + 1)]

    def under_way(self) -> RecordedCall | None:
        return None

    def ask_for_mark(self) -> None:
        self.wanted += 1

    def take_mark(self) -> Mark | None:
        return self.marks.pop() if self.marks else None

    def mark_now(self) -> Mark | None:
        self.events.append(Event())
        return Mark(self.number, self.events[-1], time.monotonic())

    def refuse(self, reason: str) -> None:
        raise AssertionError("on a device nothing is refused, the process ends")

    def abort(self, limit_s: float) -> bool:
        raise AssertionError("on a device nothing is aborted")


def test_a_mark_that_is_done_takes_the_calls_before_it_along() -> None:
    """Given calls and a mark behind the third, when the mark is done, then nothing is pending and three are done."""
    recorder = DeviceRecorder(number=3)
    watched, event = Watched(recorder, "k", 5.0), Event()
    recorder.marks.append(Mark(3, event, 100.0))
    pending = watched.pending(100.1)
    assert pending is not None and (pending.first, pending.last) == (1, 3)
    event.is_done = True
    assert watched.pending(100.3) is None
    assert watched.done == 3


def test_a_call_is_waited_for_from_when_it_was_seen() -> None:
    """Given a call that was seen at 100 s and marked later, when time passes, then it has waited since 100 s."""
    recorder = DeviceRecorder(number=1)
    watched = Watched(recorder, "k", 5.0)
    assert watched.pending(100.0) is None
    recorder.marks.append(Mark(1, Event(), 101.0))
    pending = watched.pending(103.0)
    assert pending is not None and abs(pending.waited_s - 3.0) < 1e-6


def test_marks_are_asked_for_once_a_second_and_made_where_nothing_is_called() -> None:
    """Given a rank that calls, when the monitor looks, then it asks for a mark each second; when the calls cease for a
    second, then it makes one itself, once."""
    recorder = DeviceRecorder()
    watched = Watched(recorder, "k", 5.0)
    for tick in range(9):
        recorder.number += 1
        watched.pending(100.0 + 0.25 * tick)
    assert recorder.wanted == 3 and not recorder.events
    for tick in range(9, 20):
        watched.pending(100.0 + 0.25 * tick)
    assert len(recorder.events) == 1
    assert watched.pending(105.0) is not None
    recorder.events[0].is_done = True
    assert watched.pending(105.25) is None


def test_no_device_call_during_a_capture() -> None:
    """Given a capture, when the monitor looks, then it makes no device call and finds nothing; afterwards it does."""
    recorder = DeviceRecorder(number=1)
    watched, event = Watched(recorder, "k", 5.0), Event()
    recorder.marks.append(Mark(1, event, 100.0))
    with CAPTURES.capture():
        assert watched.pending(200.0) is None
    assert event.asked == 0
    assert watched.pending(200.0) is not None
    assert event.asked == 1


def _hang() -> None:
    """A process of two ranks by its own word, whose device never finishes."""
    import torch.distributed as dist

    from sglang_fl.comm.exchange import PROCESSES
    from sglang_fl.comm.monitor import MONITOR
    from sglang_fl.comm.processes import Process, this_process

    class Group:
        key = ""

        def __init__(self) -> None:
            self.recorder = DeviceRecorder(number=7)

        def recorders(self) -> tuple[Recorder, ...]:
            return (self.recorder,)

        def operation_limit_s(self) -> float:
            return 1.0

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    other = this_process()
    PROCESSES[1] = Process(other.host, other.machine, other.pid, other.start + 1)  # it has ended
    group = Group()
    MONITOR.watch(group)
    time.sleep(30)
    print("it goes on")


def test_a_device_that_does_not_finish_ends_the_process(tmp_path: Path) -> None:
    """Given device work that never ends, and a peer whose process is gone, when the limit has passed, then the process
    has ended with code 71, has said group, call and rank, has written a dump, and did not go on."""
    program = "from tests.unit.test_monitor_device import _hang; _hang()"
    environment = {"PATH": "/usr/bin:/bin", "SGLANG_FL_COMM_DUMP_DIR": str(tmp_path / "d"), "TMPDIR": str(tmp_path)}
    start_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == EXIT_CODE, done.stderr
    assert time.monotonic() - start_s < 30
    assert "group tp:0 made, global rank 0 of [0, 1]: call number 7, all_reduce float32[8]" in done.stderr
    assert "global rank 1 (process " in done.stderr and "This process ends with code 71." in done.stderr
    assert "it goes on" not in done.stdout
    assert list(tmp_path.rglob("sglang_fl-comm-*.json"))
