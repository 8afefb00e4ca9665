"""Bridges of SiluAndMul and GeluAndMul."""

from __future__ import annotations

from typing import Any

import torch

from sglang_fl.sglang_hooks.operators.bridge import OWN, Bridge, Connection, Method, Owner, moved

APPROXIMATIONS = ("tanh", "none")


def _make(connection: Connection) -> Method:
    mine, layer, first = connection.owner, connection.layer, connection.first
    own, recover, reads_version = connection.own, connection.recover, connection.reads_version

    def forward(owner: Owner, x: torch.Tensor) -> Any:
        if owner is not mine:
            return moved(owner, x)
        try:
            version = x._version if reads_version else None
        except RuntimeError:  # inference mode, unlike the first call
            version = None
        try:
            return first(layer, x)
        except Exception as error:  # noqa: BLE001 - recover raises it again unless another may follow
            result = recover(error, (layer, x), version)
            return own(x) if result is OWN else result

    return forward


def _gelu_obstacle(layer: Any, subject: Any, own: Method) -> str:
    if layer.approximate in APPROXIMATIONS:
        return ""
    return f"approximate is {layer.approximate!r}, the operator has {' and '.join(APPROXIMATIONS)}"


# With an RL target SGLang's constructor of SiluAndMul puts forward_native in the place of the dispatch, which stands.
SILU_AND_MUL = Bridge("silu_and_mul", ("x",), _make)
GELU_AND_MUL = Bridge("gelu_and_mul", ("x",), _make, _gelu_obstacle)
