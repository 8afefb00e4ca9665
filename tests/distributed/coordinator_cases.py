"""Every method of SGLang's GroupCoordinator, called by keyword with SGLang's own parameter names, in a group of two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """One rank's call."""

    method: str
    arguments: Arguments


@dataclass(frozen=True)
class Case:
    """What rank 0 and rank 1 call at the same time; ``expected``: rank to what SGLang cannot do itself on a CPU."""

    name: str
    call: Callable[[int], Call]
    expected: Callable[[int], Any] | None = None


def rows(rank: int, count: int = 4) -> torch.Tensor:
    """``count`` rows of two columns, different on each rank and in each place."""
    return torch.arange(2.0 * count).reshape(count, 2) + 100 * rank


def total(count: int = 4) -> torch.Tensor:
    """The sum of both ranks' rows."""
    return rows(0, count) + rows(1, count)


def both(count: int = 4) -> torch.Tensor:
    """Both ranks' rows, one behind the other."""
    return torch.cat([rows(0, count), rows(1, count)])


def _same(method: str, arguments: Callable[[int], Arguments]) -> Callable[[int], Call]:
    return lambda rank: Call(method, arguments(rank))


def _pair(first: Call, second: Call) -> Callable[[int], Call]:
    return lambda rank: (first, second)[rank]


SIZES = [3, 1]
DICTIONARY = {"h": rows(0), "n": 7, "empty": torch.empty(0, 2)}


def _uneven(rank: int) -> torch.Tensor:
    return rows(rank, SIZES[rank])


CASES: tuple[Case, ...] = (
    Case("all_reduce", _same("all_reduce", lambda rank: {"input_": rows(rank)})),
    Case(
        "quant_all_reduce",
        _same("quant_all_reduce", lambda rank: {"input_": rows(rank)}),
        lambda rank: {"returned": "input_", "input_": total()},
    ),
    Case(
        "_all_reduce_in_place",
        _same("_all_reduce_in_place", lambda rank: {"input_": rows(rank)}),
    ),
    Case(
        "fused_allreduce_rmsnorm",
        _same(
            "fused_allreduce_rmsnorm",
            lambda rank: {"input_": rows(rank), "residual_inp_": rows(rank), "weight_": torch.ones(2), "eps": 1e-6},
        ),
    ),
    Case(
        "all_gather",
        _same("all_gather", lambda rank: {"input_": rows(rank), "dim": 0, "output_tensor_list": None}),
    ),
    Case(
        "all_gather to a list",
        _same(
            "all_gather",
            lambda rank: {"input_": rows(rank), "dim": 0, "output_tensor_list": [torch.zeros(4, 2), torch.zeros(4, 2)]},
        ),
    ),
    Case(
        "all_gather_into_tensor",
        _same("all_gather_into_tensor", lambda rank: {"output": torch.zeros(8, 2), "input": rows(rank)}),
        lambda rank: {"returned": None, "output": both(), "input": rows(rank)},
    ),
    Case(
        "_all_gather_into_tensor",
        _same("_all_gather_into_tensor", lambda rank: {"output": torch.zeros(8, 2), "input": rows(rank)}),
    ),
    Case(
        "cp_all_gather_into_tensor_async",
        _same(
            "cp_all_gather_into_tensor_async",
            lambda rank: {"output": torch.zeros(8, 2), "input": rows(rank), "stream": None},
        ),
        lambda rank: {"returned": None, "output": both(), "input": rows(rank), "stream": None},
    ),
    Case(
        "all_gatherv",
        _same("all_gatherv", lambda rank: {"input_": _uneven(rank), "sizes": SIZES}),
        lambda rank: {
            "returned": [torch.cat([_uneven(0), _uneven(1)])],
            "input_": _uneven(rank),
            "sizes": SIZES,
        },
    ),
    Case(
        "reduce_scatter_tensor",
        _same("reduce_scatter_tensor", lambda rank: {"output": torch.zeros(2, 2), "input": rows(rank)}),
        lambda rank: {"returned": None, "output": total()[2 * rank : 2 * rank + 2], "input": rows(rank)},
    ),
    Case(
        "_reduce_scatter_tensor",
        _same("_reduce_scatter_tensor", lambda rank: {"output": torch.zeros(2, 2), "input": rows(rank)}),
    ),
    Case(
        "reduce_scatter",
        _same("reduce_scatter", lambda rank: {"output": torch.zeros(2, 2), "input_list": list(rows(rank).split(2))}),
    ),
    Case(
        "reduce_scatterv",
        _same("reduce_scatterv", lambda rank: {"input_": rows(rank), "output": None, "sizes": SIZES}),
        lambda rank: {
            "returned": total().split(SIZES)[rank],
            "input_": rows(rank),
            "output": None,
            "sizes": SIZES,
        },
    ),
    Case("gather", _same("gather", lambda rank: {"input_": rows(rank), "dst": 1, "dim": 0})),
    Case("broadcast", _same("broadcast", lambda rank: {"input_": rows(rank), "src": 1})),
    Case("broadcast_object", _same("broadcast_object", lambda rank: {"obj": ["from", rank], "src": 0})),
    Case(
        "broadcast_object_list",
        _same("broadcast_object_list", lambda rank: {"obj_list": ["from", rank], "src": 1, "group": None}),
    ),
    Case("all_gather_object", _same("all_gather_object", lambda rank: {"obj": ["from", rank]})),
    Case(
        "send_object and recv_object",
        _pair(
            Call("send_object", {"obj": {"a": 1}, "dst": 1, "async_send": False}),
            Call("recv_object", {"src": 0}),
        ),
    ),
    Case(
        "broadcast_tensor_dict",
        _same(
            "broadcast_tensor_dict",
            lambda rank: {
                "tensor_dict": DICTIONARY if rank == 0 else None,
                "src": 0,
                "group": None,
                "metadata_group": None,
            },
        ),
    ),
    Case(
        "send_tensor_dict and recv_tensor_dict",
        _pair(
            Call(
                "send_tensor_dict",
                {"tensor_dict": DICTIONARY, "dst": 1, "all_gather_group": None, "async_send": False},
            ),
            Call("recv_tensor_dict", {"src": 0, "all_gather_group": None}),
        ),
    ),
    Case(
        "send and recv",
        _pair(
            Call("send", {"tensor": rows(0), "dst": 1}),
            Call("recv", {"size": torch.Size([4, 2]), "dtype": torch.float32, "src": 0}),
        ),
    ),
    Case("barrier", _same("barrier", lambda rank: {})),
    Case("destroy", _same("destroy", lambda rank: {})),
)

# What the cases leave out, with the reason.
NOT_CALLED = {
    "__init__": "every test makes a group",
    "__repr__": "no communication",
    "graph_capture": "needs a GPU",
    "_all_reduce_out_place": "only all_reduce leads to it, and only on a GPU",
}


def described(value: Any, arguments: Arguments) -> Any:
    """``value`` as plain data; an argument that comes back as the same object is given by its name."""
    for name, argument in arguments.items():
        if value is argument and value is not None:
            return name
    return plain(value)


def plain(value: Any) -> Any:
    """Tensors become their dtype, shape and values."""
    if isinstance(value, torch.Tensor):
        return {"dtype": str(value.dtype), "shape": list(value.shape), "values": value.flatten().tolist()}
    if isinstance(value, torch.Size):
        return list(value)
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
