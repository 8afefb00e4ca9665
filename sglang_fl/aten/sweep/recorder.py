"""Records which ATen operators a piece of code calls, with shapes, strides, dtypes and the range of the values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_fl.aten.sweep.cases import ACCELERATOR, HOST, Case, encode, widen

# What these operators call beneath the place where calls are seen: FlagGems replaces that one as well.
_COPYING = {"_to_copy", "clone"}
_FILLING = {"full", "ones", "full_like", "ones_like", "new_full", "new_ones"}
_ZEROING = {"zeros", "zeros_like", "new_zeros"}
# What an accelerator's PyTorch has no minimum of; addresses are such.
_WITHOUT_MINIMUM = frozenset({torch.uint16, torch.uint32, torch.uint64})
_SAME_ARGUMENTS = {"index_put_": "_index_put_impl_", "index_put": "_index_put_impl_"}


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """While it is entered, notes every ATen call of this thread under the current phase; the calls run as ever.

    The phase is set with :meth:`phase`; without one nothing is noted.

    device: the type of the device on which the model runs; the sweep puts its tensors on the accelerator, others on
        the host.
    """

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self._device = device
        self._cases: dict[str, Case] = {}
        self._phase: str | None = None
        self.not_recorded: dict[str, str] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Calls inside belong to the phase ``name``."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    def cases(self) -> list[Case]:
        """What was noted, sorted by operator."""
        return [self._cases[key] for key in sorted(self._cases)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the call, then make it."""
        kwargs = kwargs or {}
        if self._phase is None or func.namespace != "aten":
            return func(*args, **kwargs)
        # A view has no kernel, but what may be one, as reshape, may also copy.
        if func.is_view:
            return self._call(func, args, kwargs)
        # Before the call: one in place changes its argument.
        self._note(operator_name(func), args, kwargs)
        result = self._call(func, args, kwargs)
        self._note_beneath(func._schema.name.removeprefix("aten::"), args, kwargs, result)
        return result

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        # In inference mode calls arrive whole that PyTorch makes of others; those others are what has a kernel.
        with self:
            result = func.decompose(*args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result

    def _note(self, operator: str, args: Any, kwargs: Any) -> None:
        try:
            written = [encode(list(args), self._describe), {k: encode(v, self._describe) for k, v in kwargs.items()}]
        except TypeError as error:
            self.not_recorded[operator] = str(error)
            return
        case = Case(operator, written[0], written[1])
        known = self._cases.setdefault(case.key, case)
        widen([known.args, known.kwargs], [case.args, case.kwargs])
        phases = known.phases
        phases[str(self._phase)] = phases.get(str(self._phase), 0) + 1

    def _describe(self, tensor: torch.Tensor) -> dict[str, Any]:
        device = ACCELERATOR if tensor.device.type == self._device else HOST
        bounds = value_bounds(tensor)
        if bounds is None:
            return {"device": device}
        low, high = (value if math.isfinite(value) else None for value in bounds)
        return {"device": device, "low": low, "high": high}

    def _note_beneath(self, base: str, args: Any, kwargs: Any, result: Any) -> None:
        if base in _COPYING:
            self._note("copy_", (result, args[0]), {})
        elif base in _ZEROING:
            self._note("zero_", (result,), {})
        elif base in _FILLING:
            value = result.flatten()[0].item() if result.numel() else 0
            self._note("fill_.Scalar", (result, value), {})
        elif base in _SAME_ARGUMENTS:
            self._note(_SAME_ARGUMENTS[base], args, kwargs)


def operator_name(func: Any) -> str:
    """``add.Tensor`` of torch.ops.aten.add.Tensor; the default overload has no suffix."""
    base = func._schema.name.removeprefix("aten::")
    overload = func._schema.overload_name
    return f"{base}.{overload}" if overload else base


def value_bounds(tensor: torch.Tensor) -> tuple[float, float] | None:
    """Lowest and highest value, so that the sweep can make valid inputs; None for what has no order or no value.

    Floating values are told apart by sign only (0 or -1, 1): another run has others.
    """
    if tensor.numel() == 0 or tensor.dtype == torch.bool or tensor.is_complex() or tensor.device.type == "meta":
        return None
    with torch.no_grad():
        if tensor.is_floating_point():
            return (-1.0, 1.0) if bool((tensor < 0).any()) else (0.0, 1.0)
        if tensor.dtype in _WITHOUT_MINIMUM:
            values = tensor.cpu().numpy()
            return float(values.min()), float(values.max())
        return float(tensor.min()), float(tensor.max())
