"""Every available implementation against SGLang's own native method of the real layer: the reference bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_fl.dispatch.types import OpImpl
from sglang_fl.testing.operator_cases import DTYPES, FAR_POSITION, HEAD_SIZES, MULTIMODAL_FORMS, TOKENS, MultimodalForm
from tests.unit.operators.available import AVAILABLE, REFERENCE, device_of

MAX_POSITION = FAR_POSITION + 1
Results = tuple[torch.Tensor, ...]


@pytest.fixture(scope="module", autouse=True)
def sglang_layers() -> Iterator[None]:
    """SGLang's layers can be constructed: it has server arguments, takes the CPU for its device, compiles nothing."""
    from sglang.srt import server_args
    from sglang.srt.layers.rotary_embedding import base

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_args, "_global_server_args", server_args.ServerArgs(model_path="dummy"))
        patch.setattr(base, "_is_cpu", True)
        with torch.compiler.set_stance("force_eager"), torch.no_grad():
            yield


def of(op_name: str) -> Any:
    """One test for each implementation of an operator."""
    found = [impl for impl in AVAILABLE if impl.op_name == op_name]
    return pytest.mark.parametrize("impl", found, ids=[impl.impl_id for impl in found])


def each(name: str, values: Any) -> Any:
    """Parametrize, by dtype names where the values are dtypes."""
    return pytest.mark.parametrize(name, values, ids=lambda value: str(value).removeprefix("torch."))


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 5, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers, the same every time."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def moved(value: Any, device: str) -> Any:
    """A copy on the device; what is no tensor is itself."""
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace(**{name: moved(part, device) for name, part in vars(value).items()})
    return value.to(device) if isinstance(value, torch.Tensor) else value


def attributes(layer: Any, *names: str) -> SimpleNamespace:
    """The attributes that the contract names."""
    return SimpleNamespace(**{name: getattr(layer, name) for name in names})


def assert_equal_to_native(impl: OpImpl, native: Any, obj: Any, *args: Any, **kwargs: Any) -> None:
    """Call the implementation; its results are the native ones, those of the reference to the last bit."""
    device = device_of(impl)
    results = impl.fn(
        moved(obj, device),
        *(moved(value, device) for value in args),
        **{name: moved(value, device) for name, value in kwargs.items()},
    )
    native = native if isinstance(native, tuple) else (native,)
    results = results if isinstance(results, tuple) else (results,)
    assert len(results) == len(native)
    for result, right in zip(results, native, strict=True):
        if impl.impl_id == "reference":
            assert torch.equal(result.reshape(right.shape), right.to(result.dtype))
        elif right.dtype is torch.float32:
            torch.testing.assert_close(result.cpu().reshape(right.shape), right, rtol=2e-5, atol=2e-5)


@of("silu_and_mul")
@each("dtype", DTYPES)
@each("tokens", TOKENS)
def test_silu_and_mul(impl: OpImpl, dtype: torch.dtype, tokens: int) -> None:
    from sglang.srt.layers.activation import SiluAndMul

    layer = SiluAndMul()
    wide = normal(tokens, 1500, dtype=dtype, scale=3)
    for x in (wide[:, :1408], wide[::2, 92:]):
        assert_equal_to_native(impl, layer.forward_native(x), layer, x)


@of("gelu_and_mul")
@each("dtype", DTYPES)
@each("tokens", TOKENS)
@each("approximate", ["tanh", "none"])
def test_gelu_and_mul(impl: OpImpl, dtype: torch.dtype, tokens: int, approximate: str) -> None:
    from sglang.srt.layers.activation import GeluAndMul

    layer = GeluAndMul(approximate)
    x = normal(tokens, 1408, dtype=dtype, scale=3)
    assert_equal_to_native(impl, layer.forward_native(x), attributes(layer, "approximate"), x)


@pytest.mark.parametrize(("op_name", "class_name"), [("rms_norm", "RMSNorm"), ("gemma_rms_norm", "GemmaRMSNorm")])
@each("dtype", DTYPES)
@each("tokens", TOKENS)
@each("weight_dtype", [None, torch.float32])
def test_norms(
    op_name: str, class_name: str, dtype: torch.dtype, tokens: int, weight_dtype: torch.dtype | None
) -> None:
    from sglang.srt.layers import layernorm

    # Given a layer with weights that matter, in the model's dtype or in float32
    layer = getattr(layernorm, class_name)(896, eps=1e-5).to(weight_dtype or dtype)
    layer.weight.data.copy_(normal(896, seed=6))
    obj = attributes(layer, "weight", "variance_epsilon")
    x, residual = normal(tokens, 896, dtype=dtype), normal(tokens, 896, dtype=dtype, seed=7, scale=4)

    # Then with and without residual the results are SGLang's
    for impl in (impl for impl in AVAILABLE if impl.op_name == op_name):
        assert_equal_to_native(impl, layer.forward_native(x), obj, x.clone())
        native = layer.forward_native(x.clone(), residual.clone())
        assert_equal_to_native(impl, native, obj, x.clone(), residual.clone())


