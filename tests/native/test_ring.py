"""The shim's ring of a communicator's last calls: what is in it, marks, refusal, and reading it while it is written."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang_fl.comm.backends.flagcx import FlagCXCommunicator, FlagCXError, FlagCXLibrary, ResultCode

from .conftest import LIMIT_S
from .recorder import Recorder

ROOT = Path(__file__).parents[2]
SHIM = ROOT / "csrc/flagcx_shim"
SOURCES = [Path(__file__).with_name("ring_driver.c"), SHIM / "ring.c", SHIM / "ticks.c"]
SIZE = 8
PROBE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))


class Ring:
    """One communicator's ring, read through the extension."""

    def __init__(self, communicator: FlagCXCommunicator, is_capturing: int = 0) -> None:
        self.lib, self.ffi = communicator.library.native
        self.handle = communicator.handle
        self.code = self.lib.sglang_fl_flagcx_record(self.handle, SIZE, is_capturing)

    def calls(self) -> list[Any]:
        rows = self.ffi.new("sglang_fl_flagcx_call[]", SIZE)
        count = self.lib.sglang_fl_flagcx_read_calls(self.handle, rows, SIZE)
        self._kept = rows
        return [rows[index] for index in range(count)]

    def under_way(self) -> Any:
        row = self.ffi.new("sglang_fl_flagcx_call *")
        return row if self.lib.sglang_fl_flagcx_call_under_way(self.handle, row) else None

    def operations(self) -> list[str]:
        names = self.ffi.typeof("enum sglang_fl_flagcx_operation").elements
        return [names[call.operation].removeprefix("SGLANG_FL_FLAGCX_").lower() for call in self.calls()]

    def all_reduce(self, count: int = 1, stream: int = 0) -> int:
        return int(self.lib.sglang_fl_flagcx_all_reduce(self.handle, 1, 1, count, 7, 0, stream))


@pytest.fixture
def ring(communicator: FlagCXCommunicator) -> Ring:
    made = Ring(communicator)
    assert made.code == 0
    return made


def _call_everything(communicator: FlagCXCommunicator) -> None:
    communicator.all_reduce(1, 2, 3, 7, 0, 16)
    communicator.reduce(1, 2, 4, 6, 0, 1, 16)
    communicator.reduce_scatter(1, 2, 5, 9, 0, 16)
    communicator.all_gather(1, 2, 6, 1, 16)
    communicator.broadcast(1, 2, 7, 7, 1, 16)
    communicator.gather(1, 2, 8, 7, 0, 16)
    communicator.scatter(1, 2, 9, 7, 1, 16)
    communicator.all_to_all(1, 2, 10, 7, 16)


def test_each_operation_is_a_row(communicator: FlagCXCommunicator, ring: Ring) -> None:
    """Given a recorded communicator, when each operation is called, then each has a row with what it was told."""
    before = time.time_ns()
    _call_everything(communicator)
    after = time.time_ns()
    rows = [(call.number, call.count, call.dtype, call.peer, call.stream, call.result) for call in ring.calls()]
    assert rows == [
        (1, 3, 7, -1, 16, 0),
        (2, 4, 6, 1, 16, 0),
        (3, 5, 9, -1, 16, 0),
        (4, 6, 1, -1, 16, 0),
        (5, 7, 7, 1, 16, 0),
        (6, 8, 7, 0, 16, 0),
        (7, 9, 7, 1, 16, 0),
        (8, 10, 7, -1, 16, 0),
    ]
    collectives = "all_reduce reduce reduce_scatter all_gather broadcast gather scatter all_to_all"
    assert ring.operations() == collectives.split()
    times = [time_ns for call in ring.calls() for time_ns in (call.time_in_ns, call.time_out_ns)]
    assert times == sorted(times)
    assert before <= times[0] and times[-1] <= after


def test_transfers_groups_and_what_has_no_count(communicator: FlagCXCommunicator, ring: Ring) -> None:
    """Given a recorded communicator, when it transfers in a group, then the group's end is a row as well: that is where
    the work is done."""
    with communicator.group():
        communicator.send(1, 11, 7, 0)
        communicator.recv(1, 12, 7, 0)
    communicator.barrier()
    communicator.all_to_all_v(1, [1, 2], [0, 1], 2, [1, 2], [0, 1], 7)
    assert ring.operations() == ["send", "recv", "group_end", "barrier", "all_to_all_v"]
    rows = [(call.count, call.dtype, call.peer) for call in ring.calls()]
    assert rows == [(11, 7, 0), (12, 7, 0), (0, -1, -1), (0, -1, -1), (0, 7, -1)]


def test_the_ring_keeps_the_last_calls(ring: Ring) -> None:
    """Given a ring of 8, when 21 calls were made, then it has the last 8, oldest first, and the number of all."""
    for number in range(1, 22):
        assert ring.all_reduce(count=number * 10) == 0
    assert [(call.number, call.count) for call in ring.calls()] == [(n, n * 10) for n in range(14, 22)]
    assert ring.lib.sglang_fl_flagcx_calls_entered(ring.handle) == 21


