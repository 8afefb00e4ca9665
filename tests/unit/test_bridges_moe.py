"""TopK and the experts: the operator chooses and computes, SGLang's own functions do what lies around it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sglang_fl.dispatch import SelectionPolicy
from tests.unit.bridge_cases import Layer2, layer2, method_of, normal, sglang_ready

TOKENS, EXPERTS, HIDDEN, INTERMEDIATE = 7, 8, 16, 12


@pytest.fixture(autouse=True)
def on() -> Iterator[Layer2]:
    """Layer 2 with the chip first."""
    with sglang_ready(), layer2() as layer:
        yield layer


# ---- TopK ----


def topk(top_k: int = 2, **options: Any) -> Any:
    """SGLang's TopK."""
    from sglang.srt.layers.moe.topk import TopK

    return TopK(top_k, layer_id=3, **options)


def chosen(output: Any) -> list[dict[int, float]]:
    """Expert to weight, for each token: the order within a token means nothing."""
    weights, ids = output.topk_weights.float().tolist(), output.topk_ids.tolist()
    return [dict(zip(i, (round(each, 5) for each in w), strict=True)) for i, w in zip(ids, weights, strict=True)]


BIAS = torch.linspace(-0.5, 0.5, EXPERTS)
GROUPED = {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"renormalize": False},
        {"scoring_func": "sigmoid"},
        {"scoring_func": "sigmoid", "correction_bias": BIAS},
        {"scoring_func": "sigmoid", "correction_bias": BIAS, "renormalize": False},
        GROUPED,
        {**GROUPED, "renormalize": False},
        {**GROUPED, "scoring_func": "sigmoid"},
        {**GROUPED, "correction_bias": BIAS},
        {**GROUPED, "correction_bias": BIAS, "scoring_func": "softmax"},
        {**GROUPED, "routed_scaling_factor": 2.5},
        {**GROUPED, "routed_scaling_factor": 2.5, "apply_routed_scaling_factor_on_output": True},
    ],
    ids=str,
)
def test_topk_chooses_as_sglang_does(on: Layer2, options: dict[str, Any]) -> None:
    """Given each form of routing, when called, then the operator's experts and weights are SGLang's own."""
    layer, logits = topk(**options), normal(TOKENS, EXPERTS)
    expected = copy.deepcopy(layer).forward_native(normal(TOKENS, HIDDEN), logits)
    for output in (
        layer(normal(TOKENS, HIDDEN), logits),
        layer(hidden_states=normal(TOKENS, HIDDEN), router_logits=logits, num_token_non_padded=None),
    ):
        assert chosen(output) == chosen(expected)
        assert type(output) is type(expected)
        assert output.router_logits is logits
        assert (output.topk_weights.dtype, output.topk_ids.dtype) == (torch.float32, torch.int32)
    assert on.chip.called("topk") == 2
    assert layer.topk_config.torch_native is False, "the layer's own flags stay"


@pytest.mark.parametrize(
    "options",
    [
        {"custom_routing_function": lambda **named: (torch.ones(TOKENS, 2), torch.zeros(TOKENS, 2, dtype=torch.int32))},
        {"correction_bias": BIAS},
        {**GROUPED, "correction_bias": BIAS, "renormalize": False},
        {**GROUPED, "num_fused_shared_experts": 1, "top_k": 3},
        {**GROUPED, "renormalize": False, "routed_scaling_factor": 2.0, "apply_routed_scaling_factor_on_output": True},
    ],
    ids=["custom", "softmax-bias", "grouped-bias-plain", "shared", "scaled-plain"],
)
def test_routing_that_the_operator_lacks_stays_sglangs(on: Layer2, options: dict[str, Any]) -> None:
    """Given routing that differs by platform or is the model's own, when called, then SGLang's method runs."""
    layer = topk(**options)
    layer(normal(TOKENS, HIDDEN), normal(TOKENS, EXPERTS))
    assert on.chip.calls == []
    assert method_of(layer) == "forward_native"


