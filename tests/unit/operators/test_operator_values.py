"""Every available implementation against float64 formulas, over dtypes, token counts, strides and sizes."""

from __future__ import annotations

import pytest
import torch

from sglang_fl.dispatch.backends.reference.reference import ReferenceBackend
from sglang_fl.dispatch.registry import KNOWN_OPERATORS
from sglang_fl.dispatch.types import NotSupportedError, OpImpl
from sglang_fl.testing.operator_cases import DTYPES, HEAD_SIZES, TOKENS, Case, Layout, case_34, cases
from sglang_fl.testing.operator_checks import problems, whole_cache_problems
from tests.unit.operators.available import AVAILABLE, REFERENCE, device_of

RUNS = [(impl, case) for impl in AVAILABLE if impl.op_name in KNOWN_OPERATORS for case in cases(impl.op_name)]


def of(op_name: str) -> list[OpImpl]:
    """The implementations of one operator."""
    return [impl for impl in AVAILABLE if impl.op_name == op_name]


def test_the_reference_has_every_operator() -> None:
    assert set(REFERENCE) == set(KNOWN_OPERATORS)


@pytest.mark.parametrize("op_name", KNOWN_OPERATORS)
def test_the_cases_cover_dtypes_tokens_and_strides(op_name: str) -> None:
    # Given every case of the operator
    labels = {
        (case.dtype, case.tokens, layout) for case in cases(op_name) for layout in Layout if layout.value in case.label
    }

    # Then each dtype is tried with each number of tokens in each layout
    assert labels >= {(dtype, tokens, layout) for dtype in DTYPES for tokens in TOKENS for layout in Layout}


