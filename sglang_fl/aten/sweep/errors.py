"""How far an implementation is from the exact result, and whether that is more than PyTorch's own distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sglang_fl.aten.sweep.inputs import Call

# Reference dtypes in the order in which they are tried; not every operator has a kernel for each.
_REFERENCES = (torch.float64, torch.float32)
ALLOWED_ERROR = 2.0


@dataclass(frozen=True)
class Errors:
    """Greatest absolute distance from the reference: of PyTorch's own result, and of FlagGems'.

    reference: float64, float32, or ``torch`` where PyTorch's own result is the reference: for integer and boolean
        results, and for operators that have neither; ``none`` for random numbers.
    allowed: the distance that is allowed: twice PyTorch's own, and at least half a unit in the last place of the
        result's dtype at the reference's greatest value, which no rounding can promise to undercut.
    differs: what makes the results incomparable (shape, dtype, strides, NaN), or an empty text.
    """

    reference: str
    torch_error: float
    gems_error: float
    allowed: float
    differs: str = ""


def compare(call: Call, own: list[torch.Tensor], replaced: list[torch.Tensor]) -> Errors:
    """Errors of both results of one call; ``own`` is PyTorch's, ``replaced`` FlagGems'. Runs the reference natively."""
    differs = _difference(own, replaced)
    if call.is_random:
        return Errors("none", 0.0, 0.0, 0.0, differs or "draws random numbers: another stream than PyTorch's")
    if differs:
        return Errors("none", 0.0, 0.0, 0.0, differs)
    name, reference = _reference(call, own)
    errors = [0.0, 0.0]
    allowed = 0.0
    for mine, theirs, exact in zip(own, replaced, reference, strict=True):
        wanted = exact if mine.is_floating_point() else mine
        distances = [_distance(mine, wanted), _distance(theirs, wanted)]
        # The worst tensor decides: the one with the greatest share of what is allowed.
        limit = max(ALLOWED_ERROR * distances[0], _half_unit(mine, wanted))
        if distances[1] > limit or allowed == 0.0:
            errors, allowed = distances, limit
    return Errors(name, errors[0], errors[1], allowed)


def _reference(call: Call, own: list[torch.Tensor]) -> tuple[str, list[torch.Tensor]]:
    if any(tensor.is_floating_point() for tensor in own):
        for dtype in _REFERENCES:
            try:
                wide: list[torch.Tensor] = call.run_in(dtype)
            except (RuntimeError, TypeError):
                continue
            if [tensor.shape for tensor in wide] == [tensor.shape for tensor in own]:
                return str(dtype).removeprefix("torch."), wide
    return "torch", own


def _difference(own: list[torch.Tensor], replaced: list[torch.Tensor]) -> str:
    if len(own) != len(replaced):
        return f"{len(replaced)} results instead of {len(own)}"
    for mine, theirs in zip(own, replaced, strict=True):
        for what in ("shape", "dtype", "device"):
            wanted, found = getattr(mine, what), getattr(theirs, what)
            if wanted != found:
                return f"{what} {_plain(found)} instead of {_plain(wanted)}"
        if _steps(mine) != _steps(theirs):
            return f"strides {_plain(theirs.stride())} instead of {_plain(mine.stride())}"
    return ""


def _plain(value: Any) -> str:
    return str(list(value) if isinstance(value, tuple) else value)


def _steps(tensor: torch.Tensor) -> list[int]:
    if tensor.numel() == 0:
        return []
    return [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    if found.numel() == 0:
        return 0.0
    if not found.is_floating_point():
        return 0.0 if torch.equal(found, wanted) else float((found != wanted).double().sum())
    left, right = found.double(), wanted.double()
    # Equal infinities and equal NaN are no distance; one against a number is an infinite one.
    same = (left == right) | (left.isnan() & right.isnan())
    distance = torch.where(same, torch.zeros_like(left), (left - right).abs())
    return float(torch.nan_to_num(distance, nan=float("inf"), posinf=float("inf")).max())


def _half_unit(mine: torch.Tensor, wanted: torch.Tensor) -> float:
    if mine.numel() == 0 or not mine.is_floating_point():
        return 0.0
    finite = torch.where(wanted.isfinite(), wanted, torch.zeros_like(wanted)).abs().max()
    return float(finite) * torch.finfo(mine.dtype).eps / 2
