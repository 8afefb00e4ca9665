"""FlagCXError, and in words what each result means: the library's own text is always "Not implemented."."""

from __future__ import annotations

from enum import IntEnum
from functools import partial
from typing import Any

from sglang_fl.comm.backends.flagcx.types import DataType, ReduceOp
from sglang_fl.comm.errors import CommError


class ResultCode(IntEnum):
    """Positive: ``flagcxResult_t``. Negative: this binding's own."""

    SUCCESS = 0
    UNHANDLED_DEVICE_ERROR = 1
    SYSTEM_ERROR = 2
    INTERNAL_ERROR = 3
    INVALID_ARGUMENT = 4
    INVALID_USAGE = 5
    REMOTE_ERROR = 6
    IN_PROGRESS = 7
    UNHANDLED_CCL_ERROR = 8
    NOT_SUPPORTED = 9
    NULL_HANDLE = -1
    CLOSED = -2
    MISSING_SYMBOL = -3
    OUT_OF_MEMORY = -4
    IN_USE = -5
    ALREADY_ENDED = -6
    NO_THREAD = -7
    BAD_UNIQUE_ID = -8
    NOT_LOADED = -9
    NO_MEMORY_GIVEN = -10
    ENDING_NOW = -11
    MARK_DUE = -12
    BAD_SIZE = -13
    TIMED_OUT = -100
    NOT_FOUND = -101
    WRONG_FILE = -102
    NO_EXTENSION = -103
    BAD_ENVIRONMENT = -104
    NO_FILE_DESCRIPTOR = -105


EXPLANATIONS: dict[ResultCode, str] = {
    ResultCode.UNHANDLED_DEVICE_ERROR: (
        "a call to the device's runtime failed; check the device's health and that the buffers and the stream "
        "belong to the communicator's device"
    ),
    ResultCode.SYSTEM_ERROR: (
        "a system call failed, usually a socket or shared memory; check the network interface "
        "(FLAGCX_SOCKET_IFNAME), /dev/shm and the limits of open files"
    ),
    ResultCode.INTERNAL_ERROR: (
        "FlagCX or the library under it is in a state that it does not expect; FLAGCX_DEBUG=WARN shows its reason"
    ),
    ResultCode.INVALID_ARGUMENT: "an argument is outside what the operation allows: dtype, reduction, root, peer",
    ResultCode.INVALID_USAGE: "the call is not allowed now, for example inside or outside a group",
    ResultCode.REMOTE_ERROR: "another rank failed or is gone; look at the other ranks' output first",
    ResultCode.IN_PROGRESS: "an operation that was started before has not finished",
    ResultCode.UNHANDLED_CCL_ERROR: (
        "the collective library under FlagCX (NCCL, HCCL, ...) failed; its debug variable, such as "
        "NCCL_DEBUG=WARN, shows why"
    ),
    ResultCode.NOT_SUPPORTED: (
        "the library does not have this operation on this device or kind of communicator; use another route"
    ),
    ResultCode.NULL_HANDLE: "the handle is NULL",
    ResultCode.CLOSED: "the library or communicator was closed or aborted before the call",
    ResultCode.MISSING_SYMBOL: "the opened library lacks the function; a newer or complete FlagCX has it",
    ResultCode.OUT_OF_MEMORY: "the host has no memory left",
    ResultCode.IN_USE: "calls in flight, open groups or communicators still use it; nothing was ended",
    ResultCode.ALREADY_ENDED: "it was closed or aborted already",
    ResultCode.NO_THREAD: "the system gave no thread; check the limits of processes and memory",
    ResultCode.BAD_UNIQUE_ID: "a unique id must be handed on with all its bytes as unique_id() returned them",
    ResultCode.NOT_LOADED: "the loader refused the file",
    ResultCode.NO_MEMORY_GIVEN: "the library reported success and returned no pointer; the library is at fault",
    ResultCode.ENDING_NOW: "another close or abort of it is under way",
    ResultCode.MARK_DUE: "the call succeeded, and its recorder asked for a device event behind it",
    ResultCode.BAD_SIZE: "a recorder keeps a power of two of calls",
    ResultCode.TIMED_OUT: (
        "the time limit passed; a peer is missing, stopped or unreachable. The call was given up and its thread "
        "left behind"
    ),
    ResultCode.NOT_FOUND: "there is no FlagCX library in the places searched",
    ResultCode.WRONG_FILE: "the file is not a shared library that this process can load",
    ResultCode.NO_EXTENSION: "the package's native part is missing or does not belong to it",
    ResultCode.NO_FILE_DESCRIPTOR: (
        "this process (EMFILE) or the system (ENFILE) has no file descriptor left; close files or raise the limit: "
        "ulimit -n, fs.file-max"
    ),
    ResultCode.BAD_ENVIRONMENT: "FlagCX would end the process or fail on this environment variable",
}


