"""Bridges of RMSNorm and GemmaRMSNorm."""

from __future__ import annotations

import sys
from typing import Any

import torch

from sglang_fl.sglang_hooks.operators.bridge import Bridge, Method, OwnMethodError

_BATCH_INVARIANT_MODULE = "sglang.srt.batch_invariant_ops.batch_invariant_ops"
_BATCH_INVARIANT_FLAG = "_batch_invariant_MODE"
# Attribute of RMSNorm and the value with which its mathematics is that of the operator.
_PLAIN: tuple[tuple[str, Any], ...] = (
    ("variance_size_override", None),
    ("cast_x_before_out_mul", False),
    ("fp32_residual", False),
    ("override_orig_dtype", None),
)


class _RmsNorm(Bridge):
    """Both norms: SGLang's parameters, and the one test that has to be made in every call.

    ``post_residual_addition``, an empty input (which SGLang's method answers without a kernel) and more than two
    dimensions are SGLang's own method's: sums of three terms round differently on different platforms, and kernels
    want rows.
    """

    __slots__ = ("_modes",)

    def __init__(self, layer: Any, subject: Any, fn: Method, own: Method) -> None:
        super().__init__(layer, subject, fn, own)
        self._modes = sys.modules[_BATCH_INVARIANT_MODULE]

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        post_residual_addition: torch.Tensor | None = None,
    ) -> Any:
        """x, residual: [tokens, hidden]; the result is the norm, with a residual the pair (norm, sum)."""
        if post_residual_addition is not None or x.ndim != 2 or x.numel() == 0 or self._modes._batch_invariant_MODE:
            return self.own(x, residual, post_residual_addition)
        try:
            return self.fn(self.layer, x, residual)
        except OwnMethodError:
            return self.own(x, residual, post_residual_addition)

    @classmethod
    def obstacle(cls, layer: Any, subject: Any, own: Method) -> str:
        """What SGLang asks of the process, and not of this call."""
        modes = sys.modules.get(_BATCH_INVARIANT_MODULE)
        if not hasattr(modes, _BATCH_INVARIANT_FLAG):
            return f"{_BATCH_INVARIANT_MODULE} has no {_BATCH_INVARIANT_FLAG} in the installed SGLang"
        return ""


class RMSNormBridge(_RmsNorm):
    """``RMSNorm``, where none of its flags changes the mathematics."""

    __slots__ = ()
    op_name = "rms_norm"

    @classmethod
    def obstacle(cls, layer: Any, subject: Any, own: Method) -> str:
        """The flags, which SGLang sets after its dispatch and which stay, and an RL target."""
        for name, plain in _PLAIN:
            value = getattr(layer, name)
            if value is not plain:
                return f"{name} is {value!r}"
        from sglang.srt.server_args import get_global_server_args

        target = get_global_server_args().rl_on_policy_target
        if target is not None:
            return f"rl_on_policy_target is {target!r}"
        return super().obstacle(layer, subject, own)


class GemmaRMSNormBridge(_RmsNorm):
    """``GemmaRMSNorm``."""

    __slots__ = ()
    op_name = "gemma_rms_norm"