@lru_cache(maxsize=2)
def rotary_layer(head_size: int, rotary_dim: int, neox: bool, dtype: torch.dtype) -> Any:
    """SGLang's own layer; its cache has the model's dtype on the CPU and float32 on NVIDIA."""
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    return RotaryEmbedding(head_size, rotary_dim, MAX_POSITION, 10_000, neox, dtype)


def positions_of(*shape: int) -> torch.Tensor:
    """Positions up to 30,000, which is among them."""
    positions = torch.randint(MAX_POSITION, shape, generator=torch.Generator().manual_seed(8))
    positions.view(-1)[-1:] = FAR_POSITION
    return positions


@of("rotary_embedding")
@each("dtype", DTYPES)
@each("head_size", HEAD_SIZES)
@each("neox", [True, False])
@each("in_part", [False, True])
def test_rotary_embedding(impl: OpImpl, dtype: torch.dtype, head_size: int, neox: bool, in_part: bool) -> None:
    rotary_dim = head_size // 2 if in_part else head_size
    for cache_dtype, inplace, tokens in product({dtype, torch.float32}, (True, False), (1, 7, 64)):
        # Given SGLang's layer, and query and key as slices of one projection
        layer = rotary_layer(head_size, rotary_dim, neox, cache_dtype)
        projected = normal(tokens, 8 * head_size, dtype=dtype)
        query, key = projected[:, : 4 * head_size], projected[:, 4 * head_size : 6 * head_size]
        positions = positions_of(tokens)
        native = [
            turned.view(tokens, heads, head_size)[..., :rotary_dim]
            for turned, heads in zip(layer.forward_native(positions, query, key), (4, 2), strict=True)
        ]

        # Then what the standard signature gets for them is rotated as SGLang does
        cos, sin = layer.cos_sin_cache.chunk(2, -1)
        rotated = (
            query.view(tokens, 4, head_size)[..., :rotary_dim],
            key.view(tokens, 2, head_size)[..., :rotary_dim],
        )
        obj = attributes(layer, "head_size", "rotary_dim", "is_neox_style", "cos_sin_cache")
        assert_equal_to_native(
            impl, tuple(native), obj, *rotated, cos, sin, positions, rotary_interleaved=not neox, inplace=inplace
        )


@of("mrotary_embedding")
@each("dtype", DTYPES)
@pytest.mark.parametrize("form", [f for f in MULTIMODAL_FORMS if not f.glm], ids=lambda form: form.family)
def test_mrotary_embedding(impl: OpImpl, dtype: torch.dtype, form: MultimodalForm) -> None:
    layer = multimodal_layer(form, dtype)
    obj = multimodal_attributes(layer)
    for tokens, shape in product((1, 7, 64), ((3,), ())):
        positions = positions_of(*shape, tokens)
        query, key = (normal(tokens, heads * form.head_size, dtype=dtype, seed=heads) for heads in (4, 2))
        native = layer.forward_native(positions, query.clone(), key.clone())
        assert_equal_to_native(impl, native, obj, positions, query, key)


def multimodal_layer(form: MultimodalForm, dtype: torch.dtype) -> Any:
    """SGLang's own layer."""
    from sglang.srt.layers.rotary_embedding.mrope import MRotaryEmbedding

    return MRotaryEmbedding(
        form.head_size,
        form.rotary_dim,
        MAX_POSITION,
        10_000,
        form.neox,
        dtype,
        mrope_section=list(form.section),
        mrope_interleaved=form.interleaved,
        mrope_interleaved_glm=form.glm,
    )


def multimodal_attributes(layer: Any) -> SimpleNamespace:
    """What the contract names."""
    names = ("head_size", "rotary_dim", "is_neox_style", "cos_sin_cache", "mrope_section", "mrope_interleaved")
    return attributes(layer, *names, "mrope_interleaved_glm", "axis_map")


