"""Profile verified: measured calls go to FlagGems' kernels, all others stay PyTorch's.

Inside a graph a launch costs nothing on the host, and whatever is not slower on the GPU is taken. Outside, FlagGems'
launches are noted and kept (:mod:`sglang_fl.aten.launches`), and what is taken must save more GPU time than a kept
launch costs more on the host than PyTorch's own call.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sglang_fl.aten.gems import Entry, Gems, has_schema
from sglang_fl.aten.launches import ALIGNMENT, Device, NoPlanError, Plan, note, tensors_of, try_out
from sglang_fl.aten.records import rehearsal
from sglang_fl.aten.sweep.forms import NOT_SLOWER, Forms, form_of_call

logger = logging.getLogger("sglang_fl.aten")

# Calls told apart per operator; the oldest is forgotten first.
MOST_CALLS = 1024
# A call is noted when it comes for so many times: what comes once, a prefill of one length, is PyTorch's.
NOTED_AT = 2
_noting = threading.local()
_Way = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class AcceleratorDevice:
    """The runtime of the device that PyTorch was built for: CUDA, or what answers to the same names."""

    def __init__(self) -> None:
        self.stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self.index: Callable[[], int] = torch._C._cuda_getDevice
        self.is_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing


class Replacement:
    """Puts operators of one process under PyTorch's: some from now on, and more while graphs are captured.

    The device must be set before.

    new_library: makes a ``torch.library.Library`` of aten implementations.
    names: FlagGems' functions that may be replaced. eager: the ATen operators that are outside of graphs as well.
    exact_only: take only forms whose values are PyTorch's bit for bit. Ranks that compute the same must not be told
        apart by what one of them could not note.
    keeps_plans: False to call FlagGems' function each time, so that it can be recorded.
    """

    def __init__(
        self,
        new_library: Callable[[], Any],
        gems: Gems,
        names: Collection[str],
        forms: Forms,
        eager: Collection[str],
        least_gain_us: float,
        *,
        exact_only: bool,
        keeps_plans: bool,
    ) -> None:
        self._new_library = new_library
        self._dispatch_key = gems.dispatch_key
        device = AcceleratorDevice()
        in_graphs, outside = forms.least_sizes(), forms.least_sizes(least_gain_us)
        entries = [
            entry
            for entry in gems.entries
            if entry.name in names
            and entry.key in in_graphs
            and has_schema(entry.key)
            and not _writes_by_keyword(entry.key)
        ]
        own = {entry.key: torch.library.get_kernel(f"aten::{entry.key}", self._dispatch_key) for entry in entries}
        self.in_graphs = [GraphOperator(entry, own[entry.key], forms, device, exact_only) for entry in entries]
        kind = PlannedOperator if keeps_plans else EagerOperator
        self.eager = [
            kind(entry, own[entry.key], forms, device, exact_only, least_gain_us, outside[entry.key])
            for entry in entries
            if entry.key in eager and entry.key in outside
        ]
        # What cannot be registered is to be known now, not when a graph is captured.
        self._registered(self.in_graphs)._destroy()
        self._library = self._registered(self.eager)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Inside, the operators are those for graphs."""
        self._library._destroy()
        self._library = self._registered(self.in_graphs)
        try:
            yield
        finally:
            self._library._destroy()
            self._library = self._registered(self.eager)

    def take_back(self) -> None:
        """PyTorch's own operators again, for good."""
        self._library._destroy()

    def _registered(self, operators: Sequence[ReplacedOperator]) -> Any:
        library = self._new_library()
        try:
            for operator in operators:
                library.impl(operator.operator, operator, self._dispatch_key, with_keyset=True)
        except BaseException:
            library._destroy()
            raise
        return library


