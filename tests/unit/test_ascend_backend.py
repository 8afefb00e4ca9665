"""The Ascend backend against the stand-in for torch_npu: documented calls only, and the formulas' results."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from sglang_fl.dispatch.backends.vendor.ascend import kernels, register_ops
from sglang_fl.dispatch.backends.vendor.ascend.availability import torch_npu_availability
from sglang_fl.dispatch.registry import OpRegistry
from sglang_fl.dispatch.rules import refusal_of_call
from sglang_fl.dispatch.types import NotSupportedError, OpImpl
from sglang_fl.testing import torch_npu_standin
from sglang_fl.testing.operator_cases import Call, Case, cases
from sglang_fl.testing.operator_checks import problems

# Which cases it refuses, by rule or when called; everything else it must do.
REFUSED_LABELS = {
    "rms_norm": ("float32 weight",),
    "gemma_rms_norm": ("float32 weight",),
    "topk": ("sigmoid", "softmax and bias", "groups"),
    "mrotary_embedding": ("Qwen3-VL", "Qwen3.5", "GLM-V interleaved"),
}


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``import torch_npu`` is the stand-in; nothing looked up before or here stays."""
    for name in list(vars(kernels.functions)):
        monkeypatch.delattr(kernels.functions, name)
    with torch_npu_standin.installed():
        yield
    vars(kernels.functions).clear()


def _impls() -> dict[str, OpImpl]:
    registry = OpRegistry()
    register_ops.register_builtins(registry)
    return {impl.op_name: impl for impl in registry.all_implementations() if impl.op_name in register_ops.OFFERED}


def _must_refuse(case: Case) -> bool:
    if case.op_name == "mrotary_embedding" and case.dtype is not torch.float32:
        return True
    return case.label.startswith(REFUSED_LABELS.get(case.op_name, ("nothing",)))


def _refuses(impl: OpImpl, case: Case) -> bool:
    call = case.build(torch.device("cpu"))
    if refusal_of_call(impl, (call.obj, *call.args), call.kwargs):
        return True
    before = [tensor.clone() for _, tensor, _ in call.tensors()]
    try:
        impl.fn(call.obj, *call.args, **call.kwargs)
    except NotSupportedError:
        return all(torch.equal(a, b) for a, (_, b, _) in zip(before, call.tensors(), strict=True))
    return False


@pytest.mark.parametrize("op_name", register_ops.OFFERED)
def test_calls_are_as_documented_and_results_right(op_name: str) -> None:
    """Given every case, when the backend calls torch_npu, then the stand-in accepts and the formula's result comes."""
    impl = _impls()[op_name]
    found, ran = [], 0
    for case in cases(op_name):
        if _must_refuse(case):
            assert _refuses(impl, case), f"{case}: must be refused, inputs untouched"
            continue
        call = case.build(torch.device("cpu"))
        assert not refusal_of_call(impl, (call.obj, *call.args), call.kwargs), str(case)
        found += problems(case, impl.fn)
        ran += 1
    assert ran > 10
    assert not found, "\n".join(found[:10])


@pytest.mark.parametrize("factor", [None, 2.5])
def test_the_grouped_gate_of_deepseek(factor: float | None) -> None:
    """Given 256 experts in 8 groups of which 4 are chosen, when gated by sigmoid and bias, then weights are right."""

    def build(device: torch.device) -> Call:
        generator = torch.Generator().manual_seed(1)
        logits = torch.rand(7, 256, generator=generator).argsort(-1) / 64 - 2
        bias = torch.randn(256, generator=generator) * 0.1
        options = {"scoring_func": "sigmoid", "correction_bias": bias, "num_expert_group": 8, "topk_group": 4}
        return Call(SimpleNamespace(), (logits, 8), {**options, "routed_scaling_factor": factor})

    case = Case("topk", "DeepSeek-V3", torch.float32, 7, build)
    assert problems(case, _impls()["topk"].fn) == []


def test_a_yarn_layer_is_refused() -> None:
    """Given a layer whose cos and sin are scaled beyond one, when it is asked about, then npu_rotary_mul is wrong."""
    supports = register_ops.OFFERED["rotary_embedding"].supports
    assert supports is not None
    assert "mscale 1.2" in supports(SimpleNamespace(mscale=1.2))
    assert supports(SimpleNamespace(mscale=1.0)) == ""


def test_the_stand_in_is_never_available() -> None:
    """Given the stand-in, when the backend is asked, then it says that this is no torch_npu."""
    availability = torch_npu_availability()
    assert not availability.available and "stand-in" in availability.reason


def test_every_function_that_the_backend_names_is_in_the_stand_in() -> None:
    """Given the names that the backend may call, when they are looked up, then each is a documented function."""
    for name in kernels.NAMES:
        assert inspect.getdoc(getattr(torch_npu_standin, name)), name


def test_wrong_calls_fail() -> None:
    """Given calls that the documentation excludes, when the stand-in gets them, then each is an error."""
    x, weight = torch.randn(4, 8), torch.randn(8)
    rows = torch.ones(1, 4, 1, 8)
    wrong: list[Callable[[], object]] = [
        lambda: torch_npu_standin.npu_swiglu(x.t()),
        lambda: torch_npu_standin.npu_swiglu(torch.empty(0, 8)),
        lambda: torch_npu_standin.npu_rms_norm(x, weight.half()),
        lambda: torch_npu_standin.npu_rms_norm(weight, x),
        lambda: torch_npu_standin.npu_geglu(x, approximate=2),
        lambda: torch_npu_standin.npu_rotary_mul(x.view(4, 1, 8), rows, rows),
        lambda: torch_npu_standin.npu_rotary_mul(x.view(1, 4, 1, 8), rows * 1.5, rows),
        lambda: torch_npu_standin.npu_moe_gating_top_k(x, 2, bias=weight),
        lambda: torch_npu_standin.npu_mrope(torch.arange(4), x, x, x, 8, mrope_section=[1, 1, 2], rotary_mode="half"),
    ]
    for call in wrong:
        with pytest.raises(torch_npu_standin.DocumentedLimitError):
            call()
    by_wrong_name = {"eps": 1e-6}
    with pytest.raises(TypeError):
        torch_npu_standin.npu_rms_norm(x, weight, **by_wrong_name)


def test_registering_imports_nothing() -> None:
    """Given the operator that is not offered, when it is asked about, then explain has its reason."""
    registry = OpRegistry()
    register_ops.register_builtins(registry)
    (fused_moe,) = registry.implementations("fused_moe")
    assert not fused_moe.is_available()
    assert "-1" in fused_moe.availability().reason
    with pytest.raises(NotSupportedError):
        fused_moe.fn(None)