def test_a_failed_call_keeps_its_result(communicator: FlagCXCommunicator, ring: Ring, recorder: Recorder) -> None:
    """Given a library that fails a call, when it has returned, then its row has the result."""
    recorder.answer("flagcxAllReduce", int(ResultCode.REMOTE_ERROR))
    with pytest.raises(FlagCXError):
        communicator.all_reduce(1, 1, 1, 7, 0)
    (call,) = ring.calls()
    assert call.result == ResultCode.REMOTE_ERROR
    assert call.time_out_ns >= call.time_in_ns


def test_nothing_is_recorded_unasked(communicator: FlagCXCommunicator) -> None:
    """Given a communicator that nobody records, when it is called, then there are no rows, and a mark is never due."""
    lib, ffi = communicator.library.native
    lib.sglang_fl_flagcx_ask_for_mark(communicator.handle)
    communicator.all_reduce(1, 1, 1, 7, 0)
    assert lib.sglang_fl_flagcx_calls_entered(communicator.handle) == 0
    assert lib.sglang_fl_flagcx_read_calls(communicator.handle, ffi.new("sglang_fl_flagcx_call[1]"), 1) == 0


def test_a_ring_is_made_once_and_of_a_power_of_two(communicator: FlagCXCommunicator, ring: Ring) -> None:
    """Given a recorded communicator, when it is to be recorded again, or of another size, then that is refused."""
    record = ring.lib.sglang_fl_flagcx_record
    assert record(ring.handle, SIZE, 0) == ResultCode.IN_USE
    assert record(ring.handle, 12, 0) == record(ring.handle, 0, 0) == ResultCode.BAD_SIZE


def test_a_call_under_way_is_told(ring: Ring, recorder: Recorder) -> None:
    """Given a call that blocks in the library, when another thread looks, then it finds that call, and none once it
    has returned."""
    ring.all_reduce()
    assert ring.under_way() is None
    recorder.block("flagcxAllReduce")
    thread = threading.Thread(target=ring.all_reduce, args=(77,))
    thread.start()
    _until(lambda: ring.under_way() is not None)
    call = ring.under_way()
    assert (call.number, call.count, call.time_out_ns) == (2, 77, 0)
    recorder.unblock("flagcxAllReduce")
    thread.join(LIMIT_S)
    assert ring.under_way() is None


# --- marks ---


def test_a_mark_is_due_until_it_is_made(communicator: FlagCXCommunicator, ring: Ring) -> None:
    """Given a mark that was asked for, when calls succeed, then each says so until it is made; failures stay such."""
    assert ring.all_reduce() == 0
    ring.lib.sglang_fl_flagcx_ask_for_mark(ring.handle)
    assert ring.all_reduce() == ring.all_reduce() == ResultCode.MARK_DUE
    assert [call.result for call in ring.calls()] == [0, 0, 0]
    ring.lib.sglang_fl_flagcx_mark_made(ring.handle)
    assert ring.all_reduce() == 0


def test_no_mark_hides_a_failure(ring: Ring, recorder: Recorder) -> None:
    """Given a mark that was asked for, when a call fails, then its result is the library's."""
    ring.lib.sglang_fl_flagcx_ask_for_mark(ring.handle)
    recorder.answer("flagcxAllReduce", int(ResultCode.REMOTE_ERROR))
    assert ring.all_reduce() == ResultCode.REMOTE_ERROR


def test_a_mark_waits_for_the_end_of_a_group(communicator: FlagCXCommunicator, ring: Ring) -> None:
    """Given a mark that was asked for, when calls are made inside a group, then only the group's end says that it is
    due: nothing is enqueued before."""
    ring.lib.sglang_fl_flagcx_ask_for_mark(ring.handle)
    assert ring.lib.sglang_fl_flagcx_group_start(ring.handle) == 0
    assert ring.all_reduce() == 0
    assert ring.lib.sglang_fl_flagcx_group_end(ring.handle) == ResultCode.MARK_DUE


def test_a_captured_call_says_so_and_is_never_marked(communicator: FlagCXCommunicator) -> None:
    """Given a stream that is being captured, when a call is enqueued on it, then its row says so and no mark is due;
    on another stream it is. A probe that fails counts as no capture."""
    seen: list[int] = []

    def probe(stream: int | None, status: Any) -> int:
        seen.append(stream or 0)
        status[0] = int(stream == 32)
        return int(stream == 48)

    function = PROBE(probe)
    ring = Ring(communicator, ctypes.cast(function, ctypes.c_void_p).value or 0)
    has_captured = ring.lib.sglang_fl_flagcx_has_captured
    ring.lib.sglang_fl_flagcx_ask_for_mark(ring.handle)
    assert ring.all_reduce(stream=16) == ring.all_reduce(stream=48) == ResultCode.MARK_DUE
    assert not has_captured(ring.handle)
    assert ring.all_reduce(stream=32) == 0
    assert [call.captured for call in ring.calls()] == [0, 0, 1]
    assert seen == [16, 48, 32]
    assert has_captured(ring.handle)


