"""What every bridge has: a layer, the implementation that was bound for it, and SGLang's own method for the rest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from sglang_fl.dispatch import OwnMethodError

Method = Callable[..., Any]


class Forward:
    """Something that stands in a layer's ``_forward_method``, in the place of one of SGLang's bound methods.

    A copy of the layer, by ``copy.deepcopy`` or ``pickle``, decides anew: a bound implementation, and what it holds of
    the layer, belong to one layer in one process.
    """

    __slots__ = ("layer",)

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __reduce__(self) -> tuple[Callable[[Any], Method], tuple[Any]]:
        return _dispatch_again, (self.layer,)


def _dispatch_again(layer: Any) -> Method:
    method: Method = layer.dispatch_forward()
    return method


class Bridge(Forward, ABC):
    """Called as SGLang calls the layer; its ``__call__`` has the signature of the class's ``forward_*`` methods.

    Attributes:
        layer: SGLang's layer.
        fn: the bound implementation, called with the operator's standard arguments.
        own: SGLang's own method for the platform, bound to the layer, for whatever the standard signature lacks.
    """

    __slots__ = ("fn", "own")

    op_name: ClassVar[str]

    def __init__(self, layer: Any, subject: Any, fn: Method, own: Method) -> None:
        super().__init__(layer)
        self.fn = fn
        self.own = own

    @classmethod
    def obstacle(cls, layer: Any, subject: Any, own: Method) -> str:
        """Why this layer keeps SGLang's own method for good, "" if nothing speaks against the bridge.

        Asked at the layer's first call, when all its attributes are there.
        """
        return ""

    @classmethod
    def subject(cls, layer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What the implementation gets as its first argument."""
        return layer

    @classmethod
    def input_dtype(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype | None:
        """The dtype that rules of implementations on dtypes are about: that of the first floating argument."""
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operator; a call that the bound implementation leaves to SGLang goes to :attr:`own`."""


__all__ = ["Bridge", "Forward", "Method", "OwnMethodError"]
