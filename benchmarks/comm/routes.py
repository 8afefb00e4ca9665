"""One rank of the benchmark: every route of all_reduce, and a call of each that can be timed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from sglang_fl.comm.agreement import ITEM, agree
from sglang_fl.comm.backends.flagcx import DataType, ReduceOp
from sglang_fl.comm.backends.flagcx.transport import FlagCXTransport
from sglang_fl.comm.communicator import CommunicatorFL, group_context
from sglang_fl.comm.discovery import discover_backends
from sglang_fl.comm.errors import AgreementError
from sglang_fl.comm.marks import raw_stream_of
from sglang_fl.comm.policy import communicator_policy
from sglang_fl.comm.route_table import ANY_SIZE, NATIVE
from sglang_fl.comm.sizes import add_routes, registered_memory
from sglang_fl.comm.types import Capabilities, GroupContext, Operation, Transport
from sglang_fl.config import Settings, load_settings
from sglang_fl.devices import detect_platform
from sglang_fl.testing.ranks import RankContext

Call = Callable[[torch.Tensor], object]
FLAGCX, BARE, FASTEST, SGLANG = "flagcx", "bare flagcxAllReduce", "fastest", "SGLang's custom kernel"
TORCH, PUSH, PULL = "torch.distributed", "symm_push", "symm_pull"
ONE_SHOT, TWO_SHOT = "symm_one_shot", "symm_two_shot"
PUSH_BYTES = 4 * 2**20  # beyond, it goes in many pieces
DTYPE, NUMBER = torch.bfloat16, int(DataType.BFLOAT16)
SUM = int(ReduceOp.SUM)


@dataclass(frozen=True)
class Route:
    """One way of an all_reduce.

    Attributes:
        name: in the rows.
        call: does it once, in place or into a new tensor; all ranks must call it.
        takes: whether a call of so many bytes is valid.
        call_registered: the same as ``call`` for registered memory; None where it is not valid, captured in a graph.
    """

    name: str
    call: Call
    takes: Callable[[int], bool] = lambda size: True
    call_registered: Call | None = None


class CustomKernel(Transport):
    """SGLang's custom all_reduce as the route ``native``; what it does not take goes to torch.distributed."""

    def __init__(self, kernel: Any, group: dist.ProcessGroup) -> None:
        self.name = NATIVE
        dtypes = frozenset({torch.float16, torch.bfloat16, torch.float32})
        self.capabilities = Capabilities(frozenset({Operation.ALL_REDUCE}), dtypes, dtypes, frozenset({"cuda"}))
        self._kernel = kernel
        self._group = group

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """In place."""
        result = self.all_reduce_result(tensor)
        if result is not tensor:
            tensor.copy_(result)

    def all_reduce_result(self, tensor: torch.Tensor) -> torch.Tensor:
        """In a new tensor where the kernel takes it."""
        if self._kernel.should_custom_ar(tensor):
            result: torch.Tensor = self._kernel.custom_all_reduce(tensor)
            return result
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def _not_offered(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    all_gather = reduce_scatter = reduce = broadcast = gather = send = recv = _not_offered

    def close(self) -> None:
        """Nothing: the kernel ends with the process."""


@dataclass
class Site:
    """This rank's groups and routes.

    Attributes:
        context: the group of all ranks.
        routes: by name, those that can be used here.
        absent: the others, with the reason.
        registered: makes a tensor of registered memory, of so many elements; all ranks must call it.
        words: what mode fastest does here.
    """

    context: GroupContext
    routes: dict[str, Route] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    registered: Callable[[int], torch.Tensor] | None = None
    words: tuple[str, ...] = ()
    communicator: Any = None
    _kernel: Any = None

    @contextmanager
    def capture(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """A capture, within what SGLang's kernel needs around one."""
        around: AbstractContextManager[Any] = nullcontext() if self._kernel is None else self._kernel.capture()
        with around, torch.cuda.graph(graph, capture_error_mode="thread_local"):
            yield


def open_site(ranks: RankContext, device: torch.device) -> Site:
    """Make every route; all ranks must call it."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    settings = load_settings(platform=detect_platform())
    everyone = list(range(ranks.world_size))
    cpu_group = dist.new_group(everyone, backend="gloo")
    device_group = dist.new_group(everyone, backend="nccl") if device.type == "cuda" else cpu_group
    context = group_context(cpu_group, device_group, device, everyone, "benchmark", settings, timeout_s=120)
    site = Site(context)
    site.routes[TORCH] = Route(TORCH, lambda tensor: dist.all_reduce(tensor, group=device_group))
    _add_flagcx(site, settings)
    _add_kernel(site)
    symmetric: dict[str, CommunicatorFL] = {}
    for name in (PUSH, PULL, ONE_SHOT, TWO_SHOT):
        communicator = _on(site, name, settings)
        if communicator is not None:
            symmetric[name] = communicator
            takes = _up_to(PUSH_BYTES if name == PUSH else ANY_SIZE)
            site.routes[name] = Route(name, communicator.all_reduce, takes)
    _add_fastest(site, settings)
    # Blocks of registered memory belong to all transports of the same ranks. One shot needs another place for the sum.
    for name, communicator in symmetric.items():
        call = communicator.all_reduce_new if name == ONE_SHOT else communicator.all_reduce
        site.routes[name] = replace(site.routes[name], call_registered=call)
    return site


def _up_to(most: int) -> Callable[[int], bool]:
    return lambda size: size <= most


def _on(site: Site, name: str, settings: Settings) -> CommunicatorFL | None:
    """A communicator on one backend and no other, or the reason why there is none."""
    context = replace(site.context, name=f"{site.context.name} {name}")
    policy = replace(communicator_policy(settings), per_item={ITEM: (name,)}, strict=True)
    try:
        agreed = agree(context, {name: discover_backends().backends[name]}, policy)
    except AgreementError as error:
        site.absent[name] = str(error)
        return None
    return CommunicatorFL.from_agreed(context, agreed)


def _add_flagcx(site: Site, settings: Settings) -> None:
    communicator = _on(site, FLAGCX, settings)
    if communicator is None:
        raise RuntimeError(f"the benchmark compares with FlagCX: {site.absent[FLAGCX]}")
    site.communicator = communicator
    transport = communicator.agreed.transport
    if not isinstance(transport, FlagCXTransport):
        raise TypeError(f"FlagCX offers every operation, and yet the transport is {transport!r}")
    site.routes[FLAGCX] = Route(FLAGCX, communicator.all_reduce, call_registered=communicator.all_reduce)
    site.routes[BARE] = Route(BARE, _bare(site))


def _add_kernel(site: Site) -> None:
    if site.context.device.type != "cuda":
        site.absent[SGLANG] = "it works on GPUs"
        return
    try:
        from sglang.srt.distributed.device_communicators.custom_all_reduce import CustomAllreduce
    except ImportError as error:
        site.absent[SGLANG] = f"it cannot be imported: {error}"
        return
    kernel = CustomAllreduce(site.context.cpu_group, site.context.device)
    if kernel.disabled:
        site.absent[SGLANG] = "it has disabled itself; SGLang's log says why"
        return
    site._kernel = kernel
    site.routes[SGLANG] = Route(SGLANG, kernel.custom_all_reduce, takes=_up_to(kernel.max_size))


def _add_fastest(site: Site, settings: Settings) -> None:
    """Mode fastest with this platform's routes, or those of SGLANG_FL_COMM_ROUTES, on FlagCX."""
    context = replace(site.context, name=f"{site.context.name} {FASTEST}")
    backends = discover_backends().backends
    policy = replace(communicator_policy(settings), per_item={ITEM: (FLAGCX,)})
    native = None if site._kernel is None else CustomKernel(site._kernel, context.device_group)
    agreed = agree(context, backends, policy)
    agreed, words = add_routes(context, agreed, settings.comm.routes, backends, policy, native)
    communicator = CommunicatorFL.from_agreed(context, agreed, routes=words)
    memory = registered_memory(communicator)
    site.words = (*words, *memory.notes)
    site.registered = lambda count: memory.empty(count, dtype=DTYPE)
    site.routes[FASTEST] = Route(FASTEST, communicator.all_reduce, call_registered=communicator.all_reduce)


@dataclass(frozen=True)
class CLoop:
    """flagcxAllReduce itself, past the binding: its address, and the library's own handles."""

    function: int
    communicator: int
    stream: int


def c_loop(site: Site) -> CLoop:
    """On the communicator of the route flagcx, and the current stream."""
    library = site.communicator.agreed.transport.communicator.library
    communicator = library.native.lib.sglang_fl_flagcx_library_communicator(_handle(site))
    address = ctypes.cast(ctypes.CDLL(library.path).flagcxAllReduce, ctypes.c_void_p).value
    if not address:
        raise RuntimeError(f"{library.path} has no flagcxAllReduce")
    return CLoop(int(address), int(communicator), _library_stream(site, raw_stream_of(site.context.device)()))


def _handle(site: Site) -> Any:
    return site.communicator.agreed.transport.communicator.handle


def _library_stream(site: Site, raw_stream: int) -> int:
    """What the library calls that stream."""
    native = site.communicator.agreed.transport.communicator.library.native
    boxed = native.ffi.new("uintptr_t *")
    native.lib.sglang_fl_flagcx_library_stream(_handle(site), raw_stream, boxed)
    return int(boxed[0])


def _bare(site: Site) -> Call:
    """flagcxAllReduce on the current stream, with nothing of this package in between; the calls are not recorded."""
    loop, stream_now = c_loop(site), raw_stream_of(site.context.device)
    arguments = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int)
    function = ctypes.CFUNCTYPE(ctypes.c_int, *arguments, ctypes.c_void_p, ctypes.c_void_p)(loop.function)
    streams: dict[int, int] = {}

    def bare(tensor: torch.Tensor) -> None:
        raw = stream_now()
        stream = streams.get(raw)
        if stream is None:
            stream = streams[raw] = _library_stream(site, raw)
        address = tensor.data_ptr()
        code = function(address, address, tensor.numel(), NUMBER, SUM, loop.communicator, stream)
        if code:
            raise RuntimeError(f"flagcxAllReduce answered {code}")

    return bare