def test_another_output_format_stays_sglangs(on: Layer2) -> None:
    """Given an output format of the layer's or of the runner's, when bound, then SGLang's method stands."""
    from sglang.srt.layers.moe import utils
    from sglang.srt.layers.moe.topk import TopKOutputFormat

    layer = topk(output_format=TopKOutputFormat.BYPASSED)
    layer(normal(TOKENS, HIDDEN), normal(TOKENS, EXPERTS))
    assert method_of(layer) == "forward_native"
    standard = topk(output_format=TopKOutputFormat.STANDARD)
    standard(normal(TOKENS, HIDDEN), normal(TOKENS, EXPERTS))
    assert method_of(standard) == "bridge"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "MOE_RUNNER_BACKEND", utils.MoeRunnerBackend.TRITON_KERNELS)
        other = topk()
        other(normal(TOKENS, HIDDEN), normal(TOKENS, EXPERTS))
        assert method_of(other) == "forward_native"


def test_symmetric_memory_stays_sglangs() -> None:
    """Given --enable-symm-mem, when bound, then SGLang's method, which allocates there, stands."""
    with sglang_ready(enable_symm_mem=True):
        layer = topk()
        layer(normal(TOKENS, HIDDEN), normal(TOKENS, EXPERTS))
        assert method_of(layer) == "forward_native"