class ReplacedOperator:
    """Stands for one ATen operator on the device, and decides once for calls of equal shapes, strides, dtypes,
    alignment and plain arguments which way they go.
    """

    def __init__(
        self,
        entry: Entry,
        own: Any,
        forms: Forms,
        device: Device,
        exact_only: bool,
        least_gain_us: float = NOT_SLOWER,
        least_size: int = 1,
    ) -> None:
        """
        own: PyTorch's kernel, as ``torch.library.get_kernel`` gives it.
        least_gain_us: what FlagGems must save on the GPU. least_size: calls whose first tensor has fewer elements
            are PyTorch's at once.
        """
        schema = _schema(entry.key)
        self.operator = entry.key
        self._function = entry.function
        self._own = own.call_boxed
        self._forms = forms
        self._device = device
        self._exact_only = exact_only
        self._least_gain_us = least_gain_us
        self._least_size = least_size
        self._tensor_places = [place for place, one in enumerate(schema.arguments) if str(one.type) == "Tensor"]
        self._changed = [
            place
            for place, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self._numbers = _FRONTS.get(entry.key, self._call_own_with_tensors)
        self._ways: dict[tuple[Any, ...], Plan | _Way] = {}
        self._lock = threading.Lock()
        self._said: set[str] = set()
        # Read in each call.
        self._device_index = device.index

    def __call__(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        """What PyTorch's dispatcher calls."""
        if args and isinstance(args[0], torch.Tensor) and args[0].numel() < self._least_size:
            return self._hand_back(keyset, args, kwargs)
        tensors: list[torch.Tensor] = []
        key: list[Any] = [self._device_index()]
        for value in args:
            if isinstance(value, torch.Tensor):
                tensors.append(value)
                key += (value.dtype, value.shape, value.stride(), value.data_ptr() % ALIGNMENT, value.get_device())
            else:
                _add_to_key(key, tensors, value)
        for name, value in kwargs.items():
            key.append(name)
            _add_to_key(key, tensors, value)
        if self._changed and len(tensors) > 1:
            key.append(_shares_memory(tensors))
        found = tuple(key)
        way = self._ways.get(found)
        if way is None:
            way = self._decide(found, tensors, args, kwargs)
        if isinstance(way, Plan):
            return way(tensors)
        return way(keyset, args, kwargs)

    def taken(self) -> int:
        """How many kinds of calls go to FlagGems."""
        return sum(way != self._hand_back for way in self._ways.values())

    def _decide(
        self, key: tuple[Any, ...], tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Plan | _Way:
        if getattr(_noting, "is_on", False):
            return self._hand_back
        if not self._takes(tensors, args, kwargs):
            return self._keep(key, self._hand_back)
        return self._taken(key, args, kwargs)

    def _taken(self, key: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan | _Way:
        """FlagGems' function itself, if it does not raise on copies of what it writes to."""
        if self._device.is_capturing():
            return self._hand_back
        _noting.is_on = True
        try:
            with rehearsal():
                try_out(self._function, args, kwargs, self._written(args, kwargs))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - third-party code; the reason is reported, the call is PyTorch's
            self._say(_raised(error))
            return self._keep(key, self._hand_back)
        finally:
            _noting.is_on = False
        return self._keep(key, self._call_function)

    def _written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
        """Places among the tensors of a call of those that the operator writes to."""
        written = [args[place] for place in self._changed if place < len(args)]
        tensors = enumerate(tensors_of(args, kwargs))
        return [place for place, tensor in tensors if any(tensor is one for one in written)]

    def _takes(self, tensors: Sequence[torch.Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        here = self._device.index()
        if not tensors or any(tensor.get_device() != here for tensor in tensors):
            return False
        # What is written while it is read PyTorch refuses or copies first; FlagGems does not look.
        if self._changed and _shares_memory(tensors):
            return False
        call = form_of_call(self.operator, args, kwargs)
        return call is not None and self._forms.take(call, self._least_gain_us, self._exact_only)

    def _keep(self, key: tuple[Any, ...], way: Plan | _Way) -> Plan | _Way:
        with self._lock:
            self._ways[key] = way
            _forget_oldest(self._ways)
        return way

    def _hand_back(self, keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for place in self._tensor_places:
            if place < len(args) and not isinstance(args[place], torch.Tensor):
                return self._numbers(keyset, args, kwargs)
        return self._own(keyset, *args, **kwargs)

    def _call_own_with_tensors(self, keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """PyTorch's kernel, with numbers as tensors without a dimension: they yield to the dtype of those that have."""
        other = next((value for value in args if isinstance(value, torch.Tensor)), None)
        places = {place for place in self._tensor_places if place < len(args)}
        made = [_as_tensor(value, other) if place in places else value for place, value in enumerate(args)]
        return self._own(keyset, *made, **kwargs)

    def _say(self, problem: str) -> None:
        if problem not in self._said:
            self._said.add(problem)
            logger.warning("[sglang_fl] layer 1, ATen operators: %s is PyTorch's own: %s", self.operator, problem)

    def _call_function(self, keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._function(*args, **kwargs)


class GraphOperator(ReplacedOperator):
    """While graphs are captured, and in the calls that warm them up: FlagGems' function itself, whose launches a graph
    keeps. What was not called before the capture is PyTorch's: nothing is compiled in a capture.
    """

    def __call__(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        """What PyTorch's dispatcher calls; negated and conjugated tensors, which some operators get, are PyTorch's."""
        if any(tensor.is_neg() or tensor.is_conj() for tensor in tensors_of(args, kwargs)):
            return self._hand_back(keyset, args, kwargs)
        return super().__call__(keyset, *args, **kwargs)


class EagerOperator(ReplacedOperator):
    """Outside of graphs, by FlagGems' function each time: slow on the host, and seen by its records."""


class PlannedOperator(ReplacedOperator):
    """Outside of graphs, by launches that are kept. Nothing is noted while a stream is captured."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._seen: dict[tuple[Any, ...], int] = {}

    def _taken(self, key: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan | _Way:
        if self._device.is_capturing():
            return self._hand_back
        with self._lock:
            self._seen[key] = self._seen.get(key, 0) + 1
            if self._seen[key] < NOTED_AT:
                _forget_oldest(self._seen)
                return self._hand_back
            del self._seen[key]
        return self._keep(key, self._noted(args, kwargs) or self._hand_back)

    def _noted(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Plan | None:
        _noting.is_on = True
        try:
            return note(self._function, args, kwargs, self._written(args, kwargs), self._device)
        except NoPlanError as error:
            self._say(f"its launches cannot be kept: {error}")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - third-party code; the reason is reported
            self._say(_raised(error))
        finally:
            _noting.is_on = False
        return None


class _Front:
    """PyTorch's own arithmetic where a number stands in a tensor's place.

    The dispatcher hands such a number on as it is, and a kernel takes tensors only. PyTorch's function makes it a
    tensor that yields to the other's dtype; with ``out`` it reaches another overload than the one that is replaced.
    """

    def __init__(self, base: str) -> None:
        self._function: Any = getattr(torch, base.rstrip("_"))
        self._is_in_place = base.endswith("_")

    def __call__(self, keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._function(*args, **kwargs, out=args[0] if self._is_in_place else self._new(args))

    def _new(self, args: tuple[Any, ...]) -> torch.Tensor:
        dtype = torch.result_type(args[0], args[1])
        if self._function is torch.div and not (dtype.is_floating_point or dtype.is_complex):
            dtype = torch.get_default_dtype()
        tensor = next(value for value in args if isinstance(value, torch.Tensor))
        return torch.empty(0, dtype=dtype, device=tensor.device)


_FRONTS = {f"{base}.Tensor": _Front(base) for name in ("add", "sub", "mul", "div") for base in (name, f"{name}_")}


def _as_tensor(value: Any, other: torch.Tensor | None) -> Any:
    if isinstance(value, torch.Tensor) or value is None:
        return value
    # Beside a tensor that has no dimension either, a tensor's dtype would count as much as its own.
    dtype = torch.result_type(other, value) if other is not None and other.dim() == 0 else None
    return torch.tensor(value, dtype=dtype)


def _schema(key: str) -> Any:
    base, _, overload = key.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")._schema


def _writes_by_keyword(key: str) -> bool:
    """Whether it has an ``out``: memory that it may share with an argument is then looked at by PyTorch alone."""
    return any(
        one.kwarg_only and one.alias_info is not None and one.alias_info.is_write for one in _schema(key).arguments
    )


def _shares_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether one of them lies in the first one's memory."""
    is_alias_of = torch._C._is_alias_of  # type: ignore[attr-defined]  # torch has no types here
    return any(is_alias_of(tensors[0], tensor) for tensor in tensors[1:])


def _add_to_key(key: list[Any], tensors: list[torch.Tensor], value: Any) -> None:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        key += (value.dtype, value.shape, value.stride(), value.data_ptr() % ALIGNMENT, value.get_device())
    elif isinstance(value, (list, tuple)):
        key.append(len(value))
        for item in value:
            _add_to_key(key, tensors, item)
    else:
        # 1, 1.0 and True are equal, 0.0 and -0.0 as well, and mean different calls.
        key += (type(value), value.hex() if isinstance(value, float) else value)


def _raised(error: BaseException) -> str:
    return f"FlagGems' function raised {type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _forget_oldest(kept: dict[tuple[Any, ...], Any]) -> None:
    while len(kept) > MOST_CALLS:
        del kept[next(iter(kept))]
