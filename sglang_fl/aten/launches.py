"""What a FlagGems function does on the device, noted once and done again: allocations and kernel launches.

FlagGems' functions cost 30 to 130 us on the host before their kernels are enqueued: they compute shapes, choose block
sizes and look kernels up anew in each call. None of that changes between two calls with equal shapes, strides, dtypes
and plain arguments. So one call is watched, and a :class:`Plan` repeats what it did with other tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ALLOCATIONS = frozenset({"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"})
# They look at a tensor's shape, not at its elements.
_QUESTIONS = frozenset({"aten::is_non_overlapping_and_dense", "aten::is_contiguous", "prim::device", "aten::detach"})
# Of the pointers that kernels were compiled for: Triton tells apart whether this divides them.
ALIGNMENT = 16
_patching = threading.RLock()


class NoPlanError(Exception):
    """A call cannot be repeated without its function; the message says why."""


class Device(Protocol):
    """What of a device's runtime a launch needs; see :class:`AcceleratorDevice`."""

    def index(self) -> int:
        """Of the current device."""

    def stream(self, index: int) -> int:
        """The current stream of device ``index``, as its driver's number."""

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured in a graph."""


@dataclass(frozen=True)
class _Slot:
    """A tensor that the call allocated."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class _Launch:
    """One kernel: how it is launched, and which of its arguments are addresses: place, tensor, bytes into it.

    arguments: all behind the kernel's handle.
    """

    run: Callable[..., None]
    grid: tuple[int, int, int]
    function: Any
    arguments: tuple[Any, ...]
    addresses: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class _Result:
    """Which tensor the call returns, and as what view of it, from its beginning on; None: the tensor itself."""

    tensor: int
    view: tuple[tuple[int, ...], tuple[int, ...]] | None


class Plan:
    """The device work of one call, for any tensors of the shapes, strides, dtypes and alignment that were noted."""

    __slots__ = ("_allocated", "_device_index", "_launches", "_result", "_stream")

    def __init__(
        self,
        allocated: Sequence[_Slot],
        launches: Sequence[_Launch],
        result: _Result,
        device_index: int,
        stream: Callable[[int], int],
    ) -> None:
        self._allocated = tuple((slot.size, slot.stride, slot.dtype, slot.device) for slot in allocated)
        self._launches = tuple(
            (launch.run, *launch.grid, launch.function, launch.arguments, launch.addresses) for launch in launches
        )
        self._result = result
        self._device_index = device_index
        self._stream = stream

    @property
    def device_index(self) -> int:
        """The kernels are loaded on this device; it must be the current one."""
        return self._device_index

    def __call__(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Enqueue the work on the current stream, for the call's tensor arguments in their order; its result."""
        for size, stride, dtype, device in self._allocated:
            tensors.append(torch.empty_strided(size, stride, dtype=dtype, device=device))
        addresses = [tensor.data_ptr() for tensor in tensors]
        stream = self._stream(self._device_index)
        for run, x, y, z, function, fixed, places in self._launches:
            arguments = list(fixed)
            for place, tensor, offset in places:
                arguments[place] = addresses[tensor] + offset
            run(x, y, z, stream, function, *arguments)
        found = tensors[self._result.tensor]
        return found if self._result.view is None else found.as_strided(*self._result.view)


def note(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    changes: Sequence[int],
    device: Device,
) -> Plan:
    """Call ``function`` on copies of what it changes, and make a plan of what it did; its result must be the plan's.

    Waits for the device; not to be called while a stream is captured.

    changes: places among the tensor arguments, in their order, of those that the operator writes to.

    Raises:
        NoPlanError: the function reads elements on the host, calls other operators, returns something else than one
            tensor, or launches in a way that is not known here; or the plan's result is not the function's.
        Exception: whatever ``function`` raises.
    """
    given = tensors_of(args, kwargs)
    first = _with_copies(given, changes)
    with _Allocations(given[0].device) as memory, _watched_launches() as launches:
        result = _call(function, args, kwargs, first)
    if memory.other:
        raise NoPlanError(f"it calls {memory.other} beside its kernels")
    if not launches:
        raise NoPlanError("it launched no kernel that Triton compiled")
    if not isinstance(result, torch.Tensor):
        raise NoPlanError(f"it returns a {type(result).__name__}")
    known = [*first, *memory.made]
    plan = Plan(
        [_Slot(tuple(made.size()), made.stride(), made.dtype, made.device) for made in memory.made],
        [_with_addresses(launch, known) for launch in launches],
        _place_of_result(result, known),
        device.index(),
        device.stream,
    )
    second = _with_copies(given, changes)
    again = plan(list(second))
    pairs = [(result, again), *((first[place], second[place]) for place in changes)]
    if not all(_same_bits(one, other) for one, other in pairs):
        raise NoPlanError("repeating its launches gave other values")
    return plan


def try_out(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], changes: Sequence[int]
) -> None:
    """Call ``function`` on copies of what it changes, to see whether it raises; ``changes`` as for :func:`note`."""
    _call(function, args, kwargs, _with_copies(tensors_of(args, kwargs), changes))


def is_supported() -> str:
    """Why launches cannot be noted with the installed Triton; "" where they can."""
    try:
        from triton.compiler.compiler import CompiledKernel
    except ImportError as error:
        return f"triton has no CompiledKernel where it is looked for ({error})"
    if not isinstance(getattr(CompiledKernel, "run", None), property):
        return "this version of triton launches its kernels another way than 3.6 does (CompiledKernel.run)"
    return ""


