"""Dumps of recorded calls: what is in them, that the folder is private and limited, and that SIGUSR1 asks for one."""

from __future__ import annotations

import json
import os
import reprlib
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_fl.comm import dumps
from sglang_fl.comm.dump_fields import damage
from sglang_fl.comm.dumps import PATTERN, DumpError, check_folder, dump_calls, include, name_recorder, write_dump
from sglang_fl.comm.monitor.monitor import Monitor
from sglang_fl.comm.recorder import RecordedCall, Recorder, from_row
from sglang_fl.testing.ranks import RankContext, run_ranks
from tests.unit.handmade_recorder import HandmadeRecorder


def calls(count: int, place: str = "model.py:10 forward") -> list[RecordedCall]:
    """``count`` calls that are done."""
    return [RecordedCall(n, "all_reduce", "float32", 8, None, 0, False, place, n, n + 0.5) for n in range(1, count + 1)]


def recorder(count: int = 2, name: str = "tp:0 flagcx") -> HandmadeRecorder:
    """One of two ranks."""
    return HandmadeRecorder(name, (0, 1), calls(count))


def read(path: Path) -> dict[str, Any]:
    """A dump."""
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def test_a_dump_holds_the_process_the_reason_the_calls_and_the_stacks(tmp_path: Path) -> None:
    """Given two calls, the second under way, when dumped, then JSON has them with who, when, why and where."""
    under_way = RecordedCall(3, "broadcast", "int64", 4, 1, 0, False, "pp.py:7 recv", 12.5)
    one = HandmadeRecorder("tp:0 flagcx", (0, 1), [*calls(2), under_way])
    document = read(write_dump("just because", [one, one], tmp_path, rank=1, done={"tp:0 flagcx": 2}))
    assert (document["rank"], document["pid"], document["reason"]) == (1, os.getpid(), "just because")
    assert abs(document["time_s"] - time.time()) < 60
    (record,) = document["recorders"]
    assert (record["name"], record["ranks"], record["entered"], record["done"]) == ("tp:0 flagcx", [0, 1], 3, 2)
    assert from_row(record["under_way"]) == under_way
    assert [from_row(row) for row in record["calls"]] == one.calls()
    (main,) = [thread for thread in document["threads"] if thread["name"] == "MainThread"]
    assert any("test_a_dump_holds" in line for line in main["stack"])


class Running(HandmadeRecorder):
    """One whose calls go on while they are read: ``number`` were entered before."""

    number = 0

    def entered(self) -> int:
        return self.number


@pytest.mark.parametrize(
    ("seen", "entered", "kept"),
    [
        ((2, 5, 6, 7, 8, 9), 7, (5, 6, 7)),
        ((1, 2, 3), 4, (1, 2, 3)),
        ((8, 9), 7, ()),
    ],
    ids=["overtaken", "not written yet", "all overtaken"],
)
def test_a_dump_has_no_gap_where_calls_went_on(
    tmp_path: Path, seen: tuple[int, ...], entered: int, kept: tuple[int, ...]
) -> None:
    """Given calls that were entered while the ring was read, so that some of the oldest are lost and later ones are
    seen, or one that was counted and not written yet, then the dump has the latest that follow each other, and is
    none that its reader takes for damaged."""
    running = Running("tp:0 flagcx", (0, 1), [replace(calls(1)[0], number=number) for number in seen])
    running.number = entered
    document = read(write_dump("test", [running], tmp_path))
    (record,) = document["recorders"]
    assert tuple(row["number"] for row in record["calls"]) == kept
    assert record["entered"] == (kept[-1] if kept else entered)
    assert damage(document) == ""


def test_the_dump_of_a_process_has_what_its_owners_have_as_long_as_they_live(tmp_path: Path) -> None:
    """Given two owners that share a recorder, then it is in the dump once, and not any more when both are gone."""

    class Owner:
        def __init__(self, *recorders: Recorder) -> None:
            self._recorders = recorders

        def recorders(self) -> tuple[Recorder, ...]:
            return self._recorders

    shared, other = recorder(name="shared"), recorder(name="other")
    owners = [Owner(shared), Owner(shared, other)]
    for owner in owners:
        include(owner)
    names = [record["name"] for record in read(dump_calls("on request", tmp_path))["recorders"]]
    assert sorted(names) == ["other", "shared"]
    del owner
    owners.clear()
    assert read(dump_calls("on request", tmp_path))["recorders"] == []


