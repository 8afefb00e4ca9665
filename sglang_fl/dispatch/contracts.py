"""Which inputs an operator's contract hands over: after a call that failed, only what it keeps is surely unchanged."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sglang_fl.dispatch.ops import FLBackendBase

Arguments = Mapping[str, Any]


def _with_residual(arguments: Arguments) -> bool:
    return arguments["residual"] is not None


def _in_place(arguments: Arguments) -> bool:
    return bool(arguments["inplace"])


def _never(_: Arguments) -> bool:
    return False


def _always(_: Arguments) -> bool:
    return True


# Operator to whether this call may write to its inputs, as the docstrings of FLBackendBase say.
HANDS_OVER: dict[str, Callable[[Arguments], bool]] = {
    "silu_and_mul": _never,
    "gelu_and_mul": _never,
    "rms_norm": _with_residual,
    "gemma_rms_norm": _with_residual,
    "rotary_embedding": _in_place,
    "mrotary_embedding": _always,
    "topk": _never,
    "fused_moe": _never,
}


def hands_inputs_over(op_name: str, args: Sequence[Any], kwargs: Arguments) -> bool:
    """Whether a call with these arguments lets the implementation write to an input.

    True wherever that is not known: an operator without a standard signature, or arguments that do not fit it.
    """
    rule = HANDS_OVER.get(op_name)
    if rule is None:
        return True
    try:
        bound = inspect.signature(getattr(FLBackendBase, op_name)).bind(None, *args, **kwargs)
    except TypeError:
        return True
    bound.apply_defaults()
    return rule(bound.arguments)
