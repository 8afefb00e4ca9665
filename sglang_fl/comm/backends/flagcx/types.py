"""FlagCX's numbers and what a library can do, as enums and data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum, IntFlag


class DataType(IntEnum):
    """``flagcxDataType_t``, the same in every release. FlagCX has no bool, 16-bit integers or float8."""

    INT8 = 0
    UINT8 = 1
    INT32 = 2
    UINT32 = 3
    INT64 = 4
    UINT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9


ITEM_BYTES: dict[DataType, int] = {
    DataType.INT8: 1,
    DataType.UINT8: 1,
    DataType.INT32: 4,
    DataType.UINT32: 4,
    DataType.INT64: 8,
    DataType.UINT64: 8,
    DataType.FLOAT16: 2,
    DataType.FLOAT32: 4,
    DataType.FLOAT64: 8,
    DataType.BFLOAT16: 2,
}


class ReduceOp(IntEnum):
    """``flagcxRedOp_t``."""

    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    AVG = 4


class WindowFlags(IntFlag):
    """``winFlags`` of ``flagcxCommWindowRegister``."""

    DEFAULT = 0
    SYMMETRIC = 1


class FlagCXOperation(str, Enum):
    """What a communicator may be able to do."""

    ALL_REDUCE = "all_reduce"
    REDUCE = "reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"
    GATHER = "gather"
    SCATTER = "scatter"
    ALL_TO_ALL = "all_to_all"
    ALL_TO_ALL_V = "all_to_all_v"
    BARRIER = "barrier"
    SEND = "send"
    RECV = "recv"
    GROUP_START = "group_start"
    GROUP_END = "group_end"
    REGISTER = "register"
    DEREGISTER = "deregister"
    WINDOW_REGISTER = "window_register"
    WINDOW_DEREGISTER = "window_deregister"
    ASYNC_ERROR = "async_error"
    ABORT = "abort"


# The symbol of libflagcx that each operation needs.
SYMBOLS: dict[FlagCXOperation, str] = {
    FlagCXOperation.ALL_REDUCE: "flagcxAllReduce",
    FlagCXOperation.REDUCE: "flagcxReduce",
    FlagCXOperation.REDUCE_SCATTER: "flagcxReduceScatter",
    FlagCXOperation.ALL_GATHER: "flagcxAllGather",
    FlagCXOperation.BROADCAST: "flagcxBroadcast",
    FlagCXOperation.GATHER: "flagcxGather",
    FlagCXOperation.SCATTER: "flagcxScatter",
    FlagCXOperation.ALL_TO_ALL: "flagcxAlltoAll",
    FlagCXOperation.ALL_TO_ALL_V: "flagcxAlltoAllv",
    FlagCXOperation.BARRIER: "flagcxBarrier",
    FlagCXOperation.SEND: "flagcxSend",
    FlagCXOperation.RECV: "flagcxRecv",
    FlagCXOperation.GROUP_START: "flagcxGroupStart",
    FlagCXOperation.GROUP_END: "flagcxGroupEnd",
    FlagCXOperation.REGISTER: "flagcxCommRegister",
    FlagCXOperation.DEREGISTER: "flagcxCommDeregister",
    FlagCXOperation.WINDOW_REGISTER: "flagcxCommWindowRegister",
    FlagCXOperation.WINDOW_DEREGISTER: "flagcxCommWindowDeregister",
    FlagCXOperation.ASYNC_ERROR: "flagcxCommGetAsyncError",
    FlagCXOperation.ABORT: "flagcxCommAbort",
}


class InPlace(Enum):
    """How send and receive buffer may overlap. Any other overlap gives undefined values."""

    NO = "the buffers must not overlap"
    SAME_BUFFER = "send == receive"
    OWN_BLOCK_OF_RECEIVE = "send == receive + rank * count elements"
    OWN_BLOCK_OF_SEND = "receive == send + rank * count elements"


# NCCL's rules, which homogeneous communicators follow. flagcx.h allows AlltoAll(v) in place, but the library
# sends and receives the same bytes at the same time there.
IN_PLACE: dict[FlagCXOperation, InPlace] = {
    FlagCXOperation.ALL_REDUCE: InPlace.SAME_BUFFER,
    FlagCXOperation.REDUCE: InPlace.SAME_BUFFER,
    FlagCXOperation.BROADCAST: InPlace.SAME_BUFFER,
    FlagCXOperation.REDUCE_SCATTER: InPlace.OWN_BLOCK_OF_SEND,
    FlagCXOperation.ALL_GATHER: InPlace.OWN_BLOCK_OF_RECEIVE,
    FlagCXOperation.GATHER: InPlace.OWN_BLOCK_OF_RECEIVE,
    FlagCXOperation.SCATTER: InPlace.OWN_BLOCK_OF_SEND,
    FlagCXOperation.ALL_TO_ALL: InPlace.NO,
    FlagCXOperation.ALL_TO_ALL_V: InPlace.NO,
}


# Captured and replayed with right values on two H200s. A barrier waits on the host and cannot be captured.
GRAPH_CAPTURE = frozenset(
    {
        FlagCXOperation.ALL_REDUCE,
        FlagCXOperation.ALL_GATHER,
        FlagCXOperation.REDUCE_SCATTER,
        FlagCXOperation.ALL_TO_ALL,
        FlagCXOperation.SEND,
        FlagCXOperation.RECV,
        FlagCXOperation.GROUP_START,
        FlagCXOperation.GROUP_END,
    }
)


class MemoryKind(Enum):
    """Whose addresses the library takes."""

    HOST = "host"
    DEVICE = "device"


class Form(Enum):
    """Which of the two forms of the C API the library has; FlagCX's own version number never changes."""

    DEVICE_HANDLE = "flagcxDeviceHandleInit, unique id by pointer (0.13 and later)"
    HANDLER_GROUP = "flagcxHandleInit, unique id by pointer to pointer (0.7 to 0.12)"


@dataclass(frozen=True)
class FlagCXCapabilities:
    """What an opened library can do.

    Attributes:
        operations: those whose symbols it has; a communicator takes away what answered "not supported".
        dtypes: what it moves and reduces; other dtypes can be moved as UINT8.
        reduce_ops: for every dtype above.
        in_place: the overlap that each operation allows.
        memory: whether it takes host or device addresses.
        vendor: the device vendor that the library names, such as NVIDIA.
        memory_registration: buffers can be registered for zero-copy transfers.
        symmetric_windows: buffers can be registered as symmetric windows.
        allocates_memory: it offers memory of its own, see ``FlagCXLibrary.mem_alloc``.
        uneven_sizes: operations in which ranks may contribute different counts.
        graph_capture: operations that may be captured in a device graph; send and recv inside a group.
    """

    operations: frozenset[FlagCXOperation]
    dtypes: frozenset[DataType]
    reduce_ops: frozenset[ReduceOp]
    in_place: dict[FlagCXOperation, InPlace]
    memory: MemoryKind
    vendor: str
    memory_registration: bool
    symmetric_windows: bool
    allocates_memory: bool
    uneven_sizes: frozenset[FlagCXOperation]
    graph_capture: frozenset[FlagCXOperation]