@of("mrotary_embedding")
def test_the_glm_map_of_axes_is_that_of_sglangs_layer(impl: OpImpl) -> None:
    # Given a layer with a map, which SGLang's kernel follows and its native method does not look at
    form = next(form for form in MULTIMODAL_FORMS if form.glm)
    layer = multimodal_layer(form, torch.float32)
    positions, key = positions_of(3, 7), normal(7, form.head_size)

    # When every pair is rotated by the plain method with the position of its own axis
    own = key.clone()
    for pair, axis in enumerate(layer.axis_map.tolist()):
        plain = rotary_layer(form.head_size, form.rotary_dim, True, torch.float32)
        turned = plain.forward_native(positions[axis], key.clone(), key.clone())[0]
        for column in (pair, pair + form.rotary_dim // 2):
            own[:, column] = turned[:, column]

    # Then that is the result
    assert_equal_to_native(impl, (own, own), multimodal_attributes(layer), positions, key.clone(), key.clone())


TOPK_FORMS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax, as they are": {"renormalize": False},
    "sigmoid": {"scoring_func": "sigmoid"},
    "softmax and bias": {"bias": True},
    "sigmoid and bias": {"scoring_func": "sigmoid", "bias": True, "renormalize": False},
    "groups": {"num_expert_group": 4, "topk_group": 2},
    "groups and bias": {"scoring_func": "sigmoid", "bias": True, "num_expert_group": 4, "topk_group": 2},
    "groups, bias and scaling": {
        "scoring_func": "sigmoid",
        "bias": True,
        "num_expert_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
    },
}


