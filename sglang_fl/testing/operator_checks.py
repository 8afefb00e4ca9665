"""The one check that every implementation of an operator must pass, on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_fl.testing.operator_cases import Call, Case
from sglang_fl.testing.operator_formulas import FORMULAS, NATIVE_ROUNDINGS, Expected, unit_roundoff


def problems(
    case: Case, implementation: Callable[..., Any], device: str = "cpu", roundings: int | None = None
) -> list[str]:
    """Call the implementation, and say what is wrong with its results and with what it did to its inputs.

    Args:
        case: the input.
        implementation: called by the operator's standard signature.
        device: where.
        roundings: roundings to the dtype that the implementation may make before its last one; None: as many as
            SGLang's native method makes. 0 holds an implementation to float32 inside.

    Returns:
        A line for each problem; empty if there is none.
    """
    where = torch.device(device)
    call = case.build(where)
    allowed = NATIVE_ROUNDINGS[case.op_name] if roundings is None else roundings
    reference = call if where.type == "cpu" else case.build(torch.device("cpu"))
    expected = FORMULAS[case.op_name](reference.obj, *reference.args, roundings=allowed, **reference.kwargs)
    memories = _memories(call)
    layer = {name: id(value) for name, value in vars(call.obj).items()}

    results = implementation(call.obj, *call.args, **call.kwargs)
    results = results if isinstance(results, tuple) else (results,)

    found = [line for memory in memories for line in memory.problems()]
    found += [f"obj.{name} was replaced" for name, was in layer.items() if id(getattr(call.obj, name, None)) != was]
    found += _memory_problems(call, results)
    if len(results) != len(expected):
        return [*found, f"{len(results)} results where {len(expected)} are due"]
    if case.op_name == "topk":
        results = _by_id(results)
    for one, result in zip(expected, results, strict=True):
        found += _result_problems(one, result)
    return [f"{case}: {line}" for line in found]


class _Sizes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    # Notes every PyTorch operation that fills memory of its own with at least so many elements.
    def __init__(self, elements: int, known: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = elements
        self.known = known
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            is_large = isinstance(one, torch.Tensor) and one.numel() >= self.elements
            if is_large and one.untyped_storage().data_ptr() not in self.known:
                self.found.append(f"{func} made a tensor {tuple(one.shape)} {one.dtype}")
        return result


def whole_cache_problems(case: Case, implementation: Callable[..., Any], device: str = "cpu") -> list[str]:
    """Which PyTorch operations of a rotary implementation copied or converted the cache as a whole, or half of it.

    Kernels that are not PyTorch's are not seen here; what they write, :func:`problems` sees.
    """
    call = case.build(torch.device(device))
    cache = call.obj.cos_sin_cache
    known = {tensor.untyped_storage().data_ptr() for _, tensor, _ in call.tensors()}
    with _Sizes(cache.numel() // 2, known) as sizes:
        implementation(call.obj, *call.args, **call.kwargs)
    return [f"{case}: {line}; the cache is {tuple(cache.shape)}" for line in sizes.found]


@dataclass
class _Memory:
    # A whole storage, before and after: what lies between a tensor's rows counts too. Views of one storage, such as
    # the cache with its cos and sin, or query and key of one projection, are looked at together.
    names: list[str]
    tensors: list[torch.Tensor]
    writable: list[torch.Tensor]

    def __post_init__(self) -> None:
        self.addresses = [tensor.data_ptr() for tensor in self.tensors]
        self.before = self._flat().clone()

    def _flat(self) -> torch.Tensor:
        tensor = self.tensors[0]
        whole = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor.detach().as_strided((whole,), (1,), 0)

    def problems(self) -> list[str]:
        """What the call did to it that it may not."""
        named = " and ".join(self.names)
        if [tensor.data_ptr() for tensor in self.tensors] != self.addresses:
            return [f"{named} got another storage"]
        after = self._flat()
        # As it was, with what may have been written put in its place.
        should = self.before.clone()
        for tensor in self.writable:
            view = (tensor.shape, tensor.stride(), tensor.storage_offset())
            should.as_strided(*view).copy_(after.as_strided(*view))
        if torch.equal(should.view(torch.uint8), after.view(torch.uint8)):
            return []
        return [f"memory around {named} was written" if self.writable else f"{named} was written"]


def _memories(call: Call) -> list[_Memory]:
    found: dict[int, tuple[list[str], list[torch.Tensor], list[torch.Tensor]]] = {}
    for name, tensor, may_be_written in call.tensors():
        names, tensors, writable = found.setdefault(tensor.untyped_storage().data_ptr(), ([], [], []))
        names.append(name)
        tensors.append(tensor)
        if may_be_written:
            writable.append(tensor)
    return [_Memory(*parts) for parts in found.values()]


def _memory_problems(call: Call, results: Sequence[torch.Tensor]) -> list[str]:
    found = []
    written = dict(call.written)
    arguments = [(position, value) for position, value in enumerate(call.args) if isinstance(value, torch.Tensor)]
    for number, result in enumerate(results):
        if not result.numel():
            continue
        memory = result.untyped_storage().data_ptr()
        same = [position for position, value in arguments if value.untyped_storage().data_ptr() == memory]
        kept = [position for position in same if position not in call.handed_over]
        found += [f"result {number + 1} lies in the memory of argument {position + 1}" for position in kept]
        if not same and not result.is_contiguous():
            found.append(f"result {number + 1} is not contiguous: strides {result.stride()} of {tuple(result.shape)}")
        if number in written and result.data_ptr() != call.args[written[number]].data_ptr():
            found.append(f"result {number + 1} is not argument {written[number] + 1}, though in place was asked for")
    return found


def _by_id(results: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    weights, ids = results
    ordered, order = ids.sort(-1)
    return weights.gather(-1, order), ordered


def _result_problems(expected: Expected, result: torch.Tensor) -> list[str]:
    if result.dtype is not expected.dtype or result.shape != expected.value.shape:
        return [
            f"{expected.name} is {result.dtype} {tuple(result.shape)}, "
            f"right is {expected.dtype} {tuple(expected.value.shape)}"
        ]
    if not result.numel():
        return []
    got = result.detach().cpu().to(expected.value.dtype)
    error = got - expected.value
    wrong = ~(error.abs() <= expected.bound)  # a result that is not a number is wrong too
    if wrong.any():
        worst = int((error.abs() / expected.bound.clamp(min=1e-300)).nan_to_num(nan=torch.inf).argmax())
        return [
            f"{expected.name}: {int(wrong.sum())} of {got.numel()} elements are out of bounds; the worst is "
            f"{got.flatten()[worst]} in the place of {expected.value.flatten()[worst]}, off by "
            f"{error.flatten()[worst].abs():.3g} where {expected.bound.flatten()[worst]:.3g} is allowed"
        ]
    return _gain_problems(expected, error)


def _gain_problems(expected: Expected, error: torch.Tensor) -> list[str]:
    # Errors of rounding have no direction; a factor, however small, does. A single rounding cannot change the mean
    # gain by more than u, and more of them, which are as often up as down, do not either.
    if not expected.value.is_floating_point():
        return []
    energy = float(expected.value.pow(2).sum())
    gain = float((error * expected.value).sum()) / energy if energy else 0.0
    inside = float(expected.bound.sum() / expected.value.abs().sum()) if expected.dtype is torch.float32 else 0.0
    limit = unit_roundoff(expected.dtype) + inside
    return [] if abs(gain) <= limit else [f"{expected.name}: as a whole too large by {gain:.3%}; allowed {limit:.3%}"]
