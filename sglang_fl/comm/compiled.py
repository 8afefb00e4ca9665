"""What Dynamo may trace: collectives as opaque operators with fake implementations, the group passed by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_fl.comm.communicator import CommunicatorFL, find_group
from sglang_fl.comm.errors import CommError

_traced: dict[int, Callable[..., Any]] = {}
_is_registered = False


def _all_reduce(tensor: torch.Tensor, group_name: str) -> torch.Tensor:
    return find_group(group_name).all_reduce_new(tensor)


def _fake_all_reduce(tensor: torch.Tensor, group_name: str) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _into(method: str) -> Callable[[torch.Tensor, torch.Tensor, str], None]:
    def call(output: torch.Tensor, tensor: torch.Tensor, group_name: str) -> None:
        getattr(find_group(group_name), method)(output, tensor)

    return call


def _fake_into(output: torch.Tensor, tensor: torch.Tensor, group_name: str) -> None:
    return None


def all_reduce(group: CommunicatorFL, input_: torch.Tensor) -> torch.Tensor:
    """:meth:`CommunicatorFL.all_reduce` for a function under ``torch.compile``; never in place: use the result.

    All ranks of the group must call it.

    Raises:
        CommError: :func:`register` was not called.
    """
    if not _is_registered:
        raise CommError("sglang_fl.comm.compiled: call register() once before a function is compiled")
    if group.world_size == 1:
        return input_
    reduced: torch.Tensor = torch.ops.sglang_fl.all_reduce(input_, group.graph_name)
    return reduced


def all_gather_into_tensor(group: CommunicatorFL, output: torch.Tensor, input: torch.Tensor) -> None:
    """:meth:`CommunicatorFL.all_gather_into_tensor` for a function under ``torch.compile``; as :func:`all_reduce`."""
    torch.ops.sglang_fl.all_gather_into_tensor(output, input, group.graph_name)


def reduce_scatter_tensor(group: CommunicatorFL, output: torch.Tensor, input: torch.Tensor) -> None:
    """:meth:`CommunicatorFL.reduce_scatter_tensor` for a function under ``torch.compile``; as :func:`all_reduce`."""
    torch.ops.sglang_fl.reduce_scatter_tensor(output, input, group.graph_name)


def register() -> None:
    """Define the operators. Idempotent, local; the plugin calls it, and a script of your own that compiles."""
    global _is_registered
    if _is_registered:
        return
    _is_registered = True
    operator = torch.library.custom_op("sglang_fl::all_reduce", _all_reduce, mutates_args=())
    operator.register_fake(_fake_all_reduce)
    for method in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        into = torch.library.custom_op(f"sglang_fl::{method}", _into(method), mutates_args=("output",))
        into.register_fake(_fake_into)


def trace_as(function: Callable[..., Any], traced: Callable[..., Any]) -> None:
    """Let Dynamo trace ``traced``, whose parameters are the same, wherever it meets ``function``."""
    if id(function) not in _traced:
        torch.compiler.substitute_in_graph(function)(traced)
        _traced[id(function)] = function
