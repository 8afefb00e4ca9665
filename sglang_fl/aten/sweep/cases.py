"""Recorded calls of ATen operators as data: how an argument is written to JSON, and what a file of them holds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

# Where a recorded tensor or a device argument is put again: on the accelerator, or on the host as it was.
ACCELERATOR, HOST = "accelerator", "cpu"
_BOUNDS = {"low", "high"}
# Phases of a recording on the host: SGLang as it runs on a chip for which it has no kernels of its own.
EMPTY_INSTALL = "empty_"
# The phase of calls whose values are judged, and not their time.
PROBE = "probe"
_NAMED = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


class CaseFileError(ValueError):
    """A file of recorded calls does not exist or cannot be read."""


@dataclass(frozen=True)
class Case:
    """One call as it was made: the operator, its arguments in JSON's notation, and how often each phase made it.

    operator: ``add.Tensor``, as FlagGems keys its list (``add`` where the overload is the default one).
    phases: phase (``decode_1``, ``prefill_4096``, ...) to the number of calls in it.
    """

    operator: str
    args: list[Any]
    kwargs: dict[str, Any]
    phases: dict[str, int] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Operator, shapes, strides, dtypes and plain arguments as text: equal for calls that differ in values only."""
        return json.dumps(_without_bounds([self.operator, self.args, self.kwargs]), sort_keys=True)

    @property
    def calls(self) -> int:
        """How often the call was made, all phases together."""
        return sum(self.phases.values())

    def describe(self) -> str:
        """Operator, dtypes and shapes in one short line; strides where they are not the contiguous ones."""
        parts = [_short(value) for value in self.args] + [f"{k}={_short(v)}" for k, v in self.kwargs.items()]
        return f"{self.operator}({', '.join(parts)})"


@dataclass(frozen=True)
class CaseFile:
    """The cases of one recording and what made them: model, SGLang, torch, device, dtype."""

    origin: dict[str, str]
    cases: list[Case]

    def write(self, path: Path) -> None:
        """Write to ``path``, one case a line, so that a comparison of two files can be read."""
        lines = [json.dumps(vars(case)) for case in self.cases]
        path.write_text(f'{{"origin": {json.dumps(self.origin)}, "cases": [\n' + ",\n".join(lines) + "\n]}\n")


def read_cases(path: Path) -> CaseFile:
    """Read what :meth:`CaseFile.write` wrote.

    Raises:
        CaseFileError: names the file and what is wrong with it.
    """
    try:
        data = json.loads(path.read_text())
        return CaseFile(data["origin"], [Case(**case) for case in data["cases"]])
    except OSError as error:
        raise CaseFileError(f"{path} cannot be read: {error.strerror}. Make it with aten-sweep --record.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CaseFileError(
            f"{path} is no file of recorded calls ({error}). Make it with aten-sweep --record."
        ) from error


def merge_cases(files: Sequence[CaseFile]) -> CaseFile:
    """One file of several recordings; the phases of one that was made on the host begin with EMPTY_INSTALL."""
    merged: dict[str, Case] = {}
    for file in files:
        prefix = EMPTY_INSTALL if file.origin.get("device") == "host" else ""
        for case in file.cases:
            known = merged.setdefault(case.key, Case(case.operator, case.args, case.kwargs))
            widen([known.args, known.kwargs], [case.args, case.kwargs])
            for phase, count in case.phases.items():
                known.phases[prefix + phase] = known.phases.get(prefix + phase, 0) + count
    return CaseFile(merge_origins([file.origin for file in files]), [merged[key] for key in sorted(merged)])


def merge_origins(origins: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """What several recordings or tables were made on; where they differ, all of it."""
    names = dict.fromkeys(name for origin in origins for name in origin)
    return {name: " and ".join(dict.fromkeys(origin[name] for origin in origins if name in origin)) for name in names}


def encode(value: Any, describe: Callable[[torch.Tensor], dict[str, Any]]) -> Any:
    """An argument in JSON's notation.

    describe: function from a tensor to what the notation holds beside shape, strides and dtype: ``device`` and, where
        they matter, ``low`` and ``high``.

    Raises:
        TypeError: an argument of a kind that no recorded operator has, a generator for example.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": {"shape": [*value.shape], "stride": [*value.stride()], "dtype": dtype, **describe(value)}}
    if isinstance(value, torch.device):
        return {"device": ACCELERATOR}
    for name, kind in _NAMED.items():
        if isinstance(value, kind):
            return {name: str(value).removeprefix("torch.")}
    if isinstance(value, Sequence):
        return [encode(item, describe) for item in value]
    raise TypeError(f"a {type(value).__name__} cannot be recorded")


def widen(values: Any, others: Any) -> None:
    """Widen the ranges of tensors in ``values`` by those in ``others``, the arguments of a call with the same key."""
    if isinstance(values, list):
        for value, other in zip(values, others, strict=True):
            widen(value, other)
    elif isinstance(values, dict):
        if "low" in values:
            values["low"] = None if None in (values["low"], others["low"]) else min(values["low"], others["low"])
            values["high"] = None if None in (values["high"], others["high"]) else max(values["high"], others["high"])
        for name in values.keys() - _BOUNDS:
            widen(values[name], others[name])


def _without_bounds(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_bounds(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_bounds(item) for name, item in value.items() if name not in _BOUNDS}
    return value


def decode(value: Any, make_tensor: Any, device: torch.device) -> Any:
    """An argument from JSON's notation; ``make_tensor`` gets a tensor's description and answers with one."""
    if isinstance(value, list):
        return [decode(item, make_tensor, device) for item in value]
    if not isinstance(value, Mapping):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return make_tensor(content)
    if kind == "device":
        return device
    if kind == "float":
        return float(content)
    return getattr(torch, content)


def _short(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_short(item) for item in value)}]"
    if not isinstance(value, Mapping):
        return str(value)
    ((kind, content),) = value.items()
    if kind != "tensor":
        return str(content)
    shape = "x".join(str(size) for size in content["shape"]) or "scalar"
    contiguous = torch.empty(content["shape"], device="meta").stride()
    strides = "" if tuple(content["stride"]) == contiguous else f" strides {content['stride']}"
    return f"{content['dtype']} {shape}{strides}"
