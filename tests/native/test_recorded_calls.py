"""What arrives on the C side: every argument of every function, in every form of FlagCX's API."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from sglang_fl.comm.backends.flagcx import (
    DataType,
    FlagCXCommunicator,
    FlagCXError,
    FlagCXLibrary,
    FlagCXOperation,
    Form,
    MemoryKind,
    ReduceOp,
    ResultCode,
    WindowFlags,
)

from .conftest import LIMIT_S, MakeRecorder
from .recorder import FORMS, Recorder

SEND, RECEIVE, STREAM = 0xFFFF_8000_0000_1000, 0x7F00_0000_2000, 0x5500_0000_3000
COUNTS = (0, 1, 2**31 + 7, 5 * 10**9, 2**64 - 1)
F32, AVG = DataType.FLOAT32, ReduceOp.AVG
Counted = Callable[[FlagCXCommunicator, int], None]


@dataclass(frozen=True)
class Case:
    """One operation: how it is called with a count, and what else the C side must have got."""

    symbol: str
    call: Counted
    others: dict[str, int]


BUFFERS = {"send": SEND, "recv": RECEIVE, "dtype": 7}
CASES = {
    FlagCXOperation.ALL_REDUCE: Case(
        "flagcxAllReduce", lambda c, n: c.all_reduce(SEND, RECEIVE, n, F32, AVG, STREAM), BUFFERS | {"op": 4}
    ),
    FlagCXOperation.REDUCE: Case(
        "flagcxReduce",
        lambda c, n: c.reduce(SEND, RECEIVE, n, F32, AVG, 1, STREAM),
        BUFFERS | {"op": 4, "root": 1},
    ),
    FlagCXOperation.REDUCE_SCATTER: Case(
        "flagcxReduceScatter", lambda c, n: c.reduce_scatter(SEND, RECEIVE, n, F32, AVG, STREAM), BUFFERS | {"op": 4}
    ),
    FlagCXOperation.ALL_GATHER: Case(
        "flagcxAllGather", lambda c, n: c.all_gather(SEND, RECEIVE, n, F32, STREAM), BUFFERS
    ),
    FlagCXOperation.BROADCAST: Case(
        "flagcxBroadcast", lambda c, n: c.broadcast(SEND, RECEIVE, n, F32, 1, STREAM), BUFFERS | {"root": 1}
    ),
    FlagCXOperation.GATHER: Case(
        "flagcxGather", lambda c, n: c.gather(SEND, RECEIVE, n, F32, 1, STREAM), BUFFERS | {"root": 1}
    ),
    FlagCXOperation.SCATTER: Case(
        "flagcxScatter", lambda c, n: c.scatter(SEND, RECEIVE, n, F32, 1, STREAM), BUFFERS | {"root": 1}
    ),
    FlagCXOperation.ALL_TO_ALL: Case(
        "flagcxAlltoAll", lambda c, n: c.all_to_all(SEND, RECEIVE, n, F32, STREAM), BUFFERS
    ),
    FlagCXOperation.SEND: Case(
        "flagcxSend", lambda c, n: c.send(SEND, n, F32, 0, STREAM), {"buffer": SEND, "dtype": 7, "peer": 0}
    ),
    FlagCXOperation.RECV: Case(
        "flagcxRecv", lambda c, n: c.recv(RECEIVE, n, F32, 0, STREAM), {"buffer": RECEIVE, "dtype": 7, "peer": 0}
    ),
}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("operation", CASES)
def test_every_argument_arrives_whole(
    communicator: FlagCXCommunicator, recorder: Recorder, operation: FlagCXOperation, count: int
) -> None:
    """Case 12: counts over 2**31 and 2**32 arrive as they are; length zero is handed on, too."""
    case = CASES[operation]
    case.call(communicator, count)
    call = recorder.only(case.symbol)
    assert call["count"] == count
    assert {name: call[name] for name in case.others} == case.others
    assert (call["rank"], call["stream"]) == (1, STREAM)


@pytest.mark.parametrize("count", [-1, 2**64, 10**30])
@pytest.mark.parametrize("operation", CASES)
def test_a_count_that_is_no_size_is_an_error_that_names_it(
    communicator: FlagCXCommunicator, recorder: Recorder, operation: FlagCXOperation, count: int
) -> None:
    with pytest.raises(FlagCXError, match=rf"{operation.value}.*Count {count}, .*0 to 2\*\*64-1") as raised:
        CASES[operation].call(communicator, count)
    assert raised.value.code == ResultCode.INVALID_ARGUMENT
    assert (raised.value.count, raised.value.rank) == (count, 1)
    others = CASES[operation].others
    assert raised.value.dtype == f"{DataType(others['dtype']).name} ({others['dtype']})"
    assert raised.value.op == (f"{ReduceOp(others['op']).name} ({others['op']})" if "op" in others else None)
    assert recorder.calls(CASES[operation].symbol) == []


def test_all_to_all_v_hands_over_arrays_of_full_sizes(communicator: FlagCXCommunicator, recorder: Recorder) -> None:
    communicator.all_to_all_v(
        SEND, [1, 2**31 + 7], [0, 5 * 10**9], RECEIVE, [2, 2**33], [7, 2**64 - 1], DataType.BFLOAT16, STREAM
    )
    call = recorder.only("flagcxAlltoAllv")
    assert (call["send"], call["recv"], call["dtype"], call["stream"]) == (SEND, RECEIVE, 9, STREAM)
    assert (call["last_send_count"], call["last_send_offset"]) == (2**31 + 7, 5 * 10**9)
    assert (call["last_recv_count"], call["last_recv_offset"]) == (2**33, 2**64 - 1)


def test_all_to_all_v_refuses_lists_of_another_length_and_negative_counts(
    communicator: FlagCXCommunicator, recorder: Recorder
) -> None:
    with pytest.raises(ValueError, match=r"needs 2 counts and offsets each, got \[2, 2, 3, 2\]"):
        communicator.all_to_all_v(SEND, [1, 1], [0, 1], RECEIVE, [1, 1, 1], [0, 1], F32)
    with pytest.raises(FlagCXError, match="negative") as raised:
        communicator.all_to_all_v(SEND, [1, -1], [0, 1], RECEIVE, [1, 1], [0, 1], F32)
    assert "[1, -1]" in str(raised.value)
    assert (raised.value.count, raised.value.dtype) == (0, "FLOAT32 (7)")
    assert recorder.calls("flagcxAlltoAllv") == []


@pytest.mark.parametrize("dtype", DataType)
def test_dtype_numbers_are_flagcx_numbers(
    communicator: FlagCXCommunicator, recorder: Recorder, dtype: DataType
) -> None:
    header = ["INT8", "UINT8", "INT32", "UINT32", "INT64", "UINT64", "FLOAT16", "FLOAT32", "FLOAT64", "BFLOAT16"]
    communicator.all_reduce(SEND, RECEIVE, 1, dtype, ReduceOp.SUM)
    assert header[recorder.only("flagcxAllReduce")["dtype"]] == dtype.name


@pytest.mark.parametrize("op", ReduceOp)
def test_reduce_op_numbers_are_flagcx_numbers(
    communicator: FlagCXCommunicator, recorder: Recorder, op: ReduceOp
) -> None:
    communicator.all_reduce(SEND, RECEIVE, 1, DataType.INT8, op)
    assert ["SUM", "PROD", "MAX", "MIN", "AVG"][recorder.only("flagcxAllReduce")["op"]] == op.name


def test_the_bare_c_function_is_the_same_call(communicator: FlagCXCommunicator, recorder: Recorder) -> None:
    all_reduce = communicator.library.function(FlagCXOperation.ALL_REDUCE)
    assert all_reduce(communicator.handle, SEND, RECEIVE, 5, F32, AVG, STREAM) == 0
    assert recorder.only("flagcxAllReduce")["count"] == 5
    with pytest.raises(OverflowError):
        all_reduce(communicator.handle, SEND, RECEIVE, -5, F32, AVG, STREAM)


@pytest.mark.parametrize("operation", [operation for operation in FlagCXOperation if operation in CASES])
def test_the_bare_c_function_exists_for(operation: FlagCXOperation, library: FlagCXLibrary) -> None:
    assert callable(library.function(operation))


# Forms of the API


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_recognised_and_carries_a_whole_life(form: int, make_recorder: MakeRecorder) -> None:
    """Given a library of each form, a life from opening to closing makes exactly the calls of that form."""
    recorder = make_recorder(form)
    with FlagCXLibrary.open(recorder.path) as library:
        assert library.form is (Form.DEVICE_HANDLE if form >= 13 else Form.HANDLER_GROUP)
        assert library.missing_symbols == (
            frozenset() if form >= 13 else {"flagcxDeviceHandleInit", "flagcxDeviceHandleFree"}
        )
        recorder.set_unique_id(bytes(range(256)))
        with FlagCXCommunicator.create(library, library.unique_id(), 3, 2, LIMIT_S, device=1) as communicator:
            communicator.all_reduce(SEND, RECEIVE, 5 * 10**9, DataType.BFLOAT16, ReduceOp.MAX, STREAM)
    new = form >= 13
    assert recorder.names() == [
        "flagcxDeviceHandleInit" if new else "flagcxHandleInit",
        "getVendor",
        "flagcxGetUniqueId",
        "setDevice",
        "flagcxCommInitRank",
        "streamCopy",
        "flagcxAllReduce",
        "setDevice",
        "flagcxCommDestroy",
        "streamFree",
        "flagcxDeviceHandleFree" if new else "flagcxHandleFree",
    ]
    assert recorder.only("flagcxGetUniqueId").values["form"] == ("pointer" if new else "pointer_to_pointer")
    init = recorder.only("flagcxCommInitRank")
    assert (init["world_size"], init["rank"], init["device"]) == (3, 2, 1)
    assert bytes.fromhex(init.values["id"]) == bytes(range(256))
    call = recorder.only("flagcxAllReduce")
    assert (call["count"], call["dtype"], call["op"], call["stream"]) == (5 * 10**9, 9, 2, STREAM)


@pytest.mark.parametrize("form", FORMS)
def test_memory_calls_fit_each_form(form: int, make_recorder: MakeRecorder) -> None:
    """The trailing argument is 0 where the form has one, and pointers to fill start as NULL."""
    recorder = make_recorder(form)
    library = FlagCXLibrary.open(recorder.path)
    communicator = FlagCXCommunicator.create(library, library.unique_id(), 1, 0, LIMIT_S)
    assert library.mem_alloc(2**33) == 0x7000
    library.mem_free(0x7000)
    assert communicator.register(SEND, 2**33) == 0x8000
    communicator.deregister(0x8000)
    assert communicator.window_register(RECEIVE, 2**33, WindowFlags.SYMMETRIC) == 0x9000
    communicator.window_deregister(0x9000)
    communicator.close()
    assert recorder.only("flagcxMemAlloc").values == {"bytes": str(2**33), "trailing": "0"}
    assert recorder.only("flagcxMemFree").values == {"buffer": str(0x7000), "trailing": "0"}
    register = recorder.only("flagcxCommRegister")
    assert (register["buffer"], register["bytes"], register["trailing"]) == (SEND, 2**33, 0)
    assert recorder.only("flagcxCommDeregister")["registration"] == 0x8000
    window = recorder.only("flagcxCommWindowRegister")
    assert (window["buffer"], window["bytes"], window["flags"], window["trailing"]) == (RECEIVE, 2**33, 1, 0)
    assert recorder.only("flagcxCommWindowDeregister")["window"] == 0x9000


# Unique ids


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("byte", [0xFF, 0x00, 0xA5])
def test_every_byte_of_a_unique_id_survives(form: int, byte: int, make_recorder: MakeRecorder) -> None:
    """Case 14; releases 0.11 to 0.13 write into the id they get, so that the caller's must be a copy."""
    recorder = make_recorder(form)
    recorder.set_unique_id(bytes([byte]) * 256)
    library = FlagCXLibrary.open(recorder.path)
    unique_id = library.unique_id()
    assert unique_id == bytes([byte]) * 256
    for rank in (0, 1):
        FlagCXCommunicator.create(library, unique_id, 2, rank, LIMIT_S).close()
    assert unique_id == bytes([byte]) * 256
    for init in recorder.calls("flagcxCommInitRank"):
        assert bytes.fromhex(init.values["id"]) == unique_id


