"""Errors in words, and the difference between what is lacking and what is wrong."""

from __future__ import annotations

import pickle

import pytest

from sglang_fl.comm.backends.flagcx import (
    DataType,
    FlagCXCommunicator,
    FlagCXError,
    FlagCXLibrary,
    FlagCXOperation,
    ReduceOp,
    ResultCode,
    torch_data_types,
)
from sglang_fl.comm.backends.flagcx.errors import EXPLANATIONS, result_name
from sglang_fl.comm.backends.flagcx.native import load
from sglang_fl.comm.backends.flagcx.types import SYMBOLS
from sglang_fl.comm.errors import CommError

from .conftest import MakeRecorder
from .recorder import Recorder

# flagcx.h, 0.5.0 and later.
FLAGCX_NAMES = {
    1: "flagcxUnhandledDeviceError",
    2: "flagcxSystemError",
    3: "flagcxInternalError",
    4: "flagcxInvalidArgument",
    5: "flagcxInvalidUsage",
    6: "flagcxRemoteError",
    7: "flagcxInProgress",
    8: "flagcxUnhandledCCLError",
    9: "flagcxNotSupported",
}


@pytest.mark.parametrize(("code", "name"), FLAGCX_NAMES.items())
def test_an_error_has_name_words_and_the_facts_of_the_call(
    code: int, name: str, communicator: FlagCXCommunicator, recorder: Recorder
) -> None:
    recorder.answer("flagcxAllReduce", code)
    with pytest.raises(FlagCXError) as raised:
        communicator.all_reduce(1, 2, 2**33, DataType.BFLOAT16, ReduceOp.MAX)
    error = raised.value
    assert isinstance(error, CommError)
    assert (error.code, error.name, error.operation) == (code, name, "all_reduce")
    assert (error.dtype, error.op, error.count, error.rank) == ("BFLOAT16 (9)", "MAX (2)", 2**33, 1)
    prefix = f"all_reduce(dtype=BFLOAT16 (9), op=MAX (2), count=8589934592, rank=1): {name}: "
    assert str(error) == prefix + EXPLANATIONS[ResultCode(code)]


def test_every_result_but_success_is_explained() -> None:
    assert set(EXPLANATIONS) == set(ResultCode) - {ResultCode.SUCCESS}


def test_the_shims_own_results_have_the_same_numbers_in_python() -> None:
    lib = load().lib
    prefix = "SGLANG_FL_FLAGCX_"
    names = [name for name in dir(lib) if name.startswith(prefix) and isinstance(getattr(lib, name), int)]
    results = {name.removeprefix(prefix): getattr(lib, name) for name in names if getattr(lib, name) < 0}
    assert results == {code.name: code.value for code in ResultCode if -100 < code < 0}


def test_a_result_of_a_later_release_is_reported_by_number(
    communicator: FlagCXCommunicator, recorder: Recorder
) -> None:
    recorder.answer("flagcxSend", 17)
    with pytest.raises(FlagCXError, match=r"send\(dtype=77, count=1, rank=1\): unknown result 17$"):
        communicator.send(1, 1, 77, 0)
    assert result_name(17) == "unknown result 17"


def test_what_the_library_says_is_quoted_only_where_it_says_something(
    communicator: FlagCXCommunicator, recorder: Recorder
) -> None:
    recorder.answer("flagcxSend", 8)
    for text, quoted in (("Not implemented.", False), ("", False), ("socket closed by 10.0.0.3", True)):
        recorder.set_last_error(text)
        with pytest.raises(FlagCXError) as raised:
            communicator.send(1, 1, DataType.INT8, 0)
        assert raised.value.library_message == (text if quoted else "")
        assert ("The library says" in str(raised.value)) is quoted


def test_an_error_survives_the_trip_to_another_process() -> None:
    error = FlagCXError(ResultCode.REMOTE_ERROR, "all_reduce", "peer 3", dtype=7, op=0, count=5, rank=1)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.code, copy.rank) == (str(error), error.code, error.rank)


def test_not_supported_is_a_capability_and_invalid_argument_an_error(
    communicator: FlagCXCommunicator, library: FlagCXLibrary, recorder: Recorder
) -> None:
    """Case 27; what one communicator cannot do leaves the library's capabilities alone."""
    recorder.answer("flagcxGather", ResultCode.NOT_SUPPORTED)
    recorder.answer("flagcxScatter", ResultCode.INVALID_ARGUMENT)
    with pytest.raises(FlagCXError) as lacking:
        communicator.gather(1, 2, 3, DataType.INT8, 0)
    with pytest.raises(FlagCXError) as wrong:
        communicator.scatter(1, 2, 3, DataType.INT8, 0)
    assert (lacking.value.is_unsupported, wrong.value.is_unsupported) == (True, False)
    assert FlagCXOperation.GATHER not in communicator.capabilities.operations
    assert FlagCXOperation.SCATTER in communicator.capabilities.operations
    assert FlagCXOperation.GATHER in library.capabilities.operations


@pytest.mark.parametrize("operation", SYMBOLS)
def test_a_missing_symbol_leaves_the_capabilities(operation: FlagCXOperation, make_recorder: MakeRecorder) -> None:
    library = FlagCXLibrary.open(make_recorder(hidden=(SYMBOLS[operation],)).path)
    assert library.missing_symbols == {SYMBOLS[operation]}
    assert library.capabilities.operations == set(SYMBOLS) - {operation}
    assert operation not in library.capabilities.in_place


def test_calling_what_is_missing_is_an_error_with_its_name(make_recorder: MakeRecorder) -> None:
    missing = ("flagcxAlltoAllv", "flagcxMemAlloc", "flagcxCommWindowRegister", "flagcxCommAbort", "flagcxGetLastError")
    library = FlagCXLibrary.open(make_recorder(hidden=missing).path)
    assert not library.capabilities.symmetric_windows
    assert not library.capabilities.allocates_memory
    assert library.capabilities.uneven_sizes == frozenset()
    communicator = FlagCXCommunicator.create(library, library.unique_id(), 1, 0, 30)
    calls = {
        "all_to_all_v": lambda: communicator.all_to_all_v(1, [1], [0], 2, [1], [0], 7),
        "mem_alloc": lambda: library.mem_alloc(1),
        "window_register": lambda: communicator.window_register(1, 2),
        "abort": communicator.abort,
    }
    for name, call in calls.items():
        with pytest.raises(FlagCXError, match=rf"{name}\(.*MISSING_SYMBOL") as raised:
            call()
        assert raised.value.is_unsupported
    communicator.close()


def test_torch_dtypes_have_flagcx_numbers_of_the_same_size() -> None:
    import torch

    from sglang_fl.comm.backends.flagcx import ITEM_BYTES

    table = torch_data_types()
    assert set(table.values()) == set(DataType) == set(ITEM_BYTES)
    for dtype, number in table.items():
        assert str(dtype) == f"torch.{number.name.lower()}"
        assert ITEM_BYTES[number] == dtype.itemsize
    assert torch.bool not in table
    assert torch.float8_e4m3fn not in table
