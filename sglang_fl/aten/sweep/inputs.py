"""Valid inputs for a recorded call: tensors with its shapes, strides and dtypes, and values in its ranges."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from sglang_fl.aten.sweep.cases import HOST, Case, decode


class Call:
    """One recorded call with tensors in place; :meth:`fresh` copies what the call changes.

    case: the recorded call. device: where tensors of the accelerator are put. The values depend on the case alone.
    """

    def __init__(self, case: Case, device: torch.device) -> None:
        seed = zlib.crc32(case.key.encode())
        host = torch.Generator().manual_seed(seed)
        # The host takes seconds for the largest tensors.
        generators = {"cpu": host, device.type: torch.Generator(device).manual_seed(seed)}
        self.case = case
        self.overload = find_overload(case.operator)

        def make(data: Mapping[str, Any]) -> torch.Tensor:
            return _make_tensor(data, torch.device("cpu") if data["device"] == HOST else device, generators)

        self.args: list[Any] = decode(case.args, make, device)
        self.kwargs: dict[str, Any] = {name: decode(value, make, device) for name, value in case.kwargs.items()}

    @property
    def is_random(self) -> bool:
        """Whether the operator draws random numbers, so that two implementations need not agree."""
        return torch.Tag.nondeterministic_seeded in self.overload.tags

    @property
    def changes_arguments(self) -> bool:
        """Whether the operator writes to one of its arguments."""
        return bool(self._written())

    def run(self) -> list[torch.Tensor]:
        """Make the call on copies of what it changes; what it returns and what it changed, as plain tensors."""
        args, kwargs = self.fresh()
        result = self.overload(*args, **kwargs)
        changed = [args[place] if place < len(args) else kwargs.get(name) for place, name in self._written()]
        return _tensors([result, changed])

    def run_in(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """As :meth:`run` with every floating tensor, and every floating dtype asked for, in ``dtype``.

        Raises:
            RuntimeError: PyTorch has no such kernel (also as NotImplementedError and TypeError).
        """
        wide = object.__new__(Call)
        wide.case, wide.overload = self.case, self.overload
        wide.args = _map(self.args, lambda value: _widen(value, dtype))
        wide.kwargs = {name: _map(value, lambda v: _widen(v, dtype)) for name, value in self.kwargs.items()}
        return wide.run()

    def fresh(self) -> tuple[list[Any], dict[str, Any]]:
        """The arguments, with copies of those that the call writes to."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for place, name in self._written():
            if place < len(args):
                args[place] = _map(args[place], _copy)
            elif name in kwargs:
                kwargs[name] = _map(kwargs[name], _copy)
        return args, kwargs

    def repeat(self) -> Callable[[], Any]:
        """The call as a function without arguments, always on the same tensors: for time, not for values."""
        args, kwargs = self.fresh()
        overload = self.overload
        return lambda: overload(*args, **kwargs)

    def bytes(self) -> int:
        """Size of all tensor arguments."""
        return sum(
            tensor.numel() * tensor.element_size() for tensor in _tensors([self.args, list(self.kwargs.values())])
        )

    def _written(self) -> list[tuple[int, str]]:
        arguments = self.overload._schema.arguments
        return [
            (place, argument.name)
            for place, argument in enumerate(arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]


def find_overload(operator: str) -> Any:
    """torch.ops.aten's overload of ``add.Tensor``.

    Raises:
        AttributeError: this PyTorch has none of that name.
    """
    base, _, overload = operator.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _make_tensor(
    data: Mapping[str, Any], device: torch.device, generators: Mapping[str, torch.Generator]
) -> torch.Tensor:
    shape, strides, dtype = data["shape"], data["stride"], getattr(torch, data["dtype"])
    if 0 in shape:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)
    size = 1 + sum((length - 1) * step for length, step in zip(shape, strides, strict=True))
    low, high = data.get("low"), data.get("high")
    if dtype.is_floating_point or dtype.is_complex:
        values = torch.randn(size, generator=generators[device.type], device=device)
        return (values.abs() if low is not None and low >= 0 else values).to(dtype).as_strided(shape, strides)
    return _integers(size, dtype, low, high, generators["cpu"]).to(device).as_strided(shape, strides)


def _integers(
    size: int, dtype: torch.dtype, low: float | None, high: float | None, generator: torch.Generator
) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.rand(size, generator=generator) < 0.5
    first, last = int(low or 0), int(high if high is not None else 1)
    # Each value once where that is possible: writing twice to one place leaves open which value stays.
    if size <= last - first + 1 <= 1 << 20:
        return (torch.randperm(last - first + 1, generator=generator)[:size] + first).to(dtype)
    return torch.randint(first, last + 1, (size,), generator=generator, dtype=torch.int64).to(dtype)


def _widen(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return _copy(value, dtype)
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return dtype
    return value


def _copy(value: Any, dtype: torch.dtype | None = None) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    copy = torch.empty_strided(value.shape, value.stride(), dtype=dtype or value.dtype, device=value.device)
    if 0 in value.stride():
        return value.to(dtype or value.dtype, copy=True)
    return copy.copy_(value)


def _map(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, (list, tuple)):
        return [function(item) for item in value]
    return function(value)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