@of("topk")
@each("form", list(TOPK_FORMS))
@each("experts", [8, 60, 128, 256])
@each("tokens", TOKENS)
def test_topk(impl: OpImpl, form: str, experts: int, tokens: int) -> None:
    from sglang.srt.layers.moe.topk import TopK

    # Given SGLang's layer and float32 logits
    options = dict(TOPK_FORMS[form])
    bias = normal(experts, seed=9) if options.pop("bias", False) else None
    top_k, grouped = min(8, experts // 2), "num_expert_group" in options
    layer = TopK(
        top_k,
        use_grouped_topk=grouped,
        correction_bias=bias,
        apply_routed_scaling_factor_on_output="routed_scaling_factor" in options,
        **options,
    )
    logits = normal(tokens, experts)
    if grouped and not tokens:
        with pytest.raises(RuntimeError, match="ambiguous"):
            layer.forward_native(logits, logits)  # SGLang asks for view(0, groups, -1): there is nothing to compare
        return

    # When both choose, then they choose alike, in the same order
    native = layer.forward_native(logits, logits)
    assert_equal_to_native(
        impl, (native.topk_weights, native.topk_ids), layer, logits, top_k, correction_bias=bias, **options
    )


@of("topk")
@each("dtype", [torch.bfloat16, torch.float16])
@each("scoring_func", ["softmax", "sigmoid"])
def test_topk_of_logits_in_the_models_dtype(impl: OpImpl, dtype: torch.dtype, scoring_func: str) -> None:
    from sglang.srt.layers.moe.topk import TopK

    layer = TopK(8, scoring_func=scoring_func)
    logits = normal(64, 128, dtype=dtype)
    native = layer.forward_native(logits, logits)
    assert_equal_to_native(impl, (native.topk_weights, native.topk_ids), layer, logits, 8, scoring_func=scoring_func)


@of("fused_moe")
@each("dtype", DTYPES)
@each("tokens", [1, 7, 64])
@each("activation", ["silu", "gelu"])
@each("biases", [False, True])
def test_fused_moe(impl: OpImpl, dtype: torch.dtype, tokens: int, activation: str, biases: bool) -> None:
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    # Given what SGLang's UnquantizedFusedMoEMethod gives to its native function on the CPU; 60 experts, of which a
    # few tokens leave most without work
    experts, hidden, inner, top_k = 60, 128, 96, 4
    layer = SimpleNamespace(
        num_experts=experts,
        w13_weight=normal(experts, 2 * inner, hidden, dtype=dtype, scale=0.1),
        w2_weight=normal(experts, hidden, inner, dtype=dtype, scale=0.1, seed=11),
        w13_weight_bias=normal(experts, 2 * inner, dtype=dtype) if biases else None,
        w2_weight_bias=normal(experts, hidden, dtype=dtype) if biases else None,
    )
    x = normal(tokens, hidden, dtype=dtype)
    weights, ids = normal(tokens, experts, seed=12).softmax(-1).topk(top_k, -1)
    config = MoeRunnerConfig(activation=activation)
    chosen = StandardTopKOutput(weights, ids.to(torch.int32), normal(tokens, experts))

    # When both compute, then the sums are the same
    native = moe_forward_native(layer, x, chosen, config)
    assert_equal_to_native(
        impl,
        native,
        layer,
        x,
        layer.w13_weight,
        layer.w2_weight,
        weights,
        chosen.topk_ids,
        activation=activation,
        w13_bias=layer.w13_weight_bias,
        w2_bias=layer.w2_weight_bias,
    )


class Operations(TorchDispatchMode):
    """Counts PyTorch's operations, views included."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """How many operations one call takes."""
    with Operations() as operations:
        function(*args, **kwargs)
    return operations.count


def activation_calls(class_name: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """SGLang's call and ours, on the same input."""
    from sglang.srt.layers import activation

    layer, x = getattr(activation, class_name)(), normal(7, 128, dtype=dtype)
    yield (layer.forward_native, x), (layer, x), {}


def norm_calls(class_name: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Without and with residual."""
    from sglang.srt.layers import layernorm

    layer, x = getattr(layernorm, class_name)(128).to(dtype), normal(7, 128, dtype=dtype)
    yield (layer.forward_native, x), (layer, x), {}
    yield (layer.forward_native, x, x.clone()), (layer, x, x.clone()), {}


def rotary_calls(class_name: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Both kinds of pairs, whole and partial heads, in and out of place."""
    for neox, rotary_dim, inplace in product((True, False), (64, 32), (True, False)):
        layer = rotary_layer(64, rotary_dim, neox, torch.float32)
        query, key, positions = normal(7, 256, dtype=dtype), normal(7, 128, dtype=dtype), positions_of(7)
        heads = (x.view(7, -1, 64)[..., :rotary_dim] for x in (query, key))
        ours = (layer, *heads, *layer.cos_sin_cache.chunk(2, -1), positions, not neox, inplace)
        yield (layer.forward_native, positions, query, key), ours, {}


def mrotary_calls(class_name: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Sections and interleaved axes, positions of three axes and plain ones."""
    for form, shape in product(MULTIMODAL_FORMS[:2], ((3, 7), (7,))):
        layer = multimodal_layer(form, dtype)
        query, key = normal(7, 512, dtype=dtype), normal(7, 256, dtype=dtype)
        yield (layer.forward_native, positions_of(*shape), query, key), (layer, positions_of(*shape), query, key), {}


def topk_calls(class_name: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """SGLang's three native functions, without what TopK does around them."""
    from sglang.srt.layers.moe import topk

    x, bias = normal(7, 64), normal(64)
    groups = {"num_expert_group": 4, "topk_group": 2}
    yield (topk.fused_topk_torch_native, x, x, 8, True), (None, x, 8), {}
    yield (topk.grouped_topk_gpu, x, x, 8, True, 4, 2), (None, x, 8), groups
    with_bias = {"scoring_func": "sigmoid", "correction_bias": bias}
    yield (topk.fused_topk_torch_native, x, x, 8, True, bias, "sigmoid"), (None, x, 8), with_bias
    yield (topk.biased_grouped_topk_impl, x, x, bias, 8, True, 4, 2), (None, x, 8), {**groups, **with_bias}


def moe_calls(class_name: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """With few and with many tokens."""
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig

    w13, w2 = normal(8, 64, 32, dtype=dtype), normal(8, 32, 32, dtype=dtype)
    layer = SimpleNamespace(num_experts=8, w13_weight=w13, w2_weight=w2)
    for tokens in (1, 64):
        x = normal(tokens, 32, dtype=dtype)
        weights, ids = normal(tokens, 8).softmax(-1).topk(2, -1)
        native = (moe_forward_native, layer, x, (weights, ids, None), MoeRunnerConfig(activation="silu"))
        yield native, (layer, x, w13, w2, weights, ids), {}


PAIRS: dict[str, tuple[Callable[..., Iterator[tuple[Any, ...]]], str]] = {
    "silu_and_mul": (activation_calls, "SiluAndMul"),
    "gelu_and_mul": (activation_calls, "GeluAndMul"),
    "rms_norm": (norm_calls, "RMSNorm"),
    "gemma_rms_norm": (norm_calls, "GemmaRMSNorm"),
    "rotary_embedding": (rotary_calls, "RotaryEmbedding"),
    "mrotary_embedding": (mrotary_calls, "MRotaryEmbedding"),
    "topk": (topk_calls, "TopK"),
    "fused_moe": (moe_calls, "FusedMoE"),
}


@each("op_name", list(REFERENCE))
@each("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_takes_no_more_operations_than_the_native_method(op_name: str, dtype: torch.dtype) -> None:
    # Given the same call for both (PyTorch's overhead per operation is what small calls cost on a CPU)
    calls, class_name = PAIRS[op_name]
    for native, ours, options in calls(class_name, dtype):
        # Then ours takes as many operations at most
        assert operations_of(REFERENCE[op_name].fn, *ours, **options) <= operations_of(*native)
