"""FlagCXCommunicator: one rank's membership in one FlagCX communicator."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sglang_fl.comm.backends.flagcx import environment, jobs
from sglang_fl.comm.backends.flagcx.ending import Member, end
from sglang_fl.comm.backends.flagcx.errors import INTEGER_LIMITS, FlagCXError, ResultCode, integer_error
from sglang_fl.comm.backends.flagcx.group import Group
from sglang_fl.comm.backends.flagcx.library import FlagCXLibrary
from sglang_fl.comm.backends.flagcx.types import FlagCXCapabilities, FlagCXOperation, WindowFlags

if TYPE_CHECKING:
    from sglang_fl.comm.backends.flagcx.recorder import FlagCXRecorder

END_LIMIT_S = 30.0
DRAIN_LIMIT_S = 5.0
_INT_MAX = 2**31 - 1
_MESSAGE_BYTES = 1024


class FlagCXCommunicator:
    """One rank of a communicator. One thread at a time may use it; close and abort may come from any thread.

    In every operation ``send``, ``receive`` and ``buffer`` are addresses in the library's kind of memory, counts
    are elements, ``dtype`` and ``op`` are numbers of DataType and ReduceOp, ``stream`` is the raw stream of the
    device (0: the default stream). The work is enqueued, not awaited; the buffers must live until it is done.
    Every rank of the communicator must call each collective, in the same order.

    The methods are a call and a comparison. A caller that counts nanoseconds takes
    ``library.function(FlagCXOperation.ALL_REDUCE)`` and calls it with ``communicator.handle`` first.

    Attributes:
        library: the library that it belongs to.
        handle: for the C functions; safe to use after close, they then answer CLOSED.
        world_size, rank, device: as given at its creation.
        recorder: of its calls; None unless who made it has set one.
    """

    def __init__(self, library: FlagCXLibrary, handle: Any, world_size: int, rank: int, device: int) -> None:
        """Use :meth:`create`."""
        self.library = library
        self.handle = handle
        self.world_size = world_size
        self.rank = rank
        self.device = device
        self.recorder: FlagCXRecorder | None = None
        self._lib, self._ffi = library.native
        self._unsupported: frozenset[FlagCXOperation] = frozenset()
        self._size_array = f"size_t[{world_size}]"

    @classmethod
    def create(
        cls,
        library: FlagCXLibrary,
        unique_id: bytes | bytearray | memoryview,
        world_size: int,
        rank: int,
        timeout_s: float,
        device: int | None = None,
    ) -> FlagCXCommunicator:
        """Join the communicator of ``unique_id``; all ranks must call this, each with its own ``rank``.

        Args:
            unique_id: what ``library.unique_id()`` returned on one rank, with all its bytes.
            world_size, rank: number of ranks, and this one's, from 0.
            timeout_s: limit in seconds, after which the creation is given up and its thread left behind. If it
                comes to an end later, that thread aborts what it made, where the library has an abort.
            device: this rank's device; None means the calling thread's current one.

        Raises:
            FlagCXError: TIMED_OUT or the library's result, with stage, rank, world size and, where the id
                carries one, the address at which the ranks meet; BAD_UNIQUE_ID; BAD_ENVIRONMENT.
            ValueError: a rank outside the world, numbers beyond 32 bits, a ``timeout_s`` that is no time.
        """
        _check_place(world_size, rank, device)
        jobs.check_limit("timeout_s", timeout_s)
        unique_id = _bytes_of(unique_id, rank)
        environment.check(os.environ)
        lib, ffi = library.native
        device = library.get_device() if device is None else device
        where = _where(unique_id, world_size, rank, device)
        code = ffi.new("int32_t *")
        handle = lib.sglang_fl_flagcx_start_init(
            library.handle, unique_id, len(unique_id), world_size, rank, device, code
        )
        if code[0] == ResultCode.BAD_UNIQUE_ID:
            allowed = f"{library.unique_id_size} to {lib.SGLANG_FL_FLAGCX_UNIQUE_ID_CAPACITY}"
            raise FlagCXError(
                code[0], "create", f"It has {len(unique_id)} bytes, allowed are {allowed}. {where}", rank=rank
            )
        with jobs.started(library.native, "create", handle, code[0]) as job:
            try:
                result = job.result(timeout_s)
            except jobs.TimeLimitError:
                raise jobs.timed_out("create", timeout_s, where, rank) from None
            if result != 0:
                raise FlagCXError(result, "create", where, rank=rank, library_message=job.message())
            made = lib.sglang_fl_flagcx_job_communicator(job.handle)
        return cls(library, made, world_size, rank, device)

    @property
    def capabilities(self) -> FlagCXCapabilities:
        """The library's, without the operations that answered "not supported" on this communicator."""
        known = self.library.capabilities
        return replace(known, operations=known.operations - self._unsupported)

    @property
    def is_open(self) -> bool:
        """False once close or abort has begun."""
        return bool(self._lib.sglang_fl_flagcx_is_open(self.handle))

    # Collectives

    def all_reduce(self, send: int, receive: int, count: int, dtype: int, op: int, stream: int = 0) -> None:
        """Every rank's ``receive`` gets the reduction of all ``send``, ``count`` elements each."""
        try:
            code = self._lib.sglang_fl_flagcx_all_reduce(self.handle, send, receive, count, dtype, op, stream)
        except OverflowError as error:
            raise self._bad_integer(FlagCXOperation.ALL_REDUCE, error, count, dtype, op) from error
        if code:
            self.settle(code, FlagCXOperation.ALL_REDUCE, dtype, op, count)

    def reduce(self, send: int, receive: int, count: int, dtype: int, op: int, root: int, stream: int = 0) -> None:
        """Rank ``root``'s ``receive`` gets the reduction; elsewhere ``receive`` may be 0."""
        try:
            code = self._lib.sglang_fl_flagcx_reduce(self.handle, send, receive, count, dtype, op, root, stream)
        except OverflowError as error:
            raise self._bad_integer(FlagCXOperation.REDUCE, error, count, dtype, op) from error
        if code:
            self.settle(code, FlagCXOperation.REDUCE, dtype, op, count)

    def reduce_scatter(self, send: int, receive: int, count: int, dtype: int, op: int, stream: int = 0) -> None:
        """``receive`` gets block ``rank`` (``count`` elements) of the reduction of all ``send`` (world_size blocks)."""
        try:
            code = self._lib.sglang_fl_flagcx_reduce_scatter(self.handle, send, receive, count, dtype, op, stream)
        except OverflowError as error:
            raise self._bad_integer(FlagCXOperation.REDUCE_SCATTER, error, count, dtype, op) from error
        if code:
            self.settle(code, FlagCXOperation.REDUCE_SCATTER, dtype, op, count)

    def all_gather(self, send: int, receive: int, count: int, dtype: int, stream: int = 0) -> None:
        """``receive`` (world_size blocks of ``count`` elements) gets every rank's ``send`` in rank order."""
        try:
            code = self._lib.sglang_fl_flagcx_all_gather(self.handle, send, receive, count, dtype, stream)
        except OverflowError as error:
            raise self._bad_integer(FlagCXOperation.ALL_GATHER, error, count, dtype) from error
        if code:
            self.settle(code, FlagCXOperation.ALL_GATHER, dtype, None, count)

    def broadcast(self, send: int, receive: int, count: int, dtype: int, root: int, stream: int = 0) -> None:
        """Every rank's ``receive`` gets rank ``root``'s ``send``; elsewhere ``send`` is not read."""
        self._rooted(
            self._lib.sglang_fl_flagcx_broadcast, FlagCXOperation.BROADCAST, send, receive, count, dtype, root, stream
        )

    def gather(self, send: int, receive: int, count: int, dtype: int, root: int, stream: int = 0) -> None:
        """Rank ``root``'s ``receive`` (world_size blocks of ``count`` elements) gets every rank's ``send``."""
        self._rooted(
            self._lib.sglang_fl_flagcx_gather, FlagCXOperation.GATHER, send, receive, count, dtype, root, stream
        )

    def scatter(self, send: int, receive: int, count: int, dtype: int, root: int, stream: int = 0) -> None:
        """``receive`` gets block ``rank`` (``count`` elements) of rank ``root``'s ``send``."""
        self._rooted(
            self._lib.sglang_fl_flagcx_scatter, FlagCXOperation.SCATTER, send, receive, count, dtype, root, stream
        )

    def all_to_all(self, send: int, receive: int, count: int, dtype: int, stream: int = 0) -> None:
        """Block r of ``send`` (``count`` elements) goes to block ``rank`` of rank r's ``receive``."""
        try:
            code = self._lib.sglang_fl_flagcx_all_to_all(self.handle, send, receive, count, dtype, stream)
        except OverflowError as error:
            raise self._bad_integer(FlagCXOperation.ALL_TO_ALL, error, count, dtype) from error
        if code:
            self.settle(code, FlagCXOperation.ALL_TO_ALL, dtype, None, count)

    def all_to_all_v(
        self,
        send: int,
        send_counts: Sequence[int],
        send_offsets: Sequence[int],
        receive: int,
        receive_counts: Sequence[int],
        receive_offsets: Sequence[int],
        dtype: int,
        stream: int = 0,
    ) -> None:
        """As all_to_all with counts and offsets (elements) per peer, world_size entries each.

        Raises:
            ValueError: a list of another length.
        """
        lists = (send_counts, send_offsets, receive_counts, receive_offsets)
        lengths = [len(values) for values in lists]
        if lengths != [self.world_size] * 4:
            raise ValueError(f"all_to_all_v needs {self.world_size} counts and offsets each, got {lengths}")
        try:
            arrays = [self._ffi.new(self._size_array, list(values)) for values in lists]
            code = self._lib.sglang_fl_flagcx_all_to_all_v(
                self.handle, send, arrays[0], arrays[1], receive, arrays[2], arrays[3], dtype, stream
            )
        except OverflowError as error:
            raise self._bad_integer(
                FlagCXOperation.ALL_TO_ALL_V, error, sum(send_counts), dtype, given=lists
            ) from error
        if code:
            self.settle(code, FlagCXOperation.ALL_TO_ALL_V, dtype, None, sum(send_counts))

    def barrier(self, stream: int = 0) -> None:
        """Block the host until all ranks have come here. FlagCX reports no error of its own from this call."""
        try:
            code = self._lib.sglang_fl_flagcx_barrier(self.handle, stream)
        except OverflowError as error:
            raise integer_error("barrier", f"stream {stream}", error, self.rank) from error
        if code:
            self.settle(code, FlagCXOperation.BARRIER)

    # Point to point

    def send(self, buffer: int, count: int, dtype: int, peer: int, stream: int = 0) -> None:
        """Send to rank ``peer``, which must receive the same count and dtype. Both directions need a group."""
        try:
            code = self._lib.sglang_fl_flagcx_send(self.handle, buffer, count, dtype, peer, stream)
        except OverflowError as error:
            raise self._bad_integer(FlagCXOperation.SEND, error, count, dtype) from error
        if code:
            self.settle(code, FlagCXOperation.SEND, dtype, None, count)

    def recv(self, buffer: int, count: int, dtype: int, peer: int, stream: int = 0) -> None:
        """Receive from rank ``peer`` what it sends to this rank."""
        try:
            code = self._lib.sglang_fl_flagcx_recv(self.handle, buffer, count, dtype, peer, stream)
        except OverflowError as error:
            raise self._bad_integer(FlagCXOperation.RECV, error, count, dtype) from error
        if code:
            self.settle(code, FlagCXOperation.RECV, dtype, None, count)

    def group(self) -> Group:
        """``with communicator.group():`` the calls inside progress together and start at its end."""
        lib = self._lib
        return Group(lib.sglang_fl_flagcx_group_start, lib.sglang_fl_flagcx_group_end, self.handle, self.settle)

    # Memory

    def register(self, buffer: int, size: int) -> int:
        """Register ``size`` bytes for zero-copy transfers; the result is for :meth:`deregister`."""
        registration = self._ffi.new("uintptr_t *")
        function = self._lib.sglang_fl_flagcx_register
        self._call(function, FlagCXOperation.REGISTER, (buffer, size), registration)
        return int(registration[0])

    def deregister(self, registration: int) -> None:
        """Undo :meth:`register`."""
        self._call(self._lib.sglang_fl_flagcx_deregister, FlagCXOperation.DEREGISTER, (registration,))

    def window_register(self, buffer: int, size: int, flags: WindowFlags = WindowFlags.SYMMETRIC) -> int:
        """Make ``size`` bytes of ``library.mem_alloc`` a window; collective. The result is for the opposite."""
        window = self._ffi.new("uintptr_t *")
        function = self._lib.sglang_fl_flagcx_window_register
        self._call(function, FlagCXOperation.WINDOW_REGISTER, (buffer, size, int(flags)), window)
        return int(window[0])

    def window_deregister(self, window: int) -> None:
        """Undo :meth:`window_register`; collective."""
        self._call(self._lib.sglang_fl_flagcx_window_deregister, FlagCXOperation.WINDOW_DEREGISTER, (window,))

    # State

    def async_error(self) -> int:
        """The result of work enqueued before: 0, IN_PROGRESS, or what went wrong meanwhile. Not collective.

        On a GPU this stays 0 while a peer is dead or stopped, since nothing crosses a network.
        """
        return self._ask(self._lib.sglang_fl_flagcx_async_error, FlagCXOperation.ASYNC_ERROR)

    def library_world_size(self) -> int:
        """Number of ranks as the library has it."""
        return self._ask(self._lib.sglang_fl_flagcx_count, "count")

    def library_rank(self) -> int:
        """This rank as the library has it."""
        return self._ask(self._lib.sglang_fl_flagcx_rank, "rank")

    def library_device(self) -> int:
        """The device number as the library has it."""
        return self._ask(self._lib.sglang_fl_flagcx_device, "device")

    def is_homogeneous(self) -> bool:
        """Whether all ranks have devices of one vendor."""
        return bool(self._ask(self._lib.sglang_fl_flagcx_is_homogeneous, "is_homogeneous"))

    def calls_in_flight(self) -> int:
        """Calls of other threads and open groups at this moment."""
        return int(self._lib.sglang_fl_flagcx_calls_in_flight(self.handle))

    # End

    def close(self, timeout_s: float = END_LIMIT_S, drain_s: float = DRAIN_LIMIT_S) -> None:
        """Destroy the communicator after the calls in flight. Idempotent, from any thread.

        While another close or abort is under way it waits for that one, and then does its own if need be.

        Raises:
            FlagCXError: IN_USE if calls are in flight or groups open after ``drain_s`` seconds, it then stays
                usable unless an abort was tried; TIMED_OUT if the library, or the other close or abort, has not
                come back after ``timeout_s`` seconds.
        """
        self._end(self._lib.sglang_fl_flagcx_start_destroy, "close", timeout_s, drain_s)

    def abort(self, timeout_s: float = END_LIMIT_S, drain_s: float = DRAIN_LIMIT_S) -> None:
        """End it without waiting for enqueued work; what that work wrote is undefined. Idempotent, local.

        Once it has begun, every other call answers CLOSED, whatever becomes of it. While another close or abort
        is under way it waits for that one, and then does its own if need be.

        Raises:
            FlagCXError: IN_USE if calls are still in flight after ``drain_s`` seconds (aborting under them would
                free what they use; it may be called again), TIMED_OUT, MISSING_SYMBOL.
        """
        self._end(self._lib.sglang_fl_flagcx_start_abort, "abort", timeout_s, drain_s)

    def __enter__(self) -> FlagCXCommunicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self, warn: Callable[..., None] = warnings.warn) -> None:
        """Warn, and touch nothing that a peer could notice."""
        if getattr(self, "_lib", None) is not None and self.is_open:
            warn(
                f"FlagCX communicator of rank {self.rank} of {self.world_size} was never closed",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    def settle(
        self,
        code: int,
        operation: FlagCXOperation,
        dtype: int | None = None,
        op: int | None = None,
        count: int | None = None,
        shape: Sequence[int] = (),
    ) -> None:
        """Deal with a call's result that is not 0. Returns after the one that is no failure: MARK_DUE.

        Raises:
            CommError: :meth:`error`, or what the recorder's monitor knows of the call on a tensor of ``shape``.
        """
        if self.recorder is None:
            raise self.error(code, operation, dtype, op, count)
        self.recorder.settle(code, lambda: self.error(code, operation, dtype, op, count), shape)

    def error(
        self,
        code: int,
        operation: FlagCXOperation,
        dtype: int | None = None,
        op: int | None = None,
        count: int | None = None,
    ) -> FlagCXError:
        """The error of a result that is not 0; "not supported" also leaves the capabilities."""
        error = FlagCXError(
            code,
            operation.value,
            dtype=dtype,
            op=op,
            count=count,
            rank=self.rank,
            library_message=self._last_error() if code > 0 else "",
        )
        if error.is_unsupported:
            self._unsupported |= {operation}
        return error

    def _end(self, start: Callable[..., Any], what: str, timeout_s: float, drain_s: float) -> None:
        member = Member(self.library.native, self.handle, self.world_size, self.rank)
        end(member, start, what, timeout_s, drain_s)

    def _rooted(
        self,
        function: Callable[..., int],
        operation: FlagCXOperation,
        send: int,
        receive: int,
        count: int,
        dtype: int,
        root: int,
        stream: int,
    ) -> None:
        try:
            code = function(self.handle, send, receive, count, dtype, root, stream)
        except OverflowError as error:
            raise self._bad_integer(operation, error, count, dtype) from error
        if code:
            self.settle(code, operation, dtype, None, count)

    def _bad_integer(
        self,
        operation: FlagCXOperation,
        error: OverflowError,
        count: int,
        dtype: int,
        op: int | None = None,
        given: object = None,
    ) -> FlagCXError:
        counts = count if given is None else given
        details = f"Count {counts}, dtype {dtype}, op {op}: {error}; {INTEGER_LIMITS}"
        return FlagCXError(
            ResultCode.INVALID_ARGUMENT, operation.value, details, dtype=dtype, op=op, count=count, rank=self.rank
        )

    def _ask(self, question: Callable[..., int], what: str) -> int:
        value = self._ffi.new("int32_t *")
        code = question(self.handle, value)
        if code:
            raise FlagCXError(code, str(getattr(what, "value", what)), rank=self.rank)
        return int(value[0])

    def _call(
        self, function: Callable[..., int], operation: FlagCXOperation, given: tuple[int, ...], *places: Any
    ) -> None:
        try:
            code = function(self.handle, *given, *places)
        except OverflowError as error:
            raise integer_error(operation.value, given, error, self.rank) from error
        if code:
            self.settle(code, operation)

    def _last_error(self) -> str:
        message = self._ffi.new("char[]", _MESSAGE_BYTES)
        self._lib.sglang_fl_flagcx_last_error(self.handle, message, _MESSAGE_BYTES)
        return jobs.useful(self._ffi.string(message).decode(errors="replace"))


def _check_place(world_size: int, rank: int, device: int | None) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of a world of {world_size}: allowed is 0 to {world_size - 1}")
    if world_size > _INT_MAX:
        raise ValueError(f"rank {rank} of a world of {world_size}: allowed are worlds of up to {_INT_MAX} ranks")
    if device is not None and not -_INT_MAX <= device <= _INT_MAX:
        raise ValueError(f"device {device}: allowed is 0 to {_INT_MAX}, below 0 sets none")


def _bytes_of(unique_id: object, rank: int) -> bytes:
    if not isinstance(unique_id, bytes | bytearray | memoryview):
        details = f"It is a {type(unique_id).__name__}, allowed are bytes"
        raise FlagCXError(ResultCode.BAD_UNIQUE_ID, "create", details, rank=rank)
    return bytes(unique_id)


def _where(unique_id: bytes, world_size: int, rank: int, device: int) -> str:
    address = jobs.bootstrap_address(unique_id)
    meeting = f", the ranks meet at {address}" if address else ""
    return f"stage: init, rank {rank} of {world_size}, device {device}{meeting}"
