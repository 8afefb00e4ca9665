"""Who is missing, as the monitor sees it: processes of this machine for real, those of another one by their beats."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sglang_fl.comm.exchange import PROCESSES
from sglang_fl.comm.monitor.absent import SILENCE_S, Peers
from sglang_fl.comm.monitor.board import Beat
from sglang_fl.comm.monitor.verdict import Absence, Missing, Stuck, Verdict, as_told, to_tell
from sglang_fl.comm.processes import Process, State, this_process

_LAST = "its last call of this group is number"


@dataclass
class Said:
    """What has been read of the peers, in the place of a board."""

    is_up: bool = True
    beats: dict[int, Beat] = field(default_factory=dict)
    heard_s: dict[int, float] = field(default_factory=dict)
    read_s: float = 1e12

    def ask(self, *_: object) -> None:
        """Everything has been read already."""

    def note_silence(self) -> None:
        """Nothing waits for it."""


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process of this machine, as rank 1."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"], stdout=-1
    )
    assert process.stdout is not None and process.stdout.readline()
    here = this_process()
    start = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
    PROCESSES[1] = Process(here.host, here.machine, process.pid, start)
    yield process
    process.kill()
    process.wait()
    del PROCESSES[1]


def _peers(said: Any) -> Peers:
    return Peers(0, said)


def _kinds(missing: tuple[Missing, ...]) -> list[tuple[int, Absence]]:
    return [(entry.rank, entry.absence) for entry in missing]


def test_a_process_is_told_from_one_of_the_same_number(child: subprocess.Popen[bytes]) -> None:
    """Given a process, when it runs, is stopped, goes on, dies and is reaped, then its state is that; another start
    time is another process, and another machine's is not known."""
    process = PROCESSES[1]
    assert process.state() is State.RUNS
    os.kill(child.pid, signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert process.state() is State.STOPPED
    os.kill(child.pid, signal.SIGCONT)
    assert Process(process.host, process.machine, process.pid, process.start + 1).state() is State.GONE
    assert Process("other", "another boot/1", process.pid, process.start).state() is State.ELSEWHERE
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process.state() is State.GONE  # a zombie
    child.wait()
    assert process.state() is State.GONE


def test_a_killed_rank_is_lost_after_a_moment(child: subprocess.Popen[bytes]) -> None:
    """Given a rank of this machine that is killed, when a call is under way, then it is lost after a second, for it may
    have done its part; where the call has failed, at once."""
    child.kill()
    child.wait()
    peers = _peers(Said())
    assert peers.lost([0, 1], 100.0) == ()
    assert _kinds(peers.lost([0, 1], 101.1)) == [(1, Absence.KILLED)]
    assert _kinds(_peers(Said()).lost([0, 1], 100.0, has_failed=True)) == [(1, Absence.KILLED)]


def test_a_rank_that_said_goodbye_has_ended_by_itself(child: subprocess.Popen[bytes]) -> None:
    """Given a rank that said that it leaves, when it is gone, then it ended by itself."""
    child.kill()
    child.wait()
    peers = _peers(Said(beats={1: Beat(3, left=True)}))
    assert _kinds(peers.lost([0, 1], 100.0, has_failed=True)) == [(1, Absence.ENDED)]
    assert _kinds(peers.lost([0, 1], 103.1)) == [(1, Absence.ENDED)]
    assert peers.lost([0, 1], 130.0, on_device=True) == ()  # this rank's own work may lie before the last mark
    assert _kinds(peers.lost([0, 1], 160.1, on_device=True)) == [(1, Absence.ENDED)]


def test_who_ended_after_its_part_is_not_missing_from_it(child: subprocess.Popen[bytes]) -> None:
    """Given a rank that said that it had returned from a call when it ended, then it is not lost to that call, and not
    missing from it, unless that has failed; to the next call it is."""
    child.kill()
    child.wait()
    said = Said(beats={1: Beat(3, left=True, through={"k": 4})})
    peers = _peers(said)
    assert peers.lost([0, 1], 100.0, call=("k", 4)) == peers.lost([0, 1], 130.0, call=("k", 4)) == ()
    assert _peers(said).missing([0, 1], "k", 4) == ()
    for call in (("k", 5), ("other", 1)):
        peers = _peers(said)
        assert peers.lost([0, 1], 100.0, call=call) == ()
        assert _kinds(peers.lost([0, 1], 103.1, call=call)) == [(1, Absence.ENDED)]
        assert _kinds(_peers(said).missing([0, 1], *call)) == [(1, Absence.ENDED)]
    assert _kinds(_peers(said).lost([0, 1], 100.0, has_failed=True, call=("k", 4))) == [(1, Absence.ENDED)]


def test_who_followed_another_rank_is_not_blamed(child: subprocess.Popen[bytes]) -> None:
    """Given two ranks that are gone, one of which had found the other missing, then the other one alone is named; where
    nobody else is gone, it is named itself after a while."""
    child.kill()
    child.wait()
    PROCESSES[2] = PROCESSES[1]
    try:
        peers = _peers(Said(beats={2: Beat(3, left=True, concluded=True)}))
        assert _kinds(peers.lost([0, 1, 2], 100.0, has_failed=True)) == [(1, Absence.KILLED)]
        assert peers.lost([0, 2], 100.5) == ()
        assert _kinds(peers.lost([0, 2], 105.1)) == [(2, Absence.FOLLOWED)]
    finally:
        del PROCESSES[2]


def test_a_rank_of_another_machine_is_lost_by_its_silence() -> None:
    """Given a rank of another machine, when a call is under way, then it is lost once it has said nothing for 30 s
    since then; what was before that call does not count, and a beat starts the time anew."""
    PROCESSES[1] = Process("other", "another boot/1", 1, 1)
    try:
        said = Said()
        peers = _peers(said)
        assert peers.lost([0, 1], 0.0) == ()
        said.heard_s[1] = 0.3
        assert peers.lost([0, 1], 3600.0) == ()  # an hour without a slow call
        for now_s in range(3601, 3600 + int(SILENCE_S)):
            assert peers.lost([0, 1], float(now_s)) == ()
        said.heard_s[1] = 3629.0
        assert peers.lost([0, 1], 3630.1) == ()
        for now_s in range(3631, 3659):
            assert peers.lost([0, 1], float(now_s)) == ()
        assert _kinds(peers.lost([0, 1], 3659.5)) == [(1, Absence.SILENT)]
    finally:
        del PROCESSES[1]


def test_a_rank_elsewhere_is_named_with_its_last_call(child: subprocess.Popen[bytes]) -> None:
    """Given a rank that runs and has entered five calls, when the sixth times out, then it is elsewhere, with what it
    waits in; when it is stopped, that is what is said."""
    peers = _peers(Said(beats={1: Beat(3, {"k": 5}, "pp:0 flagcx 0>1 number 2", {"k": (5, "recv float32[7] rank 0")})}))
    (missing,) = peers.missing([0, 1], "k", 6)
    assert missing.absence is Absence.ELSEWHERE
    assert missing.last == "its last call of this group is number 5, and it waits in pp:0 flagcx 0>1 number 2"
    assert peers.missing([0, 1], "k", 5, "send float32[7] rank 1") == ()
    os.kill(child.pid, signal.SIGSTOP)
    until_s = time.monotonic() + 5
    while PROCESSES[1].state() is not State.STOPPED and time.monotonic() < until_s:
        time.sleep(0.01)
    assert _kinds(peers.missing([0, 1], "k", 5)) == [(1, Absence.STOPPED)]


@pytest.mark.parametrize(
    ("beat", "absence", "last"),
    [
        (Beat(3, {"k": 5}, calls={"k": (5, "gather int8[3]")}), Absence.OTHERWISE, "number 5, gather int8[3]"),
        (
            Beat(3, {"k": 6}, calls={"k": (6, "reduce int8[3]")}),
            Absence.LEFT,
            "its last call of this group is number 6",
        ),
        (Beat(3, {"k": 5}), Absence.LEFT, f"{_LAST} 5"),
        (Beat(3, {}, given_up={"k": 4}), Absence.GAVE_UP, "its last call of it was number 4"),
        (Beat(3, {}, given_up={"k": 5}), Absence.LEFT, f"{_LAST} 5"),
        (None, Absence.UNKNOWN, ""),
    ],
)
def test_what_a_living_rank_does_instead_is_named(
    child: subprocess.Popen[bytes], beat: Beat | None, absence: Absence, last: str
) -> None:
    """Given a rank that made another call as that number, has left it, gave the group up, or of which nothing is known,
    when the call times out, then that is said of it, and not that it is in the call."""
    (missing,) = _peers(Said(beats={} if beat is None else {1: beat})).missing([0, 1], "k", 5, "reduce int8[3]")
    assert (missing.absence, missing.last) == (absence, last)
    stuck = Stuck("tp:0 flagcx", (0, 1), "number 5, reduce int8[3]", "", 2.0, 2.1)
    text = Verdict(0, stuck, (missing,)).text()
    assert "all ranks have entered it" not in text and str(missing) in text


def test_a_rank_in_the_same_call_is_not_missing(child: subprocess.Popen[bytes]) -> None:
    """Given a rank in the same call, or one whose earlier transfer is still open beside it, then nobody is missing; on
    a device, where it is seen late what is done, neither is one that entered it."""
    for calls in ({"k": (5, "reduce int8[3]")}, {"k": (4, "send int8[3] rank 1")}):
        said = Said(beats={1: Beat(3, {"k": 5}, calls=calls)})
        assert _peers(said).missing([0, 1], "k", 5, "reduce int8[3]") == ()
    said = Said(beats={1: Beat(3, {"k": 5})})
    assert _peers(said).missing([0, 1], "k", 5, "reduce int8[3]", is_host=False) == ()


def test_nothing_is_claimed_where_the_store_does_not_answer(child: subprocess.Popen[bytes]) -> None:
    """Given a rank whose last word is old, as the store no longer answers, then it is not said that it is elsewhere."""
    said = Said(beats={1: Beat(3, {"k": 1})}, is_up=False, read_s=0.0)
    (missing,) = _peers(said).missing([0, 1], "k", 5, "reduce int8[3]")
    assert (missing.absence, missing.last) == (Absence.UNKNOWN, "torch.distributed's store does not answer")


class _Unanswered(Said):
    """Of a store whose process is stopped; counts how often a reader looks whether it has answered."""

    looks = 0
    answers_after = 10**9

    def __init__(self) -> None:
        super().__init__(read_s=0.0)

    def __getattribute__(self, name: str) -> Any:
        if name == "is_up":
            self.looks += 1
            if self.looks > self.answers_after:
                self.read_s = time.monotonic()
        return super().__getattribute__(name)


def test_a_store_that_does_not_answer_is_waited_for_once(child: subprocess.Popen[bytes]) -> None:
    """Given a store that does not answer, when who is missing is asked for several calls, then only the first waits;
    once it has answered, the next one does again."""
    said = _Unanswered()
    peers = _peers(said)
    assert not peers.read([1], "k")
    assert said.looks > 2
    for key in ("l", "m"):
        said.looks = 0
        assert not peers.read([1], key)
        assert said.looks <= 1
    said.read_s, said.looks, said.answers_after = time.monotonic(), 0, 3
    assert peers.read([1], "n")


def test_every_missing_rank_is_named(child: subprocess.Popen[bytes]) -> None:
    """Given a rank that is stopped, one that was killed and one that is elsewhere, then each is named with what became
    of it; where it cannot be told why one has ended, the stopped one comes first."""
    os.kill(child.pid, signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    here = PROCESSES[1]
    PROCESSES[2] = Process(here.host, here.machine, here.pid, here.start + 1)  # there is no such one
    PROCESSES[3] = this_process()
    try:
        said = Said(beats={3: Beat(3, {"k": 1}), 2: Beat(3, {"k": 4})})
        assert _kinds(_peers(said).missing([0, 1, 2, 3], "k", 5, "reduce int8[3]")) == [
            (2, Absence.KILLED),
            (1, Absence.STOPPED),
            (3, Absence.ELSEWHERE),
        ]
        assert _kinds(_peers(said).lost([0, 1, 2, 3], 1.0, has_failed=True)) == [
            (2, Absence.KILLED),
            (1, Absence.STOPPED),
        ]
        said = Said(is_up=False, read_s=0.0)
        peers = _peers(said)
        assert peers.lost([0, 1, 2, 3], 1.0, has_failed=True) == ()
        assert _kinds(peers.lost([0, 1, 2, 3], 1.6, has_failed=True)) == [(1, Absence.STOPPED), (2, Absence.AFTER)]
    finally:
        del PROCESSES[2], PROCESSES[3]


def test_a_verdict_survives_its_way_to_a_peer() -> None:
    """Given a verdict, when it is told, then the peer reads the same; something else is an error."""
    stuck = Stuck("tp:0 flagcx", (0, 1), "number 4, all_reduce float32[8]", "model.py:3 forward", 600.0, 600.2)
    verdict = Verdict(0, stuck, (Missing(1, Absence.STOPPED, "process 7 on a"),))
    assert as_told(to_tell(verdict)) == verdict
    with pytest.raises(KeyError):
        as_told("{}")
    assert verdict.text().count("global rank 1 (process 7 on a) is stopped") == 1


@pytest.mark.parametrize(
    ("entered", "last"),
    [({}, "it has made no call of these"), ({"pp:0 1>0": 3}, "its last call of this group is number 3")],
)
def test_a_rank_that_does_not_know_the_recorder_has_entered_none_of_its_calls(
    child: subprocess.Popen[bytes], entered: dict[str, int], last: str
) -> None:
    """Given a living peer that has never sent, or not often enough, when a receive waits, then it is elsewhere."""
    (missing,) = _peers(Said(beats={1: Beat(entered=entered)})).missing((0, 1), "pp:0 1>0", 4)
    assert (missing.rank, missing.absence) == (1, Absence.ELSEWHERE)
    assert missing.last.startswith(last)