def tensors_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments of a call, also in lists, in their order."""
    found: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [item for item in value if isinstance(item, torch.Tensor)]
    return found


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Notes the tensors that are allocated, and the first operator that is neither that nor a view."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self._device = device
        self.made: list[torch.Tensor] = []
        self.other = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make the call, and note it."""
        kwargs = kwargs or {}
        name = func._schema.name
        if name not in _ALLOCATIONS and not func.is_view and name not in _QUESTIONS:
            # In inference mode calls arrive whole that PyTorch makes of others.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            self.other = self.other or name
        result = func(*args, **kwargs)
        if name in _ALLOCATIONS:
            self.made.append(result)
            if result.device != self._device:
                self.other = self.other or f"{name} on {result.device}"
        return result


@dataclass(frozen=True)
class _Seen:
    """A launch as Triton made it: the launcher and all that it was called with."""

    run: Callable[..., None]
    grid: tuple[int, int, int]
    function: Any
    packed_metadata: Any
    arguments: tuple[Any, ...]


@contextmanager
def _watched_launches() -> Iterator[list[_Seen]]:
    """Inside, the launches of this thread are noted as they are made. One thread at a time can watch."""
    from triton.compiler.compiler import CompiledKernel

    seen: list[_Seen] = []
    thread = threading.get_ident()
    kernels: Any = CompiledKernel

    def run_of(kernel: Any) -> Callable[..., None]:
        run: Callable[..., None] = original.fget(kernel)
        if threading.get_ident() != thread:
            return run

        def noted(x: int, y: int, z: int, stream: int, function: Any, packed: Any, *rest: Any) -> None:
            # rest: the metadata and the two hooks of profilers, then the kernel's own arguments.
            run(x, y, z, stream, function, packed, *rest)
            seen.append(_Seen(run, (x, y, z), function, packed, rest[3:]))

        return noted

    with _patching:
        original = kernels.run
        kernels.run = property(run_of)
        try:
            yield seen
        finally:
            kernels.run = original


def _with_addresses(seen: _Seen, known: Sequence[torch.Tensor]) -> _Launch:
    run, head = _launcher(seen.run)
    # Without the metadata and the hooks of profilers.
    arguments = [*head, seen.packed_metadata, None, None, None, *seen.arguments]
    addresses = []
    for place, value in enumerate(arguments):
        # A tensor, or FlagGems' own view of one.
        if hasattr(value, "data_ptr"):
            addresses.append((place, *_place_of(value.data_ptr(), known)))
            arguments[place] = None
    return _Launch(run, seen.grid, seen.function, tuple(arguments), tuple(addresses))


def _launcher(run: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """What to call in the place of ``run``, and its arguments behind the kernel's handle: Triton's C function where
    the kernel needs no scratch memory, without the Python around it.
    """
    try:
        if run.global_scratch_size or run.profile_scratch_size:
            return run, ()
        return run.launch, (run.launch_cooperative_grid, run.launch_pdl, None, None)
    except AttributeError:
        return run, ()


def _place_of(address: int, known: Sequence[torch.Tensor]) -> tuple[int, int]:
    """The tensor of ``known`` in whose memory ``address`` lies, and how many bytes behind its beginning."""
    for place, tensor in enumerate(known):
        storage = tensor.untyped_storage()
        if storage.data_ptr() <= address < storage.data_ptr() + storage.nbytes():
            return place, address - tensor.data_ptr()
    raise NoPlanError("it hands memory to a kernel that is neither an argument nor allocated in the call")


def _place_of_result(result: torch.Tensor, known: Sequence[torch.Tensor]) -> _Result:
    for place, tensor in enumerate(known):
        if result is tensor:
            return _Result(place, None)
    place, offset = _place_of(result.data_ptr(), known)
    base = known[place]
    if offset or result.dtype != base.dtype:
        raise NoPlanError("it returns a part of a tensor, or one as another dtype")
    if result.size() == base.size() and result.stride() == base.stride():
        return _Result(place, None)
    return _Result(place, (tuple(result.size()), result.stride()))


def _with_copies(given: Sequence[torch.Tensor], changes: Sequence[int]) -> list[torch.Tensor]:
    """``given`` with copies of what is changed and of what shares its memory with another: an address in a launch must
    tell which argument it came from.
    """
    tensors: list[torch.Tensor] = []
    seen: set[int] = set()
    for place, tensor in enumerate(given):
        memory = tensor.untyped_storage().data_ptr()
        tensors.append(_copy(tensor) if place in changes or memory in seen else tensor)
        seen.add(memory)
    return tensors


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    if tensor.data_ptr() % ALIGNMENT != copy.data_ptr() % ALIGNMENT:
        raise NoPlanError(f"a tensor that must be copied does not begin at a multiple of {ALIGNMENT} bytes")
    try:
        return copy.copy_(tensor)
    except RuntimeError as error:
        raise NoPlanError("a tensor that must be copied has elements that share their memory") from error


def _call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[torch.Tensor]
) -> Any:
    """Call with ``tensors``, in the order of :func:`tensors_of`, in the place of the arguments' own."""
    rest = iter(tensors)

    def exchanged(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return next(rest)
        if isinstance(value, (list, tuple)):
            return [exchanged(item) for item in value]
        return value

    return function(*[exchanged(value) for value in args], **{name: exchanged(kwargs[name]) for name in kwargs})


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.size() != other.size() or one.stride() != other.stride() or one.dtype != other.dtype:
        return False
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)))