def test_the_recorders_of_a_dump_are_in_the_order_of_their_owners(tmp_path: Path) -> None:
    """Given many owners of one recorder each, wherever they lie in memory, then the dump has the oldest one's first."""
    owners = [_Owner(f"group {number}") for number in range(30)]
    for owner in (*owners[::2], *owners[1::2]):
        include(owner)
    names = [record["name"] for record in read(dump_calls(folder=tmp_path))["recorders"]]
    assert names == [f"group {number}" for number in (*range(0, 30, 2), *range(1, 30, 2))]


def test_a_dump_has_what_names_a_recorder_on_all_its_ranks(tmp_path: Path) -> None:
    """Given recorders of one name, of which the monitor has named some, then the dump has their keys, of a later
    creation and of the second of one creation others, and none of one that nobody has named."""
    monitor, recorders = Monitor(), [recorder() for _ in range(5)]
    for one, creation in zip(recorders[:3], (1, 2, 2), strict=True):
        monitor.made_in(one, creation)
    name_recorder(recorders[3], "by hand")
    keys = [record["key"] for record in read(write_dump("test", recorders, tmp_path))["recorders"]]
    made = "tp:0 flagcx [0, 1]"
    assert keys == [f"{made} 1", f"{made} 2", f"{made} 2#2", "by hand", None]


@pytest.mark.parametrize(
    ("text", "rank"), [("3", 3), ("", 0), ("two", 0), ("2²", 0), ("9" * 5000, 0)], ids=reprlib.repr
)
def test_the_rank_of_a_process_without_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, rank: int
) -> None:
    """Given the variable RANK, then it is the dump's rank; where it is no number, the dump is written all the same."""
    monkeypatch.setenv("RANK", text)
    assert read(write_dump("test", [recorder()], tmp_path))["rank"] == rank


def test_the_folder_of_the_user_is_made_for_the_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given no folder in the settings and an open umask, then folder and file are readable by their owner alone."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    former = os.umask(0)
    try:
        path = write_dump("test", [recorder()])
    finally:
        os.umask(former)
    assert path.parent == tmp_path / f"sglang_fl-{os.geteuid()}"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_linked_folder_is_refused(tmp_path: Path) -> None:
    """Given a folder that someone has put a link in place of, then an error, and nothing is written behind it."""
    target, link = tmp_path / "target", tmp_path / "link"
    target.mkdir()
    link.symlink_to(target)
    with pytest.raises(DumpError, match=r"link to .*target.*SGLANG_FL_COMM_DUMP_DIR"):
        write_dump("test", [recorder()], link)
    assert list(target.iterdir()) == []


def test_a_folder_of_another_user_or_open_to_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a folder that is another user's, or that others can write into, then an error that says so."""
    tmp_path.chmod(0o770)
    with pytest.raises(DumpError, match=r"mode 0770: others can write into it. chmod 700"):
        write_dump("test", [recorder()], tmp_path)
    tmp_path.chmod(0o700)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(DumpError, match=rf"belongs to user {owner}, this process runs as {owner + 1}"):
        write_dump("test", [recorder()], tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["missing/deeper", "file"])
def test_a_folder_that_cannot_be_is_an_error_that_names_it(tmp_path: Path, place: str) -> None:
    """Given a folder below none, or a file, then an error of the communication's family with the place."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DumpError, match=f"{tmp_path / place}.*SGLANG_FL_COMM_DUMP_DIR"):
        write_dump("test", [recorder()], tmp_path / place)


def test_a_folder_can_be_checked_before_it_is_needed(tmp_path: Path) -> None:
    """Given a folder that does not exist yet, then it is made and left empty; one that cannot be is an error now."""
    check_folder(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    with pytest.raises(DumpError, match="SGLANG_FL_COMM_DUMP_DIR"):
        check_folder(tmp_path / "missing" / "deeper")


def test_at_most_64_dumps_are_kept_and_nothing_else_is_touched(tmp_path: Path) -> None:
    """Given 70 dumps and a file of the user's, when one more is written, then the 63 latest and it are left."""
    (tmp_path / "notes.txt").write_text("mine")
    paths = [write_dump("test", [recorder()], tmp_path) for _ in range(70)]
    for age, path in enumerate(reversed(paths)):
        if path.exists():
            os.utime(path, (1e9 - age, 1e9 - age))
    newest = write_dump("test", [recorder()], tmp_path)
    assert {*paths[-63:], newest} == set(tmp_path.glob(PATTERN))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_at_most_64_mib_are_kept(tmp_path: Path) -> None:
    """Given dumps of 63 MiB in all and an unfinished one, when one more comes, then the oldest go for it."""
    for number in range(9):
        path = tmp_path / f"sglang_fl-comm-host-{number}.json{'.partial' if number == 0 else ''}"
        path.write_bytes(b"")
        os.truncate(path, 7 * 2**20)
        os.utime(path, (1e9 + number, 1e9 + number))
    newest = write_dump("test", [recorder(1024, f"group {n}") for n in range(7)], tmp_path)
    assert newest.stat().st_size > 2**20
    assert not list(tmp_path.glob("*.partial"))
    kept = list(tmp_path.glob(PATTERN))
    assert len(kept) == 9 and newest in kept
    assert sum(path.stat().st_size for path in kept) <= 64 * 2**20


