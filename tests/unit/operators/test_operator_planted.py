"""The check itself: each kind of fault, planted in each operator, is reported by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from sglang_fl.dispatch.registry import KNOWN_OPERATORS
from sglang_fl.testing.operator_cases import Case, cases, cos_sin_cache
from sglang_fl.testing.operator_checks import problems, whole_cache_problems
from tests.unit.operators.available import REFERENCE

Results = list[torch.Tensor]


def faulty(op_name: str, spoil: Callable[[Sequence[torch.Tensor], Any, tuple[Any, ...]], object]) -> Callable[..., Any]:
    """The reference, after which ``spoil(results, obj, arguments)`` does its damage."""

    def implementation(obj: Any, *args: Any, **kwargs: Any) -> Any:
        results = REFERENCE[op_name].fn(obj, *args, **kwargs)
        spoil(results if isinstance(results, tuple) else (results,), obj, args)
        return results

    return implementation


def some(op_name: str, dtype: torch.dtype = torch.bfloat16) -> Case:
    """A case of seven tokens."""
    return next(case for case in cases(op_name) if case.tokens == 7 and case.dtype is dtype)


def is_zero(case: Case) -> bool:
    """Whether the first result is all zero, as of tokens whose experts are all elsewhere: a factor changes nothing."""
    call = case.build(torch.device("cpu"))
    results = REFERENCE[case.op_name].fn(call.obj, *call.args, **call.kwargs)
    return not (results[0] if isinstance(results, tuple) else results).any()


@pytest.mark.parametrize("op_name", KNOWN_OPERATORS)
def test_one_percent_too_much_or_too_little_is_seen_in_every_case(op_name: str) -> None:
    for case in cases(op_name):
        if not case.tokens or is_zero(case):
            continue
        for factor in (1.01, 0.99) if case.tokens == 64 else (1.01,):
            # Given an implementation whose first result is one percent off
            implementation = faulty(op_name, lambda results, obj, args, factor=factor: results[0].mul_(factor))

            # Then the check says so, of whatever dtype and layout
            assert problems(case, implementation), f"{case}: a factor of {factor} was not seen"


@pytest.mark.parametrize("op_name", ["rms_norm", "gemma_rms_norm", "rotary_embedding", "mrotary_embedding"])
def test_one_percent_in_the_second_result_is_seen(op_name: str) -> None:
    case = next(c for c in cases(op_name) if c.tokens == 7 and ("residual" in c.label or "rotary" in op_name))

    found = problems(case, faulty(op_name, lambda results, obj, args: results[1].mul_(1.01)))

    assert found
    assert all("sum" in line or "key" in line for line in found)


@pytest.mark.parametrize("op_name", KNOWN_OPERATORS)
def test_one_wrong_element_is_seen(op_name: str) -> None:
    def one_element(results: Sequence[torch.Tensor], obj: Any, args: tuple[Any, ...]) -> None:
        results[0].select(0, 3).select(-1, 1).fill_(float("nan"))

    found = problems(some(op_name), faulty(op_name, one_element))

    assert "elements are out of bounds" in " ".join(found)


def test_a_wrong_expert_is_seen() -> None:
    def another(results: Sequence[torch.Tensor], obj: Any, args: tuple[Any, ...]) -> None:
        results[1][2, 1] += 1

    assert "ids: " in " ".join(problems(some("topk"), faulty("topk", another)))


@pytest.mark.parametrize("op_name", ["silu_and_mul", "gelu_and_mul", "rms_norm", "gemma_rms_norm", "topk", "fused_moe"])
def test_a_written_input_is_seen(op_name: str) -> None:
    def write(results: Sequence[torch.Tensor], obj: Any, args: tuple[Any, ...]) -> None:
        args[0].view(-1)[0] += 1

    assert "argument 1 was written" in " ".join(problems(some(op_name), faulty(op_name, write)))


@pytest.mark.parametrize("op_name", ["rotary_embedding", "mrotary_embedding"])
def test_a_written_or_replaced_cache_is_seen(op_name: str) -> None:
    def write(results: Sequence[torch.Tensor], obj: Any, args: tuple[Any, ...]) -> None:
        obj.cos_sin_cache[5, 5] += 1

    def replace(results: Sequence[torch.Tensor], obj: Any, args: tuple[Any, ...]) -> None:
        obj.cos_sin_cache = obj.cos_sin_cache.to(torch.bfloat16)

    written = problems(some(op_name), faulty(op_name, write))
    cos_sin_cache.cache_clear()
    replaced = problems(some(op_name), faulty(op_name, replace))

    assert "cos_sin_cache" in " ".join(written) and "was written" in " ".join(written)
    assert "obj.cos_sin_cache was replaced" in " ".join(replaced)


def test_a_converted_cache_is_seen() -> None:
    def convert(obj: Any, query: Any, key: Any, cos: torch.Tensor, sin: torch.Tensor, *rest: Any, **kwargs: Any) -> Any:
        cos = cos.to(torch.float16)
        return REFERENCE["rotary_embedding"].fn(obj, query, key, cos, sin, *rest, **kwargs)

    found = whole_cache_problems(some("rotary_embedding"), convert)

    assert "_to_copy.default made a tensor (30016, 32) torch.float16; the cache is (30016, 64)" in found[0]


def test_memory_written_between_the_rows_of_a_strided_query_is_seen() -> None:
    case = next(c for c in cases("rotary_embedding") if c.tokens == 7 and "in place" in c.label and "second" in c.label)

    def write(results: Sequence[torch.Tensor], obj: Any, args: tuple[Any, ...]) -> None:
        query = args[0]
        row = query.stride(0) // 2
        query.as_strided((1,), (1,), query.storage_offset() + row).fill_(0)

    assert "memory around argument 1 was written" in " ".join(problems(case, faulty("rotary_embedding", write)))


def test_a_copy_where_in_place_was_asked_for_is_seen() -> None:
    def copy(obj: Any, *args: Any, **kwargs: Any) -> Any:
        return REFERENCE["rotary_embedding"].fn(obj, *args, **{**kwargs, "inplace": False})

    found = " ".join(problems(some("rotary_embedding"), copy))

    assert "result 1 is not argument 1, though in place was asked for" in found


def test_another_dtype_shape_or_layout_is_seen() -> None:
    silu = REFERENCE["silu_and_mul"].fn
    case = some("silu_and_mul")

    assert "torch.float32 (7, 352), right is torch.bfloat16" in problems(case, lambda obj, x: silu(obj, x).float())[0]
    assert "(7, 351), right is torch.bfloat16 (7, 352)" in " ".join(problems(case, lambda obj, x: silu(obj, x)[:, 1:]))
    strided = problems(case, lambda obj, x: silu(obj, x).t().contiguous().t())
    assert "result 1 is not contiguous" in strided[0]
    assert "2 results where 1 are due" in problems(case, lambda obj, x: (silu(obj, x), x.clone()))[-1]


def test_the_input_returned_as_result_is_seen() -> None:
    case = some("silu_and_mul")

    found = problems(case, lambda obj, x: x.chunk(2, -1)[0])

    assert "result 1 lies in the memory of argument 1" in " ".join(found)


@pytest.mark.parametrize("op_name", ["silu_and_mul", "rotary_embedding"])
def test_float32_inside_can_be_asked_for(op_name: str) -> None:
    # Given the reference, which rounds as often as SGLang's native method does
    found = [
        problems(case, REFERENCE[op_name].fn, roundings=0) for case in cases(op_name) if case.dtype is torch.bfloat16
    ]

    # Then an implementation that should round once only would not pass with that
    assert any(found)