def test_what_lies_around_the_choice_is_sglangs(on: Layer2, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given SGLang's recorder, capturer and padding mask, when called, then each sees what it sees without us."""
    from sglang.srt.layers.moe import topk as module

    recorded, captured = [], []

    class Recorder:
        def on_select_experts(self, topk_ids: torch.Tensor) -> None:
            recorded.append(topk_ids)

    class Capturer:
        def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
            captured.append((layer_id, topk_ids.clone()))

    monkeypatch.setattr(module, "get_global_expert_distribution_recorder", Recorder)
    monkeypatch.setattr(module, "get_global_experts_capturer", Capturer)
    monkeypatch.setattr(module, "_is_cuda", True)  # there SGLang's function masks
    layer = topk()
    output = layer(normal(TOKENS, HIDDEN), normal(TOKENS, EXPERTS), num_token_non_padded=torch.tensor(4))
    assert on.chip.called("topk") == 1
    assert recorded[0] is output.topk_ids
    assert captured[0][0] == 3 and int(captured[0][1].min()) >= 0
    assert output.topk_ids[4:].tolist() == [[-1, -1]] * 3
    assert int(output.topk_ids[:4].min()) >= 0


def test_padding_and_a_map_of_experts_go_to_sglang_where_it_does_not_mask(on: Layer2) -> None:
    """Given padded tokens off CUDA, or a map of physical experts, then SGLang's own method answers, as it does."""
    layer = topk()
    layer(normal(TOKENS, HIDDEN), normal(TOKENS, EXPERTS))
    with pytest.raises(AssertionError, match="num_token_non_padded"):
        layer(normal(TOKENS, HIDDEN), normal(TOKENS, EXPERTS), num_token_non_padded=torch.tensor(4))
    with pytest.raises(AttributeError):
        layer(normal(TOKENS, HIDDEN), normal(TOKENS, EXPERTS), expert_location_dispatch_info=object())
    assert on.chip.called("topk") == 1


def test_a_bias_that_is_replaced_is_the_one_in_use(on: Layer2) -> None:
    """Given a bound layer, when its bias is another tensor, then the choice follows."""
    layer = topk(scoring_func="sigmoid", correction_bias=BIAS)
    layer(normal(TOKENS, HIDDEN), normal(TOKENS, EXPERTS))
    layer.topk_config.correction_bias = -4 * BIAS
    assert chosen(layer(normal(TOKENS, HIDDEN), normal(TOKENS, EXPERTS))) == chosen(
        copy.deepcopy(layer).forward_native(normal(TOKENS, HIDDEN), normal(TOKENS, EXPERTS))
    )
    assert on.chip.called("topk") == 2


# ---- experts ----


class Experts(torch.nn.Module):
    """What UnquantizedFusedMoEMethod needs of a FusedMoE layer, which itself wants process groups."""

    def __init__(self, dtype: torch.dtype = torch.float32, with_bias: bool = False, **config: Any) -> None:
        super().__init__()
        from sglang.srt.layers.moe import MoeRunnerConfig
        from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

        self.num_experts = EXPERTS
        self.moe_runner_config = MoeRunnerConfig(
            num_experts=EXPERTS, num_local_experts=EXPERTS, hidden_size=HIDDEN, **{"top_k": 2, **config}
        )
        self.method = UnquantizedFusedMoEMethod()
        self.method.create_weights(self, EXPERTS, HIDDEN, INTERMEDIATE, dtype, with_bias)
        for number, parameter in enumerate(self.parameters()):
            parameter.copy_(normal(*parameter.shape, dtype=parameter.dtype, seed=20 + number) / 4)
        self.method.create_moe_runner(self, self.moe_runner_config)

    def run(self, dispatched: Any) -> torch.Tensor:
        """As FusedMoE does."""
        output: torch.Tensor = self.method.apply(self, dispatched).hidden_states
        return output

    def run_native(self, dispatched: Any) -> torch.Tensor:
        """What SGLang's native method runs; the method itself refuses GELU."""
        from sglang.srt.layers.moe.fused_moe_native import moe_forward_native

        given = (dispatched.hidden_states, dispatched.topk_output, self.moe_runner_config)
        output: torch.Tensor = moe_forward_native(self, *given)
        return output


def dispatched(tokens: int = TOKENS, dtype: torch.dtype = torch.float32, ids: Any = None) -> Any:
    """SGLang's StandardDispatchOutput."""
    from sglang.srt.layers.moe.token_dispatcher import StandardDispatchOutput

    logits = normal(tokens, EXPERTS)
    output = topk().forward_native(normal(tokens, HIDDEN), logits)
    return StandardDispatchOutput(
        normal(tokens, HIDDEN, dtype=dtype), None, output if ids is None else output._replace(topk_ids=ids)
    )


@pytest.mark.parametrize("options", [{}, {"activation": "gelu"}, {"with_bias": True}], ids=str)
def test_experts(on: Layer2, options: dict[str, Any]) -> None:
    """Given SiLU, GELU and biases, when the method is applied as FusedMoE does, then the values are SGLang's."""
    experts, given = Experts(**options), dispatched()
    expected = experts.run_native(given)
    torch.testing.assert_close(experts.run(given), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(experts.method.forward(experts, given).hidden_states, expected, atol=1e-6, rtol=1e-5)
    assert on.chip.called("fused_moe") == 2
    args, named = on.chip.last()
    assert args[0] is experts
    assert (named["w13_bias"] is not None) is bool(options.get("with_bias"))
    assert torch.equal(given.hidden_states, normal(TOKENS, HIDDEN))


def test_experts_of_another_rank_add_nothing(on: Layer2) -> None:
    """Given ids of -1, as the dispatcher marks other ranks' experts, when applied, then only this rank's count."""
    experts, given = Experts(), dispatched()
    ids = given.topk_output.topk_ids.clone()
    ids[:, 1] = -1
    output = experts.run(dispatched(ids=ids))
    weights = given.topk_output.topk_weights.clone()
    weights[:, 1] = 0
    masked = given._replace(topk_output=given.topk_output._replace(topk_weights=weights))
    torch.testing.assert_close(output, experts.run_native(masked), atol=1e-6, rtol=1e-5)


def test_the_scaling_factor_is_the_runners_or_the_models_as_on_the_platform(on: Layer2) -> None:
    """Given a routed_scaling_factor, then it is handed on exactly where SGLang's method for the platform applies it."""
    experts = Experts(routed_scaling_factor=2.0)
    experts.run(dispatched())
    assert on.chip.last()[1]["routed_scaling_factor"] is None, "the native method leaves it to the model"
    _bind(on, experts, experts.method.forward_cuda)(experts, dispatched())
    assert on.chip.last()[1]["routed_scaling_factor"] == 2.0


def _bind(on: Layer2, experts: Experts, own: Any) -> Any:
    from sglang_fl.sglang_hooks.operators.table import TABLE

    row = next(row for row in TABLE if row.op_name == "fused_moe")
    return on.binder.bind(row, experts.method, own, (experts, dispatched()), {})


@pytest.mark.parametrize(
    ("config", "attributes"),
    [
        ({"is_gated": False}, {}),
        ({"gemm1_alpha": 1.7, "gemm1_clamp_limit": 7.0}, {}),
        ({"no_combine": True}, {}),
        ({"apply_router_weight_on_input": True}, {}),
        ({"activation": "relu2"}, {}),
        ({}, {"use_triton_kernels": True}),
        ({}, {"use_flashinfer_cutlass": True}),
        ({}, {"use_flashinfer_trtllm_moe": True}),
        ({}, {"_aiter_runner": "a runner"}),
    ],
    ids=str,
)
def test_experts_that_the_operator_lacks_stay_sglangs(
    on: Layer2, config: dict[str, Any], attributes: dict[str, Any]
) -> None:
    """Given a runner, a layout or an activation that the signature lacks, when bound, then SGLang's method stands."""
    experts = Experts(**config)
    for name, value in attributes.items():
        setattr(experts.method, name, value)
    own = experts.method.forward_native
    assert _bind(on, experts, own) is own


def test_exact_gelu_of_the_triton_runner_is_not_taken_for_the_tanh_form(on: Layer2) -> None:
    """Given GELU, when SGLang's method is the one on CUDA devices, which takes the exact form, then it stands."""
    experts = Experts(activation="gelu")
    assert _bind(on, experts, experts.method.forward_cuda) == experts.method.forward_cuda
    assert _bind(on, experts, experts.method.forward_native) != experts.method.forward_native


def test_packed_weights_stay_sglangs(on: Layer2, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given weights in another shape than the checkpoint's, or AMX's or an NPU's packing, then its method stands."""
    from sglang.srt.layers.quantization import unquant

    experts = Experts()
    own = experts.method.forward_native
    experts.w2_weight = torch.nn.Parameter(experts.w2_weight.transpose(1, 2).contiguous())
    assert _bind(on, experts, own) is own
    other = Experts()
    monkeypatch.setattr(unquant, "_is_npu", True)
    assert _bind(on, other, other.method.forward_native) == other.method.forward_native
    monkeypatch.undo()
    other.use_intel_amx_backend = True
    assert _bind(on, other, other.method.forward_native) == other.method.forward_native


def test_another_dispatch_of_tokens_goes_to_sglang(on: Layer2, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given another dispatcher's output, scales, another routing or another layer, then SGLang's method gets it."""
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

    seen = []
    native = UnquantizedFusedMoEMethod.forward_native
    monkeypatch.setattr(
        UnquantizedFusedMoEMethod, "forward_native", lambda self, *a: (seen.append(a), native(self, *a))[1]
    )
    experts, given = Experts(), dispatched()
    experts.run(given)
    assert seen == []

    class Other(tuple):
        hidden_states, hidden_states_scale, topk_output = given

    for other in (Other(), given._replace(hidden_states_scale=torch.ones(1))):
        experts.run(other)
        assert seen[-1] == (experts, other)
    experts.method.forward(Experts(), given)
    assert len(seen) == 3
    assert on.chip.called("fused_moe") == 1


def test_replaced_weights_are_the_ones_in_use(on: Layer2) -> None:
    """Given bound experts, when a weight is another parameter, then the values follow."""
    experts, given = Experts(), dispatched()
    before = experts.run(given)
    experts.w13_weight = torch.nn.Parameter(experts.w13_weight.flip(0).clone())
    after = experts.run(given)
    torch.testing.assert_close(after, experts.run_native(given), atol=1e-6, rtol=1e-5)
    assert not torch.allclose(after, before)


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_of_experts_are_their_own(way: str, on: Layer2) -> None:
    """Given bound experts, when copied and changed, then each has its own values, and the implementation its layer."""
    experts, given = Experts(), dispatched()
    experts.run(given)
    twin = copy.deepcopy(experts) if way == "deepcopy" else pickle.loads(pickle.dumps(experts))
    twin.w2_weight.mul_(2)
    torch.testing.assert_close(twin.run(given), 2 * experts.run(given), atol=1e-5, rtol=1e-5)
    assert on.chip.calls[-2][1][0] is twin


def test_no_token_at_all(on: Layer2) -> None:
    """Given no token, when TopK and the experts run, then shapes are right."""
    output = topk()(torch.empty(0, HIDDEN), torch.empty(0, EXPERTS))
    assert output.topk_ids.shape == (0, 2)
    assert Experts().run(dispatched(0)).shape == (0, HIDDEN)
    assert [name for name, _, _ in on.chip.calls] == ["topk", "fused_moe"]


def test_a_refused_call_goes_to_sglangs_own_method() -> None:
    """Given a chip that refuses, and SGLang's own method next, when called, then SGLang's values come."""
    with layer2(SelectionPolicy(prefer="vendor"), platform="cuda", has_kernels=True) as on:
        on.chip.refuses |= {"topk", "fused_moe"}
        layer, experts, given = topk(), Experts(), dispatched()
        output = layer(normal(TOKENS, HIDDEN), normal(TOKENS, EXPERTS))
        assert chosen(output) == chosen(given.topk_output)
        assert torch.equal(experts.run(given), experts.run_native(given))
        assert on.chip.called("topk") == on.chip.called("fused_moe") == 0
        assert method_of(layer) == method_of(experts.method) == "bridge"
