"""The transport over FlagCX: a tensor's address, count and dtype handed to the C function, nothing in between."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from sglang_fl.comm.backends.flagcx.channels import Channels
from sglang_fl.comm.backends.flagcx.communicator import FlagCXCommunicator
from sglang_fl.comm.backends.flagcx.dtypes import torch_data_types
from sglang_fl.comm.backends.flagcx.errors import FlagCXError
from sglang_fl.comm.backends.flagcx.library import FlagCXLibrary
from sglang_fl.comm.backends.flagcx.machine import Machine, spread, this_machine
from sglang_fl.comm.backends.flagcx.recorder import FlagCXRecorder, close_within
from sglang_fl.comm.backends.flagcx.recording import hot_calls
from sglang_fl.comm.backends.flagcx.types import FlagCXOperation, MemoryKind, ReduceOp
from sglang_fl.comm.backends.flagcx.windows import WindowRegistrar
from sglang_fl.comm.errors import CommError
from sglang_fl.comm.marks import raw_stream_of
from sglang_fl.comm.places import CallSite
from sglang_fl.comm.recorder import Recorder
from sglang_fl.comm.types import Backend, Capabilities, GroupContext, Operation, Transport, Work
from sglang_fl.selection import Availability, Kind

SUM = int(ReduceOp.SUM)
CLOSE_LIMIT_S = 5.0

_POINT_TO_POINT = frozenset({Operation.SEND, Operation.RECV})
# Whose names are equal on both sides.
_COLLECTIVES = {
    operation: FlagCXOperation(operation.value) for operation in Operation if operation not in _POINT_TO_POINT
}


class FlagCXTransport(Transport):
    """Collectives of one group on one FlagCX communicator; point-to-point on channels of its own."""

    def __init__(self, name: str, context: GroupContext, library: FlagCXLibrary, shared: SharedCommunicator):
        self.name = name
        communicator = shared.communicator
        self.communicator = communicator
        self._shared: SharedCommunicator | None = shared
        types = {dtype: int(number) for dtype, number in torch_data_types().items()}
        known = library.capabilities.operations
        operations: set[Operation] = {operation for operation, needed in _COLLECTIVES.items() if needed in known}
        if {FlagCXOperation.SEND, FlagCXOperation.RECV} <= known:
            operations |= _POINT_TO_POINT
        self._channels = Channels(name, context, library)
        self.registrar = WindowRegistrar(name, context, communicator)
        self.capabilities = Capabilities(
            operations=frozenset(operations),
            reducible=frozenset(types),
            movable=frozenset(types),
            device_types=frozenset({context.device.type}),
        )
        self._types = types
        self._handle = communicator.handle
        self._stream = raw_stream_of(context.device)
        self._all_reduce = library.function(FlagCXOperation.ALL_REDUCE)
        self._all_gather = library.function(FlagCXOperation.ALL_GATHER)
        self._reduce_scatter = library.function(FlagCXOperation.REDUCE_SCATTER)
        self._site = CallSite()
        self._recorder = communicator.recorder
        if self._recorder is not None:
            # Bound to the object, so that a group that is not recorded asks nothing on its hot path.
            stream = None if context.device.type == "cpu" else self._stream
            for method, call in hot_calls(communicator, types, stream).items():
                setattr(self, method, call)

    def recorders(self) -> tuple[Recorder, ...]:
        """See :meth:`Transport.recorders`: the communicator's, then those of the directions used so far."""
        own = () if self._recorder is None else (self._recorder,)
        return (*own, *self._channels.recorders())

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """See :meth:`Transport.all_reduce`."""
        address = tensor.data_ptr()
        dtype = self._types[tensor.dtype]
        code = self._all_reduce(self._handle, address, address, tensor.numel(), dtype, SUM, self._stream())
        if code:
            raise self.communicator.error(code, FlagCXOperation.ALL_REDUCE, dtype, SUM, tensor.numel())

    def all_reduce_new(self, tensor: torch.Tensor) -> torch.Tensor:
        """See :meth:`Transport.all_reduce_new`; the library writes to another place, nothing is copied."""
        output = torch.empty_like(tensor)
        dtype = self._types[tensor.dtype]
        code = self._all_reduce(
            self._handle, tensor.data_ptr(), output.data_ptr(), tensor.numel(), dtype, SUM, self._stream()
        )
        if code:
            raise self.communicator.error(code, FlagCXOperation.ALL_REDUCE, dtype, SUM, tensor.numel())
        return output

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """See :meth:`Transport.all_gather`."""
        dtype = self._types[tensor.dtype]
        code = self._all_gather(
            self._handle, tensor.data_ptr(), output.data_ptr(), tensor.numel(), dtype, self._stream()
        )
        if code:
            raise self.communicator.error(code, FlagCXOperation.ALL_GATHER, dtype, None, tensor.numel())

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """See :meth:`Transport.reduce_scatter`."""
        dtype = self._types[tensor.dtype]
        code = self._reduce_scatter(
            self._handle, tensor.data_ptr(), output.data_ptr(), output.numel(), dtype, SUM, self._stream()
        )
        if code:
            raise self.communicator.error(code, FlagCXOperation.REDUCE_SCATTER, dtype, SUM, output.numel())

    def reduce(self, tensor: torch.Tensor, dst: int) -> None:
        """See :meth:`Transport.reduce`."""
        address = tensor.data_ptr()
        self._note()
        self.communicator.reduce(address, address, tensor.numel(), self._types[tensor.dtype], SUM, dst, self._stream())

    def broadcast(self, tensor: torch.Tensor, src: int) -> Work | None:
        """See :meth:`Transport.broadcast`."""
        address = tensor.data_ptr()
        self._note()
        self.communicator.broadcast(address, address, tensor.numel(), self._types[tensor.dtype], src, self._stream())
        return None

    def gather(self, output: torch.Tensor | None, tensor: torch.Tensor, dst: int) -> None:
        """See :meth:`Transport.gather`."""
        receive = 0 if output is None else output.data_ptr()
        self._note()
        self.communicator.gather(
            tensor.data_ptr(), receive, tensor.numel(), self._types[tensor.dtype], dst, self._stream()
        )

    def send(self, tensor: torch.Tensor, dst: int) -> Work:
        """See :meth:`Transport.send`."""
        return self._channels.send(tensor, dst, self._types[tensor.dtype], self._place())

    def recv(self, tensor: torch.Tensor, src: int) -> Work:
        """See :meth:`Transport.recv`."""
        return self._channels.recv(tensor, src, self._types[tensor.dtype], self._place())

    def _note(self) -> None:
        if self._recorder is not None:
            self._recorder.next_place(self._place())

    def _place(self) -> int:
        return 0 if self._recorder is None else self._site.find()

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        shared, self._shared = self._shared, None
        if shared is None:
            return
        self._channels.close()
        shared.given_back()