def test_a_dump_that_would_be_too_large_keeps_the_latest_calls(tmp_path: Path) -> None:
    """Given 60 groups of 1024 calls, then the dump stays under its limit and says how many calls it left out."""
    many = [HandmadeRecorder(f"group {n}", (0, 1), calls(1024, "x" * 60)) for n in range(60)]
    path = write_dump("test", many, tmp_path)
    assert path.stat().st_size <= dumps.MAX_DUMP_BYTES
    for record in read(path)["recorders"]:
        assert record["left_out"] > 0 and record["left_out"] + len(record["calls"]) == 1024
        assert record["calls"][-1]["number"] == 1024


# --- SIGUSR1: in processes of their own, since handlers belong to the whole process ---

HEAD = """
import os, signal, sys, threading, time
from pathlib import Path
from sglang_fl.comm import dump_signal
from sglang_fl.comm.dumps import write_dump

folder = Path(sys.argv[1])
def dump():
    write_dump("SIGUSR1", [], folder, rank=0)

def wait_for(count):
    limit = time.monotonic() + 20
    while len(list(folder.glob("*.json"))) < count:
        assert time.monotonic() < limit, f"{count} dump(s) expected"
        time.sleep(0.01)
"""


def run(body: str, folder: Path) -> str:
    """What a process that runs ``body`` prints; it must end with 0."""
    program = folder / "program.py"
    program.write_text(HEAD + body)
    done = subprocess.run(
        [sys.executable, str(program), str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# A wait in C that a signal does not end, as a library's: Python's own handler cannot run meanwhile. The child asks for
# a dump and ends, and so does the wait, when there is one.
STUCK = """
import ctypes
assert dump_signal.watch_signal(dump) == ""
assert dump_signal.watch_signal(dump) == ""
signal.siginterrupt(signal.SIGUSR1, False)
child = os.fork()
if child == 0:
    os.kill(os.getppid(), signal.SIGUSR1)
    wait_for(1)
    os._exit(0)
status = ctypes.c_int(-1)
assert ctypes.CDLL(None).waitpid(child, ctypes.byref(status), 0) == child
print(status.value)
"""


def test_a_signal_is_answered_while_the_main_thread_runs_no_python(tmp_path: Path) -> None:
    """Given a main thread inside a C function for as long as there is no dump, then a signal still brings one."""
    assert run(STUCK, tmp_path) == "0\n"
    (path,) = tmp_path.glob(PATTERN)
    document = read(path)
    assert document["reason"] == "SIGUSR1"
    (main,) = [thread for thread in document["threads"] if thread["name"] == "MainThread"]
    assert "waitpid" in main["stack"][-1]


STORM = """
import array, fcntl, termios
from types import SimpleNamespace
begun, written, go_on = [], [], threading.Event()

def dump():
    begun.append(None)
    go_on.wait(20)
    written.append(None)

def signals(count):
    for _ in range(count):
        os.kill(os.getpid(), signal.SIGUSR1)

def until(holds):
    limit = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < limit, (begun, written)
        time.sleep(0.001)

def is_read():
    waiting = array.array("i", [0])
    fcntl.ioctl(dump_signal._signal._read, termios.FIONREAD, waiting)
    return waiting[0] == 0

now_s = 100.0
dump_signal.time = SimpleNamespace(monotonic=lambda: now_s)
assert dump_signal.watch_signal(dump) == ""
signals(1)
until(lambda: begun)
signals(1000)  # while the first is written
go_on.set()
until(is_read)
for _ in range(20):  # within the pause after it
    signals(1)
    until(is_read)
print(len(begun), len(written))
now_s += dump_signal.PAUSE_S
signals(1)
until(lambda: len(written) == 2)
now_s += dump_signal.PAUSE_S
signals(1)
until(lambda: len(written) == 3)
print(len(begun))
"""


def test_a_storm_of_signals_brings_few_dumps(tmp_path: Path) -> None:
    """Given a thousand signals while a dump is written and some in the pause after it, then they bring one more."""
    assert run(STORM, tmp_path) == "1 1\n3\n"


FOREIGN = """
heard = []
read, write = os.pipe()
os.set_blocking(write, False)
signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
signal.set_wakeup_fd(write)
assert dump_signal.watch_signal(dump) == ""
os.kill(os.getpid(), signal.SIGUSR1)
wait_for(1)
assert heard == [signal.SIGUSR1], heard
assert os.read(read, 1) == bytes([signal.SIGUSR1])
"""


def test_what_was_there_before_is_called_on(tmp_path: Path) -> None:
    """Given a handler and a wakeup descriptor of someone else, then both hear of the signal, and a dump is written."""
    run(FOREIGN, tmp_path)


LOOP = """
import asyncio
assert dump_signal.watch_signal(dump) == ""

async def main():
    heard = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, heard.set)
    os.kill(os.getpid(), signal.SIGUSR1)
    while not list(folder.glob("*.json")):
        await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGUSR2)
    await heard.wait()

asyncio.run(asyncio.wait_for(main(), 20))
for count in (2, 3):
    os.kill(os.getpid(), signal.SIGUSR1)
    wait_for(count)
assert signal.set_wakeup_fd(-1) != -1, "the wakeup was free and not taken back"
"""


def test_an_event_loop_that_takes_the_wakeup_goes_on_working_and_so_do_dumps(tmp_path: Path) -> None:
    """Given asyncio's own signal handling, made later, then both work during the loop, and dumps after it."""
    run(LOOP, tmp_path)


FORKED = """
assert dump_signal.watch_signal(dump) == ""
child = os.fork()
if child == 0:
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    assert dump_signal.watch_signal(dump) == ""
    os.kill(os.getpid(), signal.SIGUSR1)
    wait_for(1)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
(path,) = folder.glob("*.json")
assert f"pid{child}-" in path.name
os.kill(os.getpid(), signal.SIGUSR1)
wait_for(2)
"""


def test_a_forked_child_has_a_watcher_of_its_own(tmp_path: Path) -> None:
    """Given a process that forks, then child and parent each answer their own signals alone."""
    run(FORKED, tmp_path)


def test_a_forked_child_has_made_none_of_its_parents_calls(tmp_path: Path) -> None:
    """Given a process with a group that forks, when the child leaves a dump, then it has no call of the group, and the
    parent's next one has them."""
    tmp_path.chmod(0o700)
    owner = _Owner("a parent's")
    include(owner)
    (names,) = run_ranks(_dumped_names, 1, tmp_path, gloo=False)
    assert names == []
    assert "a parent's" in _dumped_names(None, tmp_path)


class _Owner:
    def __init__(self, name: str) -> None:
        self._recorder = recorder(name=name)

    def recorders(self) -> tuple[Recorder, ...]:
        return (self._recorder,)


def _dumped_names(context: RankContext | None, folder: Path) -> list[str]:
    return [record["name"] for record in read(dump_calls(folder=folder))["recorders"]]


def test_a_handler_that_python_does_not_know_is_kept_and_said(tmp_path: Path) -> None:
    """Given faulthandler's own C handler, then nothing is changed and the reason is told."""
    body = """
import faulthandler
with open(folder / "stacks", "w+") as stacks:
    faulthandler.register(signal.SIGUSR1, stacks)
    print(dump_signal.watch_signal(dump))
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0.1)
    stacks.seek(0)
    assert "most recent call first" in stacks.read()
"""
    assert "a library has a handler of its own" in run(body, tmp_path)
    assert list(tmp_path.glob(PATTERN)) == []


def test_another_thread_than_the_main_one_is_told_why_not(tmp_path: Path) -> None:
    """Given a group made by another thread, then the reason is told."""
    body = """
thread = threading.Thread(target=lambda: print(dump_signal.watch_signal(dump)))
thread.start()
thread.join()
"""
    assert "only the main thread can set handlers" in run(body, tmp_path)


def test_a_dump_that_fails_is_logged_and_the_next_signal_is_answered(tmp_path: Path) -> None:
    """Given a folder that cannot be used at first, then the error is logged, and a later signal brings a dump."""
    body = """
import logging
logging.basicConfig(stream=sys.stdout)
private = folder
folder = private / "missing" / "deeper"
assert dump_signal.watch_signal(dump) == ""
os.kill(os.getpid(), signal.SIGUSR1)
time.sleep(0.2)
folder = private
os.kill(os.getpid(), signal.SIGUSR1)
wait_for(1)
"""
    output = run(body, tmp_path)
    assert "SIGUSR1: no dump of the calls was written" in output and "DumpError" in output