# --- refusal and abort ---


def test_a_refused_communicator_lets_nothing_in(
    communicator: FlagCXCommunicator, ring: Ring, recorder: Recorder
) -> None:
    """Given a refused communicator, when it is called, then the call neither reaches the library nor gets a number;
    it can still be closed, also after a close that gave up under a call in flight."""
    recorder.block("flagcxAllReduce")
    thread = threading.Thread(target=ring.all_reduce)
    thread.start()
    _until(lambda: ring.under_way() is not None)
    ring.lib.sglang_fl_flagcx_refuse(ring.handle)
    assert ring.all_reduce() == ResultCode.CLOSED
    with pytest.raises(FlagCXError) as raised:
        communicator.close(drain_s=0.05)
    assert raised.value.code == ResultCode.IN_USE
    assert ring.all_reduce() == ResultCode.CLOSED
    recorder.unblock("flagcxAllReduce")
    thread.join(LIMIT_S)
    assert len(recorder.calls("flagcxAllReduce")) == ring.lib.sglang_fl_flagcx_calls_entered(ring.handle) == 1
    communicator.close()
    assert recorder.names().count("flagcxCommDestroy") == 1


def test_the_ring_outlives_the_communicator_until_it_is_given_back(
    communicator: FlagCXCommunicator, ring: Ring
) -> None:
    """Given a closed communicator, when its ring is read, then the rows are there until their memory is given back;
    while the communicator lives, giving back does nothing."""
    ring.all_reduce()
    ring.lib.sglang_fl_flagcx_free_calls(ring.handle)
    communicator.close()
    assert [call.number for call in ring.calls()] == [1]
    ring.lib.sglang_fl_flagcx_free_calls(ring.handle)
    ring.lib.sglang_fl_flagcx_free_calls(ring.handle)
    assert ring.calls() == []


def test_an_interrupt_aborts_under_a_call_in_flight(
    communicator: FlagCXCommunicator, library: FlagCXLibrary, ring: Ring, recorder: Recorder
) -> None:
    """Given a call that blocks in the library, when it is interrupted, then the library's abort is called at once and
    waits for nobody; while the call is still there, the end is not complete and nothing of it is freed."""
    recorder.block("flagcxAllReduce")
    thread = threading.Thread(target=ring.all_reduce)
    thread.start()
    _until(lambda: ring.under_way() is not None)
    code = ring.ffi.new("int32_t *")
    job = ring.lib.sglang_fl_flagcx_start_interrupt(ring.handle, 0.1, code)
    assert code[0] == 0
    assert ring.lib.sglang_fl_flagcx_job_wait(job, LIMIT_S)
    assert ring.lib.sglang_fl_flagcx_job_result(job) == ResultCode.IN_USE
    ring.lib.sglang_fl_flagcx_job_release(job)
    assert recorder.names()[-1] == "flagcxCommAbort"
    assert thread.is_alive()
    recorder.unblock("flagcxAllReduce")
    thread.join(LIMIT_S)
    communicator.close()
    assert "flagcxCommDestroy" not in recorder.names()


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# --- reading while it is written ---


def _driver(path: Path, flags: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = ["cc", "-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", *flags]
    command += [f"-I{SHIM}", f"-I{ROOT / 'native_bindings'}", "-o", str(path), *map(str, SOURCES)]
    subprocess.run(command, check=True)
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1:exitcode=66"}
    return subprocess.run([path], capture_output=True, text=True, env=environment, timeout=120, check=False)


@pytest.mark.parametrize("flags", [[], ["-fsanitize=thread"], ["-fsanitize=address,undefined"]], ids=str)
def test_an_entry_that_is_read_while_it_is_written_is_whole(tmp_path: Path, flags: list[str]) -> None:
    """Given a thread that writes and two that read, when both work on the same entries, then every entry read is of one
    call, and no sanitizer has a word to say."""
    done = _driver(tmp_path / "driver", flags)
    assert done.returncode == 0, done.stdout + done.stderr
    words = done.stdout.split()
    assert words[0] == "whole:" and int(words[1]) >= 20_000
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("flags", "code", "report"),
    [
        (["-DPLANT_TORN"], 1, "torn: call"),
        (["-DPLANT_RACE", "-fsanitize=thread"], 66, "WARNING: ThreadSanitizer: data race"),
    ],
    ids=["torn", "race"],
)
def test_a_planted_fault_is_reported(tmp_path: Path, flags: list[str], code: int, report: str) -> None:
    """Given a writer that does not take its entry first, or writes a field as no other thread may, when it runs, then
    the fault is reported."""
    done = _driver(tmp_path / "driver", flags)
    assert done.returncode == code
    assert report in done.stdout + done.stderr
