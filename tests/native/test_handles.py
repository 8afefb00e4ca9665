"""NULL and closed handles: every C function answers, none crashes."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from sglang_fl.comm.backends.flagcx import FlagCXCommunicator, FlagCXLibrary, ResultCode
from sglang_fl.comm.backends.flagcx.native import load

from .conftest import LIMIT_S
from .recorder import Recorder

LIB, FFI = load()
COMMUNICATOR, LIBRARY, JOB = (f"sglang_fl_flagcx_{kind} *" for kind in ("communicator", "library", "job"))


def parameters_of(name: str) -> tuple[Any, ...]:
    return tuple(FFI.typeof(FFI.addressof(LIB, name)).args)


def functions_on(handle_type: str) -> list[str]:
    """The names of all functions whose first parameter is that handle."""
    names = [name for name in dir(LIB) if callable(getattr(LIB, name))]
    first = {name: parameters_of(name)[:1] for name in names}
    # the const form of a pointer is the same type to cffi
    return [name for name in names if first[name] == (FFI.typeof(handle_type),)]


class Answer:
    """What one call returned, and the result that it wrote where it returns a job."""

    def __init__(self, name: str, handle: object) -> None:
        memory = [FFI.new("char[]", 16384) for _ in parameters_of(name)]
        rest = [
            FFI.cast(kind, place) if kind.kind == "pointer" else 0
            for kind, place in zip(parameters_of(name)[1:], memory[1:], strict=True)
        ]
        self.value = getattr(LIB, name)(handle, *rest)
        starts_job = FFI.typeof(FFI.addressof(LIB, name)).result is FFI.typeof(JOB)
        self.code = FFI.cast("int32_t *", memory[-1])[0] if starts_job else self.value


# What answers with a value and not with a result.
RECORDER_VALUES = {
    "calls_entered": 0,
    "has_captured": 0,
    "read_calls": 0,
    "read_call": 0,
    "call_under_way": 0,
    "ask_for_mark": None,
    "mark_made": None,
    "refuse": None,
    "free_calls": None,
    "next_place": None,
}
COMMUNICATOR_VALUES = {"is_open": 0, "calls_in_flight": 0, "library_communicator": 0, **RECORDER_VALUES}
LIBRARY_VALUES = {
    "library_path": FFI.NULL,
    "library_users": 0,
    "uses_device_handle_init": 0,
    "has_symbol": 0,
}
JOB_VALUES = {"job_wait": 0, "job_unique_id": 0, "job_communicator": FFI.NULL, "job_release": None, "job_message": None}
EXPECTED = {COMMUNICATOR: COMMUNICATOR_VALUES, LIBRARY: LIBRARY_VALUES, JOB: JOB_VALUES}


@pytest.mark.parametrize("handle_type", EXPECTED)
def test_null_handles_are_an_answer(handle_type: str) -> None:
    names = functions_on(handle_type)
    assert len(names) >= {COMMUNICATOR: 30, LIBRARY: 15, JOB: 5}[handle_type]
    for name in names:
        short = name.removeprefix("sglang_fl_flagcx_")
        expected = EXPECTED[handle_type].get(short, ResultCode.NULL_HANDLE)
        assert Answer(name, FFI.NULL).code == expected, name


@pytest.fixture(params=["close", "abort"])
def closed(request: pytest.FixtureRequest, communicator: FlagCXCommunicator) -> FlagCXCommunicator:
    end: Callable[[], None] = getattr(communicator, request.param)
    end()
    return communicator


def test_a_closed_communicator_is_an_answer(closed: FlagCXCommunicator) -> None:
    ends = ("start_destroy", "start_abort", "start_interrupt")
    values = COMMUNICATOR_VALUES | dict.fromkeys(ends, ResultCode.ALREADY_ENDED)
    names = functions_on(COMMUNICATOR)
    assert len(names) >= 30
    for name in names:
        expected = values.get(name.removeprefix("sglang_fl_flagcx_"), ResultCode.CLOSED)
        assert Answer(name, closed.handle).code == expected, name


def test_a_closed_library_is_an_answer(library: FlagCXLibrary) -> None:
    library.close()
    values = {"library_users": 0, "uses_device_handle_init": 1, "has_symbol": 0, "close": ResultCode.ALREADY_ENDED}
    for name in functions_on(LIBRARY):
        short = name.removeprefix("sglang_fl_flagcx_")
        if short == "library_path":
            continue
        # an all-zero unique id of length 0 is looked at after the library
        assert Answer(name, library.handle).code == values.get(short, ResultCode.CLOSED), name


def test_finalizers_of_a_cycle_may_still_use_the_communicator(recorder: Recorder) -> None:
    """Python finalises a cycle's objects in any order; a close that comes late is an answer, not a crash."""
    ended: list[bool] = []

    class Owner:
        def __init__(self) -> None:
            library = FlagCXLibrary.open(recorder.path)
            self.communicator = FlagCXCommunicator.create(library, library.unique_id(), 1, 0, LIMIT_S)
            self.communicator.owner = self.cycle = self  # type: ignore[attr-defined]

        def __del__(self) -> None:
            self.communicator.close()
            ended.append(not self.communicator.is_open)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        Owner()
        gc.collect()
    assert ended == [True]
    assert len(recorder.calls("flagcxCommDestroy")) == 1


def test_a_handle_outlives_its_python_objects(recorder: Recorder) -> None:
    """A route may hold the bare handle longer than anybody holds the communicator."""

    def handle_of_a_closed_one() -> object:
        library = FlagCXLibrary.open(recorder.path)
        communicator = FlagCXCommunicator.create(library, library.unique_id(), 1, 0, LIMIT_S)
        communicator.close()
        library.close()
        return communicator.handle

    handle = handle_of_a_closed_one()
    gc.collect()
    assert LIB.sglang_fl_flagcx_all_reduce(handle, 0, 0, 0, 7, 0, 0) == ResultCode.CLOSED
