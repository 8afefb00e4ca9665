"""Bridges of RMSNorm and GemmaRMSNorm."""

from __future__ import annotations

import sys
from typing import Any

import torch

from sglang_fl.sglang_hooks.operators.bridge import OWN, Bridge, Connection, Method, Owner, moved

_PARAMETERS = ("x", "residual=None", "post_residual_addition=None")
_MODES = "sglang.srt.batch_invariant_ops.batch_invariant_ops"
_MODE = "_batch_invariant_MODE"
# Attribute of RMSNorm and the value with which its mathematics is that of the operator.
_PLAIN: tuple[tuple[str, Any], ...] = (
    ("variance_size_override", None),
    ("cast_x_before_out_mul", False),
    ("fp32_residual", False),
    ("override_orig_dtype", None),
)


def _make(connection: Connection) -> Method:
    """Rows go to the operator, which takes any number of them, none included.

    ``post_residual_addition`` and other numbers of dimensions are SGLang's own method's: a sum of three terms rounds
    differently on different platforms, and only its method knows whether it reshapes.
    """
    mine, layer, first = connection.owner, connection.layer, connection.first
    own, recover, reads_version = connection.own, connection.recover, connection.reads_version
    modes = sys.modules[_MODES]

    def forward(
        owner: Owner,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        post_residual_addition: torch.Tensor | None = None,
    ) -> Any:
        if owner is not mine:
            return moved(owner, x, residual, post_residual_addition)
        if post_residual_addition is not None or x.ndim != 2 or modes._batch_invariant_MODE:
            return own(x, residual, post_residual_addition)
        try:
            version = x._version if reads_version and residual is None else None
        except RuntimeError:  # inference mode, unlike the first call
            version = None
        try:
            return first(layer, x, residual)
        except Exception as error:  # noqa: BLE001 - recover raises it again unless another may follow
            result = recover(error, (layer, x, residual), version)
            return own(x, residual, post_residual_addition) if result is OWN else result

    return forward


def _obstacle(layer: Any, subject: Any, own: Method) -> str:
    if not hasattr(sys.modules.get(_MODES), _MODE):
        return f"{_MODES} has no {_MODE} in the installed SGLang"
    return ""


def _rms_norm_obstacle(layer: Any, subject: Any, own: Method) -> str:
    from sglang.srt import server_args

    for name, plain in _PLAIN:
        value = getattr(layer, name)
        if value is not plain:
            return f"{name} is {value!r}"
    # Without a server SGLang has no arguments, and its own method asks for none.
    arguments = server_args._global_server_args
    target = None if arguments is None else arguments.rl_on_policy_target
    return f"rl_on_policy_target is {target!r}" if target is not None else _obstacle(layer, subject, own)


RMS_NORM = Bridge("rms_norm", _PARAMETERS, _make, _rms_norm_obstacle)
GEMMA_RMS_NORM = Bridge("gemma_rms_norm", _PARAMETERS, _make, _obstacle)
