"""Bridges of SiluAndMul and GeluAndMul."""

from __future__ import annotations

from typing import Any

import torch

from sglang_fl.sglang_hooks.operators.bridge import Bridge, Method, OwnMethodError

APPROXIMATIONS = ("tanh", "none")


class _ActivationAndMul(Bridge):
    __slots__ = ()

    def __call__(self, x: torch.Tensor) -> Any:
        """x: [..., 2 d]; the result is [..., d]."""
        try:
            return self.fn(self.layer, x)
        except OwnMethodError:
            return self.own(x)


class SiluAndMulBridge(_ActivationAndMul):
    """``SiluAndMul``. With an RL target SGLang's constructor sets forward_native after the dispatch, which stands."""

    __slots__ = ()
    op_name = "silu_and_mul"


class GeluAndMulBridge(_ActivationAndMul):
    """``GeluAndMul`` in both forms."""

    __slots__ = ()
    op_name = "gelu_and_mul"

    @classmethod
    def obstacle(cls, layer: Any, subject: Any, own: Method) -> str:
        """The standard signature knows two forms of GELU."""
        if layer.approximate in APPROXIMATIONS:
            return ""
        return f"approximate is {layer.approximate!r}, the operator has {' and '.join(APPROXIMATIONS)}"
