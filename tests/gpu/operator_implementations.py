"""The implementations that a GPU can run, and the cases that each of them refuses, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from sglang_fl.dispatch.backends.flaggems import register_ops as flaggems
from sglang_fl.dispatch.backends.reference import register_ops as reference
from sglang_fl.dispatch.backends.vendor.cuda import register_ops as cuda
from sglang_fl.dispatch.registry import OpRegistry
from sglang_fl.dispatch.rules import refusal_of_call
from sglang_fl.dispatch.types import OpImpl
from sglang_fl.testing.operator_cases import Call, Case

NOT_OFFERED = {(flaggems.IMPL_ID, name) for name in flaggems.NOT_OFFERED}
NOT_OFFERED |= {(cuda.IMPL_ID, name) for name in cuda.NOT_OFFERED}

# Implementation and operator to whether a case is one that it must refuse. What is not here it must do.
Refuses = Callable[[Case], bool]
REFUSES: dict[tuple[str, str], Refuses] = {
    ("flagos", "topk"): lambda case: case.label.startswith("groups, ") and "bias" not in case.label,
    ("vendor.nvidia", "gelu_and_mul"): lambda case: case.dtype is torch.float32,
    ("vendor.nvidia", "rms_norm"): lambda case: case.dtype is torch.float32 or case.label == "float32 weight",
    ("vendor.nvidia", "gemma_rms_norm"): lambda case: case.dtype is torch.float32 or case.label == "float32 weight",
    ("vendor.nvidia", "rotary_embedding"): lambda case: case.dtype is not torch.float32,
    ("vendor.nvidia", "topk"): lambda case: (
        case.label.startswith(("softmax and bias", "sigmoid and bias, 60"))
        or (case.label.startswith("groups, ") and not case.label.startswith("groups, sigmoid and bias, 128"))
    ),
}


def implementations() -> Iterator[OpImpl]:
    """Everything that is offered, whether or not it is available."""
    registry = OpRegistry()
    for backend in (flaggems, cuda, reference):
        backend.register_builtins(registry)
    for impl in registry.all_implementations():
        if (impl.impl_id, impl.op_name) not in NOT_OFFERED:
            yield impl


def must_refuse(impl: OpImpl, case: Case) -> bool:
    """Whether this implementation must say no to that case."""
    rule = REFUSES.get((impl.impl_id, impl.op_name))
    return rule is not None and rule(case)


# sgl_kernel's tanh is the hardware's approximation, which an H200 showed to be 5e-5 off: as a rounding of float16.
_ROUNDINGS = {("vendor.nvidia", "gelu_and_mul"): 1}


def roundings(impl: OpImpl) -> int | None:
    """Further roundings that it may make; the kernels compute in float32 and round once."""
    return None if impl.impl_id == "reference" else _ROUNDINGS.get((impl.impl_id, impl.op_name), 0)


def refused_by_rule(impl: OpImpl, call: Call) -> str:
    """What binding would say against this call; empty if nothing."""
    return refusal_of_call(impl, (call.obj, *call.args), call.kwargs)
