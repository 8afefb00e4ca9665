"""What every bridge has: a layer, the implementation that was bound for it, and SGLang's own method for the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch

from sglang_fl.dispatch import Bound, OwnMethodError

Method = Callable[..., Any]
Obstacle = Callable[[Any, Any, Method], str]
# In the place of a result: SGLang's own method is to make this call.
OWN = object()


class Owner:
    """Whose ``_forward_method`` a function of ours is: the object that the function is bound to, as a method.

    ``copy.deepcopy`` and ``pickle`` take a bound method along with what it is bound to. A copy of a layer so gets the
    same function with another owner, by which the function knows that it must not answer: what it holds belongs to the
    layer that was copied. From ``pickle`` it gets :attr:`forward`.
    """

    __slots__ = ("layer",)

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __reduce__(self) -> tuple[type[Owner], tuple[Any]]:
        return Owner, (self.layer,)

    @property
    def forward(self) -> Method:
        """What SGLang's constructor puts into ``_forward_method``."""
        method: Method = self.layer.dispatch_forward()
        return method

    def bind(self, function: Method) -> Method:
        """``function``, whose first parameter is the owner, for the layer's ``_forward_method``."""
        return MethodType(function, self)

    def replace(self, method: Method) -> None:
        """Put ``method`` wherever the layer has a function of this owner's.

        While SGLang compiles a layer, it keeps the method that it will put back in the second attribute.
        """
        for name in ("_forward_method", "_original_forward_method"):
            if getattr(vars(self.layer).get(name), "__self__", None) is self:
                setattr(self.layer, name, method)


def moved(owner: Owner, *args: Any, **kwargs: Any) -> Any:
    """The first call of a copied layer: it decides for itself."""
    method = owner.forward
    owner.replace(method)
    return method(*args, **kwargs)


class Connection:
    """One layer and what was bound for it; what a bridge's ``forward`` is made from.

    Attributes:
        owner: the function answers to this one only, and leaves all others to :func:`moved`.
        layer: SGLang's layer.
        subject: what the implementation gets as its first argument.
        first: the bound implementation, called with the operator's standard arguments.
        own: SGLang's own method for the platform, bound to the layer, for whatever the standard signature lacks.
        reads_version: whether the main input's version counter is read before each call.
    """

    def __init__(self, owner: Owner, subject: Any, bound: Bound, own: Method) -> None:
        self.owner = owner
        # Only where another implementation could follow is it of use, and in inference mode there is none to read.
        self.reads_version = bound.call.fn is not bound.call.first and not torch.is_inference_mode_enabled()
        self.layer = owner.layer
        self.subject = subject
        self.first = bound.call.first
        self.own = own
        self._after = bound.call.after

    def recover(
        self, error: Exception, args: Sequence[Any], version: int | None, kwargs: dict[str, Any] | None = None
    ) -> Any:
        """After ``first`` raised ``error`` for these arguments: the result of the next implementation, or :data:`OWN`.

        ``version``: of the second argument before the call, by which a change of it shows; None if it keeps none.

        Raises:
            Exception: ``error`` again, where nothing may follow on it.
        """
        try:
            return self._after(error, args, kwargs or {}, version)
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
        make: gives the function that runs one layer; it has these parameters behind the owner.
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


def first_of(obstacles: Sequence[Callable[..., str]], *arguments: Any) -> str:
    """The first answer that is not empty, "" if all are."""
    return next(filter(None, (obstacle(*arguments) for obstacle in obstacles)), "")
