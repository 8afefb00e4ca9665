"""Creation with a limit, close, abort, and what happens to communicators that nobody ends."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_fl.comm.backends.flagcx import (
    DataType,
    FlagCXCommunicator,
    FlagCXError,
    FlagCXLibrary,
    ReduceOp,
    ResultCode,
)

from .conftest import LIMIT_S, MakeRecorder
from .recorder import Recorder


def reduce(communicator: FlagCXCommunicator) -> None:
    communicator.all_reduce(1, 2, 3, DataType.INT8, ReduceOp.SUM)


def wait_until(condition: Callable[[], object]) -> None:
    """For a state that another thread reaches in its own time; fails after a generous limit."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "the state was never reached"
        time.sleep(0.005)


@pytest.fixture
def blocked_call(communicator: FlagCXCommunicator, recorder: Recorder) -> threading.Thread:
    """Another thread inside all_reduce; the fixture ``recorder`` lets it go on."""
    recorder.block("flagcxAllReduce")
    thread = threading.Thread(target=reduce, args=(communicator,))
    thread.start()
    wait_until(lambda: recorder.calls("flagcxAllReduce"))
    return thread


# Ending


@pytest.mark.parametrize(("end", "symbol"), [("close", "flagcxCommDestroy"), ("abort", "flagcxCommAbort")])
def test_ending_twice_or_in_both_ways_ends_once(
    communicator: FlagCXCommunicator, recorder: Recorder, end: str, symbol: str
) -> None:
    getattr(communicator, end)()
    for again in ("close", "abort", "close"):
        getattr(communicator, again)()
    endings = [name for name in recorder.names() if name in ("flagcxCommDestroy", "flagcxCommAbort")]
    assert endings == [symbol]