def test_a_unique_id_larger_than_declared_keeps_all_its_bytes(make_recorder: MakeRecorder) -> None:
    """Case 14: 4120 bytes, the size of the id in the head's plugins; the shim neither overruns nor cuts it."""
    recorder = make_recorder(id_bytes=4120)
    written = bytes([0xFF]) * 4100 + bytes(20)
    recorder.set_unique_id(written)
    library = FlagCXLibrary.open(recorder.path)
    unique_id = library.unique_id()
    assert library.unique_id_size == 256
    assert unique_id[:4120] == written
    FlagCXCommunicator.create(library, unique_id, 1, 0, LIMIT_S).close()
    assert bytes.fromhex(recorder.only("flagcxCommInitRank").values["id"]) == written


@pytest.mark.parametrize("size", [0, 128, 255, 8193])
def test_a_cut_unique_id_is_refused_before_the_library_sees_it(
    size: int, library: FlagCXLibrary, recorder: Recorder
) -> None:
    with pytest.raises(FlagCXError, match=f"It has {size} bytes, allowed are 256 to 8192") as raised:
        FlagCXCommunicator.create(library, bytes(size), 2, 0, LIMIT_S)
    assert raised.value.code == ResultCode.BAD_UNIQUE_ID
    assert recorder.calls("flagcxCommInitRank") == []


