"""Profile verified: measured calls go to FlagGems' kernels by launches that were noted, all others stay PyTorch's."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from sglang_fl.aten.gems import Entry, Gems
from sglang_fl.aten.launches import ALIGNMENT, Device, NoPlanError, Plan, note, tensors_of
from sglang_fl.aten.sweep.forms import Forms, form_of_call

logger = logging.getLogger("sglang_fl.aten")

# Calls told apart per operator; the oldest is forgotten first.
MOST_CALLS = 1024
# A call is noted when it comes for so many times: what comes once, a prefill of one length, is PyTorch's.
NOTED_AT = 2
_noting = threading.local()
_OwnWay = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class AcceleratorDevice:
    """The runtime of the device that PyTorch was built for: CUDA, or what answers to the same names."""

    def __init__(self) -> None:
        self._raw_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self.index: Callable[[], int] = torch._C._cuda_getDevice
        self.is_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing

    def stream(self, index: int) -> int:
        """See :class:`Device`."""
        return self._raw_stream(index)


def register(
    library: Any, gems: Gems, names: Collection[str], forms: Forms, *, exact_only: bool, keeps_plans: bool
) -> list[PlannedOperator]:
    """Put a :class:`PlannedOperator` in the place of each ATen operator of FlagGems' functions ``names`` that has a
    form; ``library`` holds them. The device must be set.
    """
    device = AcceleratorDevice()
    known = forms.operators()
    chosen = [entry for entry in gems.entries if entry.name in names and entry.key in known]
    made = []
    for entry in chosen:
        own = torch.library.get_kernel(f"aten::{entry.key}", gems.dispatch_key)
        operator = PlannedOperator(entry, own, forms, device, exact_only, keeps_plans)
        library.impl(entry.key, operator, gems.dispatch_key, with_keyset=True)
        made.append(operator)
    return made


class PlannedOperator:
    """Stands for one ATen operator on the device.

    Per call of equal shapes, strides, dtypes, alignment and plain arguments it is decided once which way it goes: to
    FlagGems' kernels, if the table's forms hold it, or to PyTorch's own. Nothing is noted while a stream is captured:
    a call that was not seen before is then PyTorch's, and SGLang runs each batch size before it captures it.
    """

    def __init__(
        self, entry: Entry, own: Any, forms: Forms, device: Device, exact_only: bool, keeps_plans: bool = True
    ) -> None:
        """
        own: PyTorch's kernel, as ``torch.library.get_kernel`` gives it.
        exact_only: take forms only whose values are PyTorch's bit for bit. Ranks that compute the same must not be
            told apart by what one of them could not note.
        keeps_plans: False to call FlagGems' function each time, so that it can be recorded.
        """
        base, _, overload = entry.key.partition(".")
        schema = getattr(getattr(torch.ops.aten, base), overload or "default")._schema
        self.operator = entry.key
        self._function = entry.function
        self._own = own
        self._forms = forms
        self._device = device
        self._exact_only = exact_only
        self._keeps_plans = keeps_plans
        self._is_tensor = [str(argument.type) == "Tensor" for argument in schema.arguments]
        self._changed = [
            place
            for place, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self._front = _Front(base)
        self._ways: dict[tuple[Any, ...], Plan | _OwnWay] = {}
        self._seen: dict[tuple[Any, ...], int] = {}
        self._lock = threading.Lock()
        self._said: set[str] = set()
        # Read in each call.
        self._device_index = device.index

    def __call__(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        """What PyTorch's dispatcher calls."""
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
        found = tuple(key)
        way = self._ways.get(found)
        if way is None:
            way = self._decide(found, tensors, args, kwargs)
        if isinstance(way, Plan):
            return way(tensors)
        return way(keyset, args, kwargs)

    def plans(self) -> int:
        """How many kinds of calls go to FlagGems."""
        return sum(isinstance(way, Plan) or way == self._call_function for way in self._ways.values())

    def _decide(
        self, key: tuple[Any, ...], tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Plan | _OwnWay:
        own: _OwnWay = self._front if self._has_number_as_tensor(args) else self._call_own
        if getattr(_noting, "is_on", False):
            return own
        if not self._takes(tensors, args, kwargs):
            return self._keep(key, own)
        if not self._keeps_plans:
            return self._keep(key, self._call_function)
        if self._device.is_capturing():
            return own
        with self._lock:
            self._seen[key] = self._seen.get(key, 0) + 1
            if self._seen[key] < NOTED_AT:
                _forget_oldest(self._seen)
                return own
            del self._seen[key]
        return self._keep(key, self._noted(args, kwargs) or own)

    def _takes(self, tensors: Sequence[torch.Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        here = self._device.index()
        if not tensors or any(tensor.get_device() != here for tensor in tensors):
            return False
        call = form_of_call(self.operator, args, kwargs)
        return call is not None and self._forms.take(call, self._exact_only)

    def _noted(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Plan | None:
        written = [args[place] for place in self._changed if place < len(args)]
        changes = [
            place for place, tensor in enumerate(tensors_of(args, kwargs)) if any(tensor is one for one in written)
        ]
        _noting.is_on = True
        try:
            return note(self._function, args, kwargs, changes, self._device)
        except NoPlanError as error:
            self._say(f"its launches cannot be kept: {error}")
        except Exception as error:  # noqa: BLE001 - third-party code; the reason is reported, the call is PyTorch's
            self._say(f"FlagGems' function raised {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        finally:
            _noting.is_on = False
        return None

    def _say(self, problem: str) -> None:
        if problem not in self._said:
            self._said.add(problem)
            logger.warning("[sglang_fl] layer 1, ATen operators: %s is PyTorch's own: %s", self.operator, problem)

    def _keep(self, key: tuple[Any, ...], way: Plan | _OwnWay) -> Plan | _OwnWay:
        with self._lock:
            self._ways[key] = way
            _forget_oldest(self._ways)
        return way

    def _has_number_as_tensor(self, args: Sequence[Any]) -> bool:
        pairs = zip(args, self._is_tensor, strict=False)
        return any(is_tensor and not isinstance(value, torch.Tensor) for value, is_tensor in pairs)

    def _call_own(self, keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._own.call_boxed(keyset, *args, **kwargs)

    def _call_function(self, keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._function(*args, **kwargs)


class _Front:
    """PyTorch's own arithmetic where a number stands in a tensor's place.

    The dispatcher hands such a number on as it is, and a kernel takes tensors only. PyTorch's function makes it a
    tensor that yields to the other's dtype; with ``out`` it reaches another overload than the one that is replaced.
    """

    def __init__(self, base: str) -> None:
        self._function: Any = getattr(torch, base.rstrip("_"), None)
        self._is_in_place = base.endswith("_")

    def __call__(self, keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._function(*args, **kwargs, out=args[0] if self._is_in_place else self._new(args))

    def _new(self, args: tuple[Any, ...]) -> torch.Tensor:
        dtype = torch.result_type(args[0], args[1])
        if self._function is torch.div and not (dtype.is_floating_point or dtype.is_complex):
            dtype = torch.get_default_dtype()
        tensor = next(value for value in args if isinstance(value, torch.Tensor))
        return torch.empty(0, dtype=dtype, device=tensor.device)


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


def _forget_oldest(kept: dict[tuple[Any, ...], Any]) -> None:
    while len(kept) > MOST_CALLS:
        del kept[next(iter(kept))]
