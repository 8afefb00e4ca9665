"""Groups: always ended, first error kept, nested, counted as in flight."""

from __future__ import annotations

import logging

import pytest

from sglang_fl.comm.backends.flagcx import DataType, FlagCXCommunicator, FlagCXError, FlagCXLibrary, ResultCode

from .recorder import Recorder


class BodyError(Exception):
    """What the body of a group raises in these tests."""


def send(communicator: FlagCXCommunicator) -> None:
    communicator.send(1, 2, DataType.INT8, 0)


def calls_of(recorder: Recorder) -> list[str]:
    return [name.removeprefix("flagcx") for name in recorder.names() if name.startswith(("flagcxGroup", "flagcxSend"))]


def test_a_group_encloses_its_calls(communicator: FlagCXCommunicator, recorder: Recorder) -> None:
    with communicator.group():
        send(communicator)
        with communicator.group():
            send(communicator)
        assert communicator.calls_in_flight() == 1
    assert calls_of(recorder) == ["GroupStart", "Send", "GroupStart", "Send", "GroupEnd", "GroupEnd"]
    assert communicator.calls_in_flight() == 0


def test_a_group_ends_when_its_body_raises(communicator: FlagCXCommunicator, recorder: Recorder) -> None:
    with pytest.raises(BodyError), communicator.group(), communicator.group():
        raise BodyError
    assert calls_of(recorder) == ["GroupStart", "GroupStart", "GroupEnd", "GroupEnd"]
    assert communicator.calls_in_flight() == 0


def test_an_error_of_the_end_is_raised(communicator: FlagCXCommunicator, recorder: Recorder) -> None:
    recorder.answer("flagcxGroupEnd", 5)
    with pytest.raises(FlagCXError, match=r"group_end\(rank=1\): flagcxInvalidUsage"), communicator.group():
        send(communicator)
    assert communicator.calls_in_flight() == 0


def test_the_first_error_is_kept_and_the_second_is_logged(
    communicator: FlagCXCommunicator, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    recorder.answer("flagcxSend", 4)
    recorder.answer("flagcxGroupEnd", 5)
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(FlagCXError, match=r"send\(.*flagcxInvalidArgument"),
        communicator.group(),
    ):
        send(communicator)
    assert "flagcxInvalidUsage" in caplog.text
    assert calls_of(recorder) == ["GroupStart", "Send", "GroupEnd"]


def test_a_group_that_did_not_start_is_not_ended(communicator: FlagCXCommunicator, recorder: Recorder) -> None:
    recorder.answer("flagcxGroupStart", 3)
    with pytest.raises(FlagCXError, match=r"group_start.*flagcxInternalError"), communicator.group():
        pytest.fail("the body must not run")
    assert calls_of(recorder) == ["GroupStart"]
    assert communicator.calls_in_flight() == 0


def test_nothing_ends_inside_an_open_group(communicator: FlagCXCommunicator, recorder: Recorder) -> None:
    """An abort inside is refused, keeps further calls out, and the group still ends."""
    with pytest.raises(FlagCXError) as raised, communicator.group():
        with pytest.raises(FlagCXError) as refused:
            communicator.abort(drain_s=0.0)
        assert refused.value.code == ResultCode.IN_USE
        send(communicator)
    assert raised.value.code == ResultCode.CLOSED
    assert calls_of(recorder) == ["GroupStart", "GroupEnd"]
    communicator.abort()
    assert recorder.names()[-1] == "flagcxCommAbort"


def test_an_end_without_a_start_is_the_librarys_to_judge(
    communicator: FlagCXCommunicator, library: FlagCXLibrary, recorder: Recorder
) -> None:
    recorder.answer("flagcxGroupEnd", 5)
    lib = library.native.lib
    assert lib.sglang_fl_flagcx_group_end(communicator.handle) == 5
    assert lib.sglang_fl_flagcx_library_group_end(library.handle) == 5
    assert communicator.calls_in_flight() == 0


def test_a_group_without_a_communicator_passes_null(
    communicator: FlagCXCommunicator, library: FlagCXLibrary, recorder: Recorder
) -> None:
    with library.group():
        send(communicator)
        communicator.close()
        with pytest.raises(FlagCXError, match="still live"):
            library.close()
    assert [call["rank"] for call in recorder.calls("flagcxGroupStart") + recorder.calls("flagcxGroupEnd")] == [-1, -1]
    library.close()