def test_the_rotary_cases_cover_head_sizes_whole_and_in_part() -> None:
    labels = " ".join(case.label for case in cases("rotary_embedding"))

    for head_size in HEAD_SIZES:
        for rotary_dim in (head_size, head_size // 2):
            assert f"NeoX, in place, {rotary_dim} of {head_size}" in labels
            assert f"interleaved, in place, {rotary_dim} of {head_size}" in labels


@pytest.mark.parametrize(("impl", "case"), RUNS, ids=[f"{impl.impl_id} {case}" for impl, case in RUNS])
def test_results_inputs_and_cache(impl: OpImpl, case: Case) -> None:
    assert problems(case, impl.fn, device_of(impl)) == []


ROTARY = [(impl, case) for impl, case in RUNS if "rotary" in impl.op_name and case.tokens == 7]


@pytest.mark.parametrize(
    "impl", [*of("rotary_embedding"), *of("mrotary_embedding")], ids=lambda impl: str(impl.op_name)
)
def test_the_cache_is_neither_copied_nor_converted_as_a_whole(impl: OpImpl) -> None:
    found = [whole_cache_problems(case, impl.fn, device_of(impl)) for other, case in ROTARY if other is impl]

    assert found
    assert not any(found)


@pytest.mark.parametrize("op_name", ["rms_norm", "gemma_rms_norm"])
def test_the_reference_norms_leave_even_what_they_may_reuse(op_name: str) -> None:
    # Given inputs that the contract hands over
    for case in (case for case in cases(op_name) if "residual" in case.label and case.tokens):
        call = case.build(torch.device("cpu"))
        before = [value.clone() for value in call.args]

        # When the reference computes
        REFERENCE[op_name].fn(call.obj, *call.args)

        # Then they are as they were
        assert all(torch.equal(one, other) for one, other in zip(before, call.args, strict=True))


@pytest.mark.parametrize("impl", of("rotary_embedding"), ids=lambda impl: impl.impl_id)
def test_case_34_by_its_numbers(impl: OpImpl) -> None:
    # Given 1..8 and the angles .1 .2 .3 .4 of neighbouring pairs
    call, right = case_34(torch.device(device_of(impl)))

    # When they are rotated
    query, key = impl.fn(call.obj, *call.args, **call.kwargs)

    # Then the numbers are the published ones
    torch.testing.assert_close(query.cpu(), right, rtol=0, atol=6e-4)
    torch.testing.assert_close(key.cpu(), right, rtol=0, atol=6e-4)


@pytest.mark.parametrize("impl", of("topk"), ids=lambda impl: impl.impl_id)
@pytest.mark.parametrize("scoring_func", ["softmax", "sigmoid"])
def test_among_equal_scores_any_experts_but_no_expert_twice(impl: OpImpl, scoring_func: str) -> None:
    # Given logits of which two are better than the rest, and the rest equal
    logits = torch.zeros(5, 16, device=device_of(impl))
    logits[:, 3] = logits[:, 11] = 2.0

    # When four experts are chosen
    weights, ids = impl.fn(None, logits, 4, scoring_func=scoring_func)

    # Then the two best are among them, all are different, and equal scores have equal weights
    ordered, order = ids.cpu().sort(-1)
    assert ((ordered == 3) | (ordered == 11)).sum(-1).tolist() == [2] * 5
    assert (ordered.diff(dim=-1) > 0).all()
    is_best = (ordered == 3) | (ordered == 11)
    per_token = weights.cpu().gather(-1, order)
    assert len({round(float(weight), 6) for weight in per_token[is_best]}) == 1
    assert len({round(float(weight), 6) for weight in per_token[~is_best]}) == 1


@pytest.mark.parametrize("impl", of("topk"), ids=lambda impl: impl.impl_id)
def test_real_router_logits_with_ties_sum_to_one(impl: OpImpl) -> None:
    # Given bfloat16 logits, of which 256 always hold equal ones
    logits = torch.randn(64, 256, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    device = device_of(impl)

    # When experts are chosen
    weights, ids = impl.fn(None, logits.to(device), 8)

    # Then no one that was left out is better than one that was chosen
    chosen = logits.gather(1, ids.cpu().long())
    left = logits.float().scatter(1, ids.cpu().long(), -torch.inf)
    assert (left.amax(-1) <= chosen.float().amin(-1)).all()
    torch.testing.assert_close(weights.sum(-1).cpu(), torch.ones(64))


@pytest.mark.parametrize("op_name", KNOWN_OPERATORS)
def test_the_backend_class_gives_what_the_registered_functions_give(op_name: str) -> None:
    # Given the backend's class, as the recipe for vendors has it, and one input twice
    method = getattr(ReferenceBackend(), op_name)
    case = next(case for case in cases(op_name) if case.tokens == 7 and case.dtype is torch.bfloat16)
    calls = [case.build(torch.device("cpu")) for _ in range(2)]

    # When both are called
    of_class, of_function = (
        function(call.obj, *call.args, **call.kwargs)
        for function, call in zip((method, REFERENCE[op_name].fn), calls, strict=True)
    )

    # Then they are equal, and the class says what it is
    as_tuple = [result if isinstance(result, tuple) else (result,) for result in (of_class, of_function)]
    assert all(torch.equal(one, other) for one, other in zip(*as_tuple, strict=True))
    assert ReferenceBackend().name == "reference"
    assert ReferenceBackend().is_available()


def test_what_the_reference_cannot_do_is_refused_before_anything_is_written() -> None:
    logits, x = torch.randn(3, 8), torch.randn(3, 4)
    ids, weights = torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2)
    w13, w2 = torch.randn(8, 6, 4), torch.randn(8, 4, 3)

    with pytest.raises(NotSupportedError, match=r"scoring_func='sqrtsoftplus'.*softmax, sigmoid"):
        REFERENCE["topk"].fn(None, logits, 2, scoring_func="sqrtsoftplus")
    with pytest.raises(NotSupportedError, match=r"activation='relu2'.*silu, gelu"):
        REFERENCE["fused_moe"].fn(None, x, w13, w2, weights, ids, activation="relu2")
    with pytest.raises(ValueError, match=r"apply_router_weight_on_input with top_k=2"):
        REFERENCE["fused_moe"].fn(None, x, w13, w2, weights, ids, apply_router_weight_on_input=True)
    with pytest.raises(ValueError, match=r"num_expert_group=4 with topk_group=5; topk_group must be 1 to 4"):
        REFERENCE["topk"].fn(None, logits, 2, num_expert_group=4, topk_group=5)
    with pytest.raises(ValueError, match=r"8 experts cannot be divided into 3 groups"):
        REFERENCE["topk"].fn(None, logits, 2, num_expert_group=3, topk_group=1)
    with pytest.raises(ValueError, match=r"3 tokens, but topk_ids has 2 rows"):
        REFERENCE["fused_moe"].fn(None, x, w13, w2, weights[:2], ids[:2])


def test_three_positions_for_a_layer_without_sections_are_refused() -> None:
    case = next(case for case in cases("mrotary_embedding") if "three axes" in case.label and case.tokens == 7)
    call = case.build(torch.device("cpu"))
    call.obj.mrope_section = None
    before = call.args[1].clone()

    with pytest.raises(NotSupportedError, match=r"positions \(3, 7\).*no mrope_section; pass positions of shape \[T\]"):
        REFERENCE["mrotary_embedding"].fn(call.obj, *call.args)

    assert torch.equal(call.args[1], before)