INTEGER_LIMITS = (
    "a count is 0 to 2**64-1 elements, a size, an address and a stream 0 to 2**64-1, other numbers have 32 bits"
)


def result_name(code: int) -> str:
    """The field's name of a result, or its number for one that no release has."""
    try:
        result = ResultCode(code)
    except ValueError:
        return f"unknown result {code}"
    if result >= 0:
        return "flagcx" + result.name.title().replace("_", "").replace("Ccl", "CCL")
    return result.name


class FlagCXError(CommError):
    """The one error of the FlagCX binding.

    Attributes:
        code: the result, a :class:`ResultCode` where it is one of the known.
        name: its name, such as ``flagcxInvalidArgument``.
        operation: what was called, such as ``all_reduce``.
        details: what was found and what to do, in words.
        dtype, op, count, rank: of the call, None where they do not apply.
        library_message: what the library itself said, empty where it says nothing of use.
    """

    def __init__(
        self,
        code: int,
        operation: str,
        details: str = "",
        *,
        dtype: int | None = None,
        op: int | None = None,
        count: int | None = None,
        rank: int | None = None,
        library_message: str = "",
    ) -> None:
        self.code = ResultCode(code) if code in ResultCode.__members__.values() else code
        self.name = result_name(code)
        self.operation = operation
        self.details = details
        self._dtype_number, self._op_number = dtype, op
        self.dtype = _enum_name(DataType, dtype)
        self.op = _enum_name(ReduceOp, op)
        self.count = count
        self.rank = rank
        self.library_message = library_message
        super().__init__(self._text())

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle: an error of one rank is often told to another process."""
        rebuild = partial(
            FlagCXError,
            dtype=self._dtype_number,
            op=self._op_number,
            count=self.count,
            rank=self.rank,
            library_message=self.library_message,
        )
        return rebuild, (int(self.code), self.operation, self.details)

    @property
    def is_unsupported(self) -> bool:
        """True where the operation is lacking, not wrong: take another route, on all ranks alike."""
        return self.code in (ResultCode.NOT_SUPPORTED, ResultCode.MISSING_SYMBOL)

    def _text(self) -> str:
        facts = {"dtype": self.dtype, "op": self.op, "count": self.count, "rank": self.rank}
        given = ", ".join(f"{name}={value}" for name, value in facts.items() if value is not None)
        text = f"{self.operation}({given}): {self.name}"
        explanation = EXPLANATIONS.get(ResultCode(self.code)) if isinstance(self.code, ResultCode) else None
        if explanation:
            text += f": {explanation}"
        if self.details:
            text += f". {self.details}"
        if self.library_message:
            text += f". The library says: {self.library_message}"
        return text


def integer_error(operation: str, given: object, error: OverflowError, rank: int | None = None) -> FlagCXError:
    """The error of an integer that the C function cannot take; ``given`` are all that it was given."""
    details = f"Given was {given}: {error}; {INTEGER_LIMITS}"
    return FlagCXError(ResultCode.INVALID_ARGUMENT, operation, details, rank=rank)


def _enum_name(kind: type[DataType] | type[ReduceOp], value: int | None) -> str | None:
    """``FLOAT32 (7)`` where the number has a name, otherwise the number."""
    if value is None:
        return None
    names: dict[int, str] = {int(member): member.name for member in kind}
    return f"{names[value]} ({value})" if value in names else str(value)
