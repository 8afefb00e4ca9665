"""The reference on a device: no shape that depends on data, no value read by the host, so that a graph can hold it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from sglang_fl.dispatch.backends.reference.impl import fused_moe
from sglang_fl.dispatch.registry import KNOWN_OPERATORS
from sglang_fl.testing.operator_cases import Case, cases
from sglang_fl.testing.operator_checks import problems
from tests.unit.operators.available import REFERENCE


def on_imagined_device(value: Any) -> Any:
    """Tensors of the same shapes, strides and dtypes on a GPU that holds no values; call inside a FakeTensorMode."""
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace(**{name: on_imagined_device(part) for name, part in vars(value).items()})
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
    return value


def call_on_imagined_device(case: Case, function: Any) -> tuple[torch.Tensor, ...]:
    """The results' shapes, dtypes and devices; any value that is asked for raises."""
    call = case.build(torch.device("cpu"))
    with FakeTensorMode():
        results = function(
            on_imagined_device(call.obj),
            *(on_imagined_device(value) for value in call.args),
            **{name: on_imagined_device(value) for name, value in call.kwargs.items()},
        )
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.parametrize("op_name", KNOWN_OPERATORS)
def test_no_value_is_read_by_the_host(op_name: str) -> None:
    for case in cases(op_name):
        # When the operator runs on a device that has no values to read
        results = call_on_imagined_device(case, REFERENCE[op_name].fn)

        # Then it has results there, of the right shape
        call = case.build(torch.device("cpu"))
        real = REFERENCE[op_name].fn(call.obj, *call.args, **call.kwargs)
        real = real if isinstance(real, tuple) else (real,)
        assert [result.device.type for result in results] == ["cuda"] * len(real)
        assert [(r.shape, r.dtype) for r in results] == [(r.shape, r.dtype) for r in real]


def test_a_value_read_by_the_host_is_seen() -> None:
    case = next(case for case in cases("fused_moe") if case.tokens == 7)

    def counting(obj: Any, x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, w: Any, ids: Any, **_: Any) -> Any:
        return x[: int(ids.sum().item())]

    with pytest.raises(DataDependentOutputException):
        call_on_imagined_device(case, counting)


@pytest.mark.parametrize("bytes_at_once", [1, 40_000, fused_moe._GATHERED_WEIGHT_BYTES])
@pytest.mark.parametrize("largest_block", [1, 4, fused_moe._LARGEST_BLOCK])
def test_the_form_for_devices_is_right_too(
    monkeypatch: pytest.MonkeyPatch, bytes_at_once: int, largest_block: int
) -> None:
    # Given the form of fused_moe that graphs capture, with blocks of several sizes and weights in several parts
    monkeypatch.setattr(fused_moe, "_by_counting", fused_moe._by_blocks)
    monkeypatch.setattr(fused_moe, "_GATHERED_WEIGHT_BYTES", bytes_at_once)
    monkeypatch.setattr(fused_moe, "_LARGEST_BLOCK", largest_block)

    # Then it passes every case
    assert [line for case in cases("fused_moe") for line in problems(case, REFERENCE["fused_moe"].fn)] == []


def test_one_expert_may_have_all_tokens() -> None:
    # Given a routing that needs most of one expert's blocks and none of the others'
    generator = torch.Generator().manual_seed(4)
    x, ids = torch.randn(300, 16, generator=generator), torch.full((300, 1), 5, dtype=torch.int32)
    w13, w2 = torch.randn(8, 24, 16, generator=generator), torch.randn(8, 16, 12, generator=generator)
    experts = fused_moe._Experts(w13, w2, None, None, torch.nn.functional.silu)

    # Then both forms give the same
    by_blocks, by_counting = fused_moe._by_blocks(experts, x, ids), fused_moe._by_counting(experts, x, ids)
    torch.testing.assert_close(by_blocks, by_counting)