@cache
def _library(path: str) -> FlagCXLibrary:
    """One opened library a path and process; it lives as long as the process."""
    return FlagCXLibrary.open(path or None)


class FlagCXBackend(Backend):
    """FlagCX through the binding."""

    name = "flagcx"
    kind = Kind.FLAGOS

    def probe(self, context: GroupContext) -> Availability:
        """Available if the library opens and its memory is the device's."""
        try:
            library = _library(context.options["flagcx_path"])
        except FlagCXError as error:
            return Availability.no(str(error))
        host_memory = library.capabilities.memory is MemoryKind.HOST
        if host_memory == (context.device.type == "cpu"):
            return Availability.yes()
        kind = "host memory" if host_memory else f"{library.capabilities.vendor} device memory"
        return Availability.no(f"{library.path} works on {kind}, this group's tensors are on {context.device.type}")

    def create(self, context: GroupContext) -> FlagCXTransport:
        """Join a communicator of the group's ranks, or share the one that they have, and call every collective once."""
        library = _library(context.options["flagcx_path"])
        key = (library.path, context.ranks, str(context.device))
        shared = _shared.get(key) if context.shares_communicator else None
        views = context.exchange("look for a communicator of the same ranks", (shared is not None, this_machine()))
        _require_one_machine(context, library, [machine for _, machine in views])
        if not all(has_one for has_one, _ in views):
            shared = None
        if shared is None:
            shared = SharedCommunicator(_join(context, library, self.name))
            if context.shares_communicator:
                _shared[key] = shared
        if shared.communicator.recorder is not None:
            context.watch(shared.communicator.recorder)
        transport = FlagCXTransport(self.name, context, library, shared.taken())
        try:
            # Before the first call: one that a peer's library lacks would wait for it.
            transport.restrict_to_common(context, "compare the libraries' operations")
            _warm_up(transport, context)
        except CommError:
            transport.close()
            raise
        return transport


