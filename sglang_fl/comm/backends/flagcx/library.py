"""FlagCXLibrary: one opened libflagcx, what it can do, its devices and its memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from sglang_fl.comm.backends.flagcx import environment, jobs, locate
from sglang_fl.comm.backends.flagcx.errors import FlagCXError, ResultCode, integer_error
from sglang_fl.comm.backends.flagcx.group import Group
from sglang_fl.comm.backends.flagcx.native import Native, load
from sglang_fl.comm.backends.flagcx.types import (
    GRAPH_CAPTURE,
    IN_PLACE,
    SYMBOLS,
    DataType,
    FlagCXCapabilities,
    FlagCXOperation,
    Form,
    MemoryKind,
    ReduceOp,
)

# getVendor's answers of libraries whose "device" is host memory.
HOST_VENDORS = frozenset({"HOST"})

UNIQUE_ID_LIMIT_S = 60.0
_MESSAGE_BYTES = 2048
_VENDOR_BYTES = 128


class FlagCXLibrary:
    """An opened libflagcx. All methods may be called from any thread; none is collective.

    Attributes:
        path: the file that the loader took.
        form: which form of the C API it has.
        missing_symbols: functions that this binding can use and the library lacks.
        capabilities: what it can do, as data.
        unique_id_size: bytes of a unique id as the API declares it. A library that writes more gets all its
            bytes carried: the length of what ``unique_id`` returns is what counts.
    """

    def __init__(self, native: Native, handle: Any) -> None:
        """Use :meth:`open`."""
        self.native = native
        self.handle = handle
        lib, ffi = native
        self.path: str = ffi.string(lib.sglang_fl_flagcx_library_path(handle)).decode()
        new_form = lib.sglang_fl_flagcx_uses_device_handle_init(handle)
        self.form = Form.DEVICE_HANDLE if new_form else Form.HANDLER_GROUP
        self.unique_id_size: int = lib.SGLANG_FL_FLAGCX_UNIQUE_ID_BYTES
        names = [
            ffi.string(lib.sglang_fl_flagcx_symbol_name(index)).decode()
            for index in range(lib.sglang_fl_flagcx_symbol_count())
        ]
        self.missing_symbols = frozenset(
            name for name in names if not lib.sglang_fl_flagcx_has_symbol(handle, name.encode())
        )
        self.capabilities = self._capabilities()

    @classmethod
    def open(cls, flagcx_path: str | os.PathLike[str] | None = None) -> FlagCXLibrary:
        """Open the library that ``flagcx_path`` names; None means ``$FLAGCX_PATH``, empty the loader's path.

        Raises:
            FlagCXError: NO_EXTENSION, NOT_FOUND, WRONG_FILE, NO_FILE_DESCRIPTOR, NOT_LOADED, MISSING_SYMBOL (a
                function that no communicator can do without), BAD_ENVIRONMENT, or what the library answered.
        """
        native = load()
        environment.check(os.environ)
        given = os.environ.get("FLAGCX_PATH", "") if flagcx_path is None else os.fspath(flagcx_path)
        path = locate.find(given)
        code = native.ffi.new("int32_t *")
        message = native.ffi.new("char[]", _MESSAGE_BYTES)
        handle = native.lib.sglang_fl_flagcx_open(os.fsencode(path), code, message, _MESSAGE_BYTES)
        if handle == native.ffi.NULL:
            raise _open_error(code[0], path, given, native.ffi.string(message).decode(errors="replace"))
        return cls(native, handle)

    def function(self, operation: FlagCXOperation) -> Callable[..., int]:
        """The C function of ``operation``: call it with ``communicator.handle`` first and compare with 0.

        Buffers, counts and the raw stream are plain integers. What is not 0 becomes an error through
        ``communicator.error``. An integer that does not fit raises OverflowError.
        """
        function: Callable[..., int] = getattr(self.native.lib, f"sglang_fl_flagcx_{operation.value}")
        return function

    def unique_id(self, timeout_s: float = UNIQUE_ID_LIMIT_S) -> bytes:
        """A new id: one rank calls this, its process lives on until all ranks have joined, one id makes one
        communicator. Hand on all bytes.

        Raises:
            FlagCXError: TIMED_OUT after ``timeout_s`` seconds, BAD_ENVIRONMENT, or what the library answered.
            ValueError: a ``timeout_s`` that is no time.
        """
        jobs.check_limit("timeout_s", timeout_s)
        environment.check(os.environ)
        lib, ffi = self.native
        code = ffi.new("int32_t *")
        handle = lib.sglang_fl_flagcx_start_unique_id(self.handle, code)
        with jobs.started(self.native, "unique_id", handle, code[0]) as job:
            try:
                result = job.result(timeout_s)
            except jobs.TimeLimitError:
                raise jobs.timed_out("unique_id", timeout_s, "stage: unique id, no other rank takes part") from None
            if result != 0:
                raise FlagCXError(result, "unique_id", "Stage: unique id", library_message=job.message())
            buffer = ffi.new("uint8_t[]", lib.SGLANG_FL_FLAGCX_UNIQUE_ID_CAPACITY)
            size = lib.sglang_fl_flagcx_job_unique_id(job.handle, buffer, len(buffer))
            return bytes(ffi.buffer(buffer, size))

    @property
    def vendor(self) -> str:
        """The device vendor's name as the library gives it, such as NVIDIA."""
        name = self.native.ffi.new("char[]", _VENDOR_BYTES)
        self._check(self.native.lib.sglang_fl_flagcx_vendor(self.handle, name, _VENDOR_BYTES), "vendor")
        return str(self.native.ffi.string(name).decode(errors="replace"))

    def get_device(self) -> int:
        """The calling thread's current device."""
        return self._ask("sglang_fl_flagcx_get_device")

    def set_device(self, device: int) -> None:
        """Make ``device`` the calling thread's current device."""
        self._call("set_device", self.native.lib.sglang_fl_flagcx_set_device, device)

    def device_count(self) -> int:
        """How many devices this process sees."""
        return self._ask("sglang_fl_flagcx_device_count")

    def device_synchronize(self) -> None:
        """Wait for everything enqueued on the current device."""
        self._check(self.native.lib.sglang_fl_flagcx_device_synchronize(self.handle), "device_synchronize")

    def stream_synchronize(self, stream: int) -> None:
        """Wait for everything enqueued on the raw stream ``stream``."""
        self._call("stream_synchronize", self.native.lib.sglang_fl_flagcx_stream_synchronize, stream)

    def mem_alloc(self, size: int) -> int:
        """Address of ``size`` bytes of the library's own memory, which can become a symmetric window."""
        address = self.native.ffi.new("uintptr_t *")
        self._call("mem_alloc", self.native.lib.sglang_fl_flagcx_mem_alloc, size, address)
        return int(address[0])

    def mem_free(self, address: int) -> None:
        """Give back what :meth:`mem_alloc` returned."""
        self._call("mem_free", self.native.lib.sglang_fl_flagcx_mem_free, address)

    def group(self) -> Group:
        """A group without a communicator of its own: over several homogeneous communicators of this thread."""
        lib = self.native.lib
        return Group(
            lib.sglang_fl_flagcx_library_group_start, lib.sglang_fl_flagcx_library_group_end, self.handle, _fail
        )

    def close(self) -> None:
        """Give back the library's device handle. Idempotent. The file stays mapped: it has threads of its own.

        Raises:
            FlagCXError: IN_USE while communicators, groups or given-up creations of this library live.
        """
        code = self.native.lib.sglang_fl_flagcx_close(self.handle)
        if code == ResultCode.IN_USE:
            users = self.native.lib.sglang_fl_flagcx_library_users(self.handle)
            raise FlagCXError(
                code,
                "close the library",
                f"{users} communicators, groups or calls of {self.path} still live; close the communicators first. "
                "One whose creation was given up lives until that fails or is aborted",
            )
        if code not in (0, ResultCode.ALREADY_ENDED):
            raise FlagCXError(code, "close the library")

    def __enter__(self) -> FlagCXLibrary:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _capabilities(self) -> FlagCXCapabilities:
        missing = self.missing_symbols
        operations = frozenset(operation for operation, symbol in SYMBOLS.items() if symbol not in missing)
        vendor = self.vendor
        memory = MemoryKind.HOST if vendor.upper() in HOST_VENDORS else MemoryKind.DEVICE
        return FlagCXCapabilities(
            operations=operations,
            dtypes=frozenset(DataType),
            reduce_ops=frozenset(ReduceOp),
            in_place={operation: rule for operation, rule in IN_PLACE.items() if operation in operations},
            memory=memory,
            vendor=vendor,
            memory_registration={FlagCXOperation.REGISTER, FlagCXOperation.DEREGISTER} <= operations,
            symmetric_windows={FlagCXOperation.WINDOW_REGISTER, FlagCXOperation.WINDOW_DEREGISTER} <= operations,
            allocates_memory=not {"flagcxMemAlloc", "flagcxMemFree"} & missing,
            uneven_sizes=frozenset({FlagCXOperation.ALL_TO_ALL_V}) & operations,
            graph_capture=operations & GRAPH_CAPTURE if memory is MemoryKind.DEVICE else frozenset(),
        )

    def _ask(self, function: str) -> int:
        value = self.native.ffi.new("int32_t *")
        self._check(getattr(self.native.lib, function)(self.handle, value), function.removeprefix("sglang_fl_flagcx_"))
        return int(value[0])

    def _call(self, operation: str, function: Callable[..., int], value: int, *places: Any) -> None:
        try:
            code = function(self.handle, value, *places)
        except OverflowError as error:
            raise integer_error(operation, value, error) from error
        if code != 0:
            raise FlagCXError(code, operation, f"Given was {value}")

    @staticmethod
    def _check(code: int, operation: str) -> None:
        if code != 0:
            raise FlagCXError(code, operation)


def _fail(code: int, operation: FlagCXOperation) -> None:
    raise FlagCXError(code, operation)


def _open_error(code: int, path: str, given: str, message: str) -> FlagCXError:
    source = f"FLAGCX_PATH={given}" if given else "the loader's search path, since FLAGCX_PATH is not set"
    if code == ResultCode.MISSING_SYMBOL:
        details = f"{path} (from {source}) lacks {message}; it is no FlagCX of release 0.7 or later"
    elif code == ResultCode.NOT_LOADED and not given:
        details = f"{message} (from {source}). {locate.ALLOWED}"
    else:
        details = f"{path} (from {source}){f': {message}' if message else ''}"
    return FlagCXError(code, "open FlagCX", details)
