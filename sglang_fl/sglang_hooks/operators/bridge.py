"""What every bridge has: a layer, the implementation that was bound for it, and SGLang's own method for the rest."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_fl.dispatch import Bound, OwnMethodError

Method = Callable[..., Any]
Obstacle = Callable[[Any, Any, Method], str]
# In the place of a result: SGLang's own method is to make this call.
OWN = object()


class Connection:
    """One layer and what was bound for it; what a bridge's ``forward`` is made from.

    Attributes:
        layer: SGLang's layer.
        subject: what the implementation gets as its first argument.
        first: the bound implementation, called with the operator's standard arguments.
        own: SGLang's own method for the platform, bound to the layer, for whatever the standard signature lacks.
    """

    def __init__(self, layer: Any, subject: Any, bound: Bound, own: Method) -> None:
        self.layer = layer
        self.subject = subject
        self.first = bound.call.first
        self.own = own
        self._after = bound.call.after

    def recover(self, error: Exception, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Any:
        """After ``first`` raised ``error`` for these arguments: the result of the next implementation, or :data:`OWN`.

        Raises:
            Exception: ``error`` again, where nothing may follow on it.
        """
        try:
            return self._after(error, args, kwargs or {})
        except OwnMethodError:
            return OWN


def _no_obstacle(layer: Any, subject: Any, own: Method) -> str:
    return ""


def _the_layer(layer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return layer


def _first_floating(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype | None:
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)


@dataclass(frozen=True)
class Bridge:
    """How SGLang's calls of a class become calls of an operator.

    Attributes:
        op_name: the operator.
        parameters: those of the class's ``forward_*`` methods behind self, as Python writes them without annotations.
        make: gives the function that runs one layer; it has these parameters.
        obstacle: why a layer keeps SGLang's own method for good, given it, the subject and that method; "" if nothing
            speaks against the bridge. Asked at the layer's first call, when all its attributes are there.
        subject: what the implementation gets as its first argument, given the layer and the first call's arguments.
        input_dtype: what implementations' rules on dtypes are about, given the first call's arguments.
    """

    op_name: str
    parameters: tuple[str, ...]
    make: Callable[[Connection], Method]
    obstacle: Obstacle = _no_obstacle
    subject: Callable[[Any, Sequence[Any], Mapping[str, Any]], Any] = _the_layer
    input_dtype: Callable[[Sequence[Any], Mapping[str, Any]], torch.dtype | None] = _first_floating


class Forward(functools.partial[Any]):
    """What stands in a layer's ``_forward_method``, in the place of one of SGLang's bound methods.

    A copy of the layer, by ``copy.deepcopy`` or ``pickle``, decides anew: a bound implementation, and what it holds of
    the layer, belong to one layer in one process. A partial, since nothing written in Python is called as fast.
    """

    layer: Any

    def __reduce__(self) -> tuple[Callable[[Any], Method], tuple[Any]]:
        return dispatch_again, (self.layer,)


def forward_of(layer: Any, function: Method) -> Forward:
    """``function``, which holds on to ``layer``, as the layer's ``_forward_method``."""
    forward = Forward(function)
    forward.layer = layer
    return forward


def dispatch_again(layer: Any) -> Method:
    """What SGLang's constructor puts into ``_forward_method``."""
    method: Method = layer.dispatch_forward()
    return method


def first_of(obstacles: Sequence[Callable[..., str]], *arguments: Any) -> str:
    """The first answer that is not empty, "" if all are."""
    return next(filter(None, (obstacle(*arguments) for obstacle in obstacles)), "")