@dataclass
class SharedCommunicator:
    """A communicator and how many groups of the same ranks use it; the last one closes it."""

    communicator: FlagCXCommunicator
    users: int = 0

    def taken(self) -> SharedCommunicator:
        """This one, with one more user."""
        self.users += 1
        return self

    def given_back(self) -> None:
        """One user less."""
        self.users -= 1
        if self.users:
            return
        for key in [key for key, shared in _shared.items() if shared is self]:
            del _shared[key]
        close_within(self.communicator, CLOSE_LIMIT_S)


_shared: dict[tuple[str, tuple[int, ...], str], SharedCommunicator] = {}


def _require_one_machine(context: GroupContext, library: FlagCXLibrary, machines: Sequence[Machine]) -> None:
    # Before any rank joins: the one that made the id would wait for the others until its time limit.
    places = spread(machines, context.ranks)
    if places and library.capabilities.memory is MemoryKind.HOST:
        raise CommError(
            f"{library.path} connects processes of one machine, these ranks are on different ones: {places}"
        )


def _join(context: GroupContext, library: FlagCXLibrary, name: str) -> FlagCXCommunicator:
    unique_id, problem = b"", ""
    if context.rank == 0:
        try:
            unique_id = library.unique_id(context.library_s())
        except FlagCXError as error:
            problem = str(error)
    unique_id, problem = context.exchange("hand out FlagCX's unique id", (unique_id, problem))[0]
    if problem:
        raise CommError(problem)
    device = context.device.index if context.device.type != "cpu" else None
    communicator = FlagCXCommunicator.create(
        library, unique_id, context.world_size, context.rank, context.library_s(), device
    )
    if context.records:
        communicator.recorder = FlagCXRecorder(communicator, f"{context.name} {name}", context.ranks, context.device)
    return communicator


def _warm_up(transport: FlagCXTransport, context: GroupContext) -> None:
    """Call each collective once: lazy set-up happens now, and what the library refuses leaves the capabilities."""
    ones = torch.ones(context.world_size, device=context.device)
    one = torch.ones(1, device=context.device)
    output = ones.clone() if context.rank == 0 else None
    calls: dict[Operation, Callable[[], object]] = {
        Operation.ALL_REDUCE: lambda: transport.all_reduce(one),
        Operation.ALL_GATHER: lambda: transport.all_gather(ones, torch.ones_like(one)),
        Operation.REDUCE_SCATTER: lambda: transport.reduce_scatter(torch.ones_like(one), ones),
        Operation.REDUCE: lambda: transport.reduce(torch.ones_like(one), 0),
        Operation.BROADCAST: lambda: transport.broadcast(torch.ones_like(one), 0),
        Operation.GATHER: lambda: transport.gather(output, torch.ones_like(one), 0),
    }
    refused = set()
    for operation in sorted(transport.capabilities.operations & calls.keys()):
        try:
            calls[operation]()
        except FlagCXError as error:
            if not error.is_unsupported:
                raise
            refused.add(operation)
    if context.device.type != "cpu":
        torch.get_device_module(context.device).synchronize(context.device)
    transport.restrict(transport.capabilities.operations - refused)
    if Operation.ALL_REDUCE in transport.capabilities.operations and one.item() != context.world_size:
        raise CommError(
            f"{transport.name}: all_reduce of 1 over {context.world_size} ranks gave {one.item()}: "
            f"the library at FLAGCX_PATH={os.environ.get('FLAGCX_PATH', '')} does not reduce"
        )