@pytest.mark.parametrize(("world_size", "rank"), [(2, 2), (2, -1), (0, 0)])
def test_a_rank_outside_the_world_is_refused(library: FlagCXLibrary, world_size: int, rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} of a world of {world_size}"):
        FlagCXCommunicator.create(library, bytes(256), world_size, rank, LIMIT_S)


# Questions


def test_questions_are_the_librarys_answers(
    communicator: FlagCXCommunicator, library: FlagCXLibrary, recorder: Recorder
) -> None:
    recorder.set_async_error(6)
    library.set_device(3)
    assert (library.get_device(), library.device_count()) == (3, 4)
    assert (communicator.library_world_size(), communicator.library_rank(), communicator.library_device()) == (2, 1, 3)
    assert communicator.is_homogeneous()
    assert communicator.async_error() == ResultCode.REMOTE_ERROR
    library.device_synchronize()
    library.stream_synchronize(STREAM)
    assert recorder.only("streamSynchronize")["stream"] == STREAM
    communicator.barrier(STREAM)
    assert recorder.only("flagcxBarrier")["stream"] == STREAM


def test_memory_kind_follows_the_vendor(make_recorder: MakeRecorder) -> None:
    for vendor, kind in (("NVIDIA", MemoryKind.DEVICE), ("HOST", MemoryKind.HOST)):
        recorder = make_recorder()
        recorder.set_vendor(vendor)
        capabilities = FlagCXLibrary.open(recorder.path).capabilities
        assert (capabilities.vendor, capabilities.memory) == (vendor, kind)
        captures = FlagCXOperation.ALL_REDUCE in capabilities.graph_capture
        assert captures is (kind is MemoryKind.DEVICE)
        assert FlagCXOperation.BARRIER not in capabilities.graph_capture