def test_many_threads_that_close_and_abort_at_once_end_it_once(
    communicator: FlagCXCommunicator, recorder: Recorder
) -> None:
    start = threading.Barrier(8)

    def end(number: int) -> None:
        start.wait()
        (communicator.close if number % 2 else communicator.abort)()

    threads = [threading.Thread(target=end, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(recorder.calls("flagcxCommDestroy")) + len(recorder.calls("flagcxCommAbort")) == 1


def test_close_waits_for_calls_in_flight_and_otherwise_changes_nothing(
    communicator: FlagCXCommunicator, recorder: Recorder, blocked_call: threading.Thread
) -> None:
    assert communicator.calls_in_flight() == 1
    with pytest.raises(FlagCXError, match=r"1 calls in flight or groups open after 0\.05 s") as raised:
        communicator.close(drain_s=0.05)
    assert raised.value.code == ResultCode.IN_USE
    assert communicator.is_open
    recorder.unblock("flagcxAllReduce")
    communicator.close()
    blocked_call.join()
    assert recorder.names()[-2:] == ["flagcxCommDestroy", "streamFree"]


def test_abort_never_runs_under_a_call_and_keeps_new_calls_out(
    communicator: FlagCXCommunicator, recorder: Recorder, blocked_call: threading.Thread
) -> None:
    with pytest.raises(FlagCXError) as raised:
        communicator.abort(drain_s=0.05)
    assert raised.value.code == ResultCode.IN_USE
    assert recorder.calls("flagcxCommAbort") == []
    with pytest.raises(FlagCXError) as refused:
        reduce(communicator)
    assert refused.value.code == ResultCode.CLOSED
    recorder.unblock("flagcxAllReduce")
    blocked_call.join()
    communicator.abort()
    assert len(recorder.calls("flagcxCommAbort")) == 1


def start_close(communicator: FlagCXCommunicator, drain_s: float) -> tuple[threading.Thread, list[FlagCXError]]:
    """Another thread in close(), which waits for a call in flight; the errors that it raises."""
    errors: list[FlagCXError] = []

    def close() -> None:
        try:
            communicator.close(drain_s=drain_s)
        except FlagCXError as error:
            errors.append(error)

    thread = threading.Thread(target=close)
    thread.start()
    wait_until(lambda: not communicator.is_open)
    return thread, errors


@pytest.mark.parametrize(("end", "symbol"), [("close", "flagcxCommDestroy"), ("abort", "flagcxCommAbort")])
def test_an_end_during_a_close_that_fails_does_its_own(
    communicator: FlagCXCommunicator,
    recorder: Recorder,
    blocked_call: threading.Thread,
    end: str,
    symbol: str,
) -> None:
    """Given a close that waits for a call and gives up, when another end came meanwhile, then that one ends it."""
    closing, errors = start_close(communicator, drain_s=0.3)
    other = threading.Thread(target=getattr(communicator, end))
    other.start()
    closing.join()
    assert [error.code for error in errors] == [ResultCode.IN_USE]
    assert other.is_alive(), "success was reported while a call was in flight"
    recorder.unblock("flagcxAllReduce")
    other.join()
    blocked_call.join()
    assert len(recorder.calls(symbol)) == 1
    assert not communicator.is_open


@pytest.mark.parametrize("end", ["close", "abort"])
def test_an_end_during_a_close_that_succeeds_waits_for_it(
    communicator: FlagCXCommunicator,
    library: FlagCXLibrary,
    recorder: Recorder,
    blocked_call: threading.Thread,
    end: str,
) -> None:
    closing, errors = start_close(communicator, drain_s=LIMIT_S)
    with pytest.raises(FlagCXError, match="another close or abort is still under way") as raised:
        getattr(communicator, end)(timeout_s=0.05)
    assert raised.value.code == ResultCode.TIMED_OUT
    recorder.block("flagcxCommDestroy")
    recorder.unblock("flagcxAllReduce")
    other = threading.Thread(target=getattr(communicator, end))
    other.start()
    wait_until(lambda: recorder.calls("flagcxCommDestroy"))
    recorder.unblock("flagcxCommDestroy")
    other.join()
    library.close()
    closing.join()
    blocked_call.join()
    assert errors == []
    assert recorder.calls("flagcxCommAbort") == []


def test_a_close_after_a_tried_abort_does_not_reopen(
    communicator: FlagCXCommunicator, recorder: Recorder, blocked_call: threading.Thread
) -> None:
    """Given an abort that found a call in flight, when close finds it too, then calls still answer CLOSED."""
    for end in (communicator.abort, communicator.close):
        with pytest.raises(FlagCXError) as in_use:
            end(drain_s=0.05)
        assert in_use.value.code == ResultCode.IN_USE
        assert not communicator.is_open
        with pytest.raises(FlagCXError) as refused:
            reduce(communicator)
        assert refused.value.code == ResultCode.CLOSED
    recorder.unblock("flagcxAllReduce")
    blocked_call.join()
    communicator.close()
    assert len(recorder.calls("flagcxCommDestroy")) == 1


def test_an_abort_during_a_close_keeps_it_from_reopening(
    communicator: FlagCXCommunicator, recorder: Recorder, blocked_call: threading.Thread
) -> None:
    closing, errors = start_close(communicator, drain_s=0.3)
    with pytest.raises(FlagCXError) as raised:
        communicator.abort(timeout_s=0.05)
    assert raised.value.code == ResultCode.TIMED_OUT
    closing.join()
    assert [error.code for error in errors] == [ResultCode.IN_USE]
    assert not communicator.is_open
    recorder.unblock("flagcxAllReduce")
    blocked_call.join()
    communicator.abort()


def test_an_end_that_does_not_come_back_is_given_up(communicator: FlagCXCommunicator, recorder: Recorder) -> None:
    recorder.block("flagcxCommAbort")
    with pytest.raises(FlagCXError, match=r"abort\(rank=1\): TIMED_OUT.*The limit was 0.1 s") as raised:
        communicator.abort(timeout_s=0.1)
    assert raised.value.code == ResultCode.TIMED_OUT
    communicator.close()
    communicator.abort()
    assert recorder.calls("flagcxCommDestroy") == []


def test_a_failed_destroy_is_reported_and_not_repeated(communicator: FlagCXCommunicator, recorder: Recorder) -> None:
    recorder.answer("flagcxCommDestroy", 1)
    with pytest.raises(FlagCXError, match="flagcxUnhandledDeviceError"):
        communicator.close()
    communicator.close()
    assert len(recorder.calls("flagcxCommDestroy")) == 1


def test_library_close_is_idempotent_and_refused_while_communicators_live(
    communicator: FlagCXCommunicator, library: FlagCXLibrary, recorder: Recorder
) -> None:
    with pytest.raises(FlagCXError, match=r"1 communicators, groups or calls of .*libflagcx-0\.so still live"):
        library.close()
    reduce(communicator)
    communicator.close()
    library.close()
    library.close()
    assert len(recorder.calls("flagcxDeviceHandleFree")) == 1
    for question in (library.get_device, library.device_synchronize, library.unique_id, lambda: library.mem_alloc(1)):
        with pytest.raises(FlagCXError) as raised:
            question()
        assert raised.value.code == ResultCode.CLOSED


def test_a_forgotten_communicator_warns_and_nothing_else(library: FlagCXLibrary, recorder: Recorder) -> None:
    """Case 18: nothing that a peer could notice happens when an object is collected."""
    communicator = FlagCXCommunicator.create(library, library.unique_id(), 2, 0, LIMIT_S)
    reduce(communicator)
    recorder.forget()
    with pytest.warns(ResourceWarning, match="rank 0 of 2 was never closed"):
        del communicator
        gc.collect()
    assert recorder.names() == []


def test_a_closed_communicator_is_collected_in_silence(communicator: FlagCXCommunicator) -> None:
    communicator.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        communicator.__del__()


def test_a_half_built_python_object_is_collected_in_silence() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FlagCXCommunicator.__new__(FlagCXCommunicator).__del__()


# Creation


def test_a_creation_over_its_limit_names_stage_rank_world_and_address(
    library: FlagCXLibrary, recorder: Recorder
) -> None:
    """Case 26, and the late end of a given-up creation: its communicator is aborted, neither used nor destroyed."""
    address = (2).to_bytes(2, "little") + (45678).to_bytes(2, "big") + bytes([192, 0, 2, 7])
    recorder.set_unique_id(bytes(range(8)) + address + bytes(240))
    recorder.block("flagcxCommInitRank")
    expected = r"TIMED_OUT.*limit was 0.1 s; stage: init, rank 1 of 4, device 0, the ranks meet at 192.0.2.7:45678"
    with pytest.raises(FlagCXError, match=expected) as raised:
        FlagCXCommunicator.create(library, library.unique_id(), 4, 1, 0.1)
    assert (raised.value.code, raised.value.rank) == (ResultCode.TIMED_OUT, 1)
    recorder.forget()
    recorder.unblock("flagcxCommInitRank")
    wait_until(lambda: recorder.calls("flagcxCommAbort"))
    assert recorder.names()[:2] == ["setDevice", "flagcxCommAbort"]
    FlagCXCommunicator.create(library, library.unique_id(), 4, 1, LIMIT_S).close()
    assert recorder.names().count("flagcxCommDestroy") == 1
    wait_until(lambda: library.native.lib.sglang_fl_flagcx_library_users(library.handle) == 0)
    library.close()


def test_a_late_communicator_of_a_library_without_abort_is_left_alone(make_recorder: MakeRecorder) -> None:
    recorder = make_recorder(hidden=("flagcxCommAbort",))
    library = FlagCXLibrary.open(recorder.path)
    unique_id = library.unique_id()
    recorder.block("flagcxCommInitRank")
    with pytest.raises(FlagCXError, match="TIMED_OUT"):
        FlagCXCommunicator.create(library, unique_id, 4, 1, 0.1)
    recorder.forget()
    recorder.unblock("flagcxCommInitRank")
    time.sleep(0.2)  # the late communicator is there now
    with pytest.raises(FlagCXError, match="given up"):
        library.close()
    assert recorder.names() == []


def test_a_creation_done_but_never_collected_is_aborted(library: FlagCXLibrary, recorder: Recorder) -> None:
    """Given a creation that succeeds, when its waiter leaves before it looks, then it is aborted all the same."""
    lib, ffi = library.native
    unique_id, code = library.unique_id(), ffi.new("int32_t *")
    job = lib.sglang_fl_flagcx_start_init(library.handle, unique_id, len(unique_id), 2, 1, 0, code)
    wait_until(lambda: lib.sglang_fl_flagcx_job_wait(job, 0.01))
    assert recorder.calls("flagcxCommAbort") == []
    lib.sglang_fl_flagcx_job_release(job)
    wait_until(lambda: recorder.calls("flagcxCommAbort"))
    wait_until(lambda: lib.sglang_fl_flagcx_library_users(library.handle) == 0)


def test_a_unique_id_has_a_limit_too(library: FlagCXLibrary, recorder: Recorder) -> None:
    recorder.block("flagcxGetUniqueId")
    with pytest.raises(FlagCXError, match="stage: unique id"):
        library.unique_id(timeout_s=0.1)


def test_a_half_built_communicator_is_dropped(library: FlagCXLibrary, recorder: Recorder) -> None:
    """The library leaves a handle behind whose use crashes; the recorder aborts the process on any."""
    recorder.answer("flagcxCommInitRank", 6)
    with pytest.raises(FlagCXError, match=r"create\(rank=1\): flagcxRemoteError.*stage: init, rank 1 of 2") as raised:
        FlagCXCommunicator.create(library, library.unique_id(), 2, 1, LIMIT_S)
    assert raised.value.code == ResultCode.REMOTE_ERROR
    library.close()
    assert recorder.names()[-2:] == ["flagcxCommInitRank", "flagcxDeviceHandleFree"]


def test_a_device_that_cannot_be_set_stops_the_creation(library: FlagCXLibrary, recorder: Recorder) -> None:
    recorder.answer("setDevice", 1)
    with pytest.raises(FlagCXError, match=r"flagcxUnhandledDeviceError.*device 9"):
        FlagCXCommunicator.create(library, library.unique_id(), 2, 1, LIMIT_S, device=9)
    assert recorder.calls("flagcxCommInitRank") == []


ENDINGS = {
    "a communicator left open": "",
    "a creation given up and still blocked": """
        recorder.block("flagcxCommInitRank")
        try:
            FlagCXCommunicator.create(library, library.unique_id(), 2, 0, 0.1)
        except FlagCXError as error:
            assert error.code == ResultCode.TIMED_OUT
        """,
    "an abort given up and still blocked": """
        recorder.block("flagcxCommAbort")
        try:
            communicator.abort(timeout_s=0.1)
        except FlagCXError as error:
            assert error.code == ResultCode.TIMED_OUT
        """,
    "a call of a daemon thread still blocked": """
        recorder.block("flagcxBarrier")
        threading.Thread(target=communicator.barrier, daemon=True).start()
        while not recorder.calls("flagcxBarrier"):
            time.sleep(0.01)
        """,
    "objects in a cycle": "communicator.self = communicator",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_interpreter_exits_by_itself(ending: str, recorder: Recorder) -> None:
    """Case 18: whatever is left behind, the process ends with 0, soon, and without a crash."""
    program = f"""
import sys, threading, time
from native.recorder import Recorder
from sglang_fl.comm.backends.flagcx import *
from pathlib import Path
recorder = Recorder(Path({str(recorder.path)!r}))
library = FlagCXLibrary.open(recorder.path)
communicator = FlagCXCommunicator.create(library, library.unique_id(), 2, 0, 30)
{textwrap.dedent(ENDINGS[ending])}
assert not recorder.calls("flagcxCommDestroy")
"""
    tests = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {tests!r})\n{program}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
