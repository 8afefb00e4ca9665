"""Activations, norms and rotary embeddings: SGLang's real layers mean on a bridge what they mean on SGLang's method."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_fl.dispatch import SelectionPolicy
from sglang_fl.sglang_hooks.operators import table
from sglang_fl.sglang_hooks.operators.bridge import Connection, Owner
from tests.unit.bridge_cases import Layer2, layer2, method_of, normal, sglang_ready

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def on() -> Iterator[Layer2]:
    """Layer 2 with the chip first; the chip computes what the reference does."""
    with sglang_ready(), layer2() as layer:
        yield layer


def same(found: Any, expected: Any) -> None:
    """Equal shapes, dtypes and bits, tensor by tensor."""
    found = found if isinstance(found, tuple) else (found,)
    expected = expected if isinstance(expected, tuple) else (expected,)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert torch.equal(one, other), (one - other).abs().max()


def cloned(arguments: dict[str, Any]) -> dict[str, Any]:
    """Copies of tensors, strides kept by value: the implementation may write into its inputs."""
    return {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in arguments.items()}


def both_ways(layer: Any, arguments: dict[str, Any]) -> None:
    """By keyword and by position, SGLang's native method and the layer give the same."""
    expected = layer.forward_native(*cloned(arguments).values())
    same(layer(*cloned(arguments).values()), expected)
    same(layer(**cloned(arguments)), expected)


# ---- signatures ----


def test_every_bridge_has_the_parameters_of_sglangs_methods() -> None:
    """Given the installed SGLang, when the table is compared with it, then each class and both its methods fit."""
    for row in table.TABLE:
        assert hasattr(importlib.import_module(row.module), row.name)
    assert table.misfits() == []


@pytest.mark.parametrize("row", table.TABLE, ids=lambda row: row.name)
def test_the_functions_of_the_bridges_have_the_parameters_of_the_table(row: table.Bridged) -> None:
    """Given a bridge's function, when inspected, then its parameters are those that are compared with SGLang's."""
    importlib.import_module("sglang.srt.layers.layernorm")
    layer: Any = SimpleNamespace(
        head_size=8,
        rotary_dim=8,
        is_neox_style=True,
        mrope_section=None,
        _buffers={},
        _parameters={},
        topk_config=_topk_config(),
        layer_id=0,
        moe_runner_config=SimpleNamespace(activation="silu", apply_router_weight_on_input=False),
    )
    bound: Any = SimpleNamespace(call=SimpleNamespace(fn=None, first=None, after=None))

    def own() -> None:
        pass

    function = row.bridge.make(Connection(Owner(layer), layer, bound, own))
    assert table.parameters_of(function) == ["owner", *row.bridge.parameters]
    assert function.__name__ == "forward", "what unpickling looks up"


def _topk_config() -> Any:
    from sglang.srt.layers.moe.topk import TopKConfig

    return TopKConfig(2)


def test_another_signature_or_a_missing_class_is_a_misfit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given an SGLang whose method has one parameter more, or which lacks a class, when compared, then it is told."""
    from sglang.srt.layers import activation, layernorm

    def forward_cuda(
        self: Any, x: Any, residual: Any = None, post_residual_addition: Any = None, more: int = 1
    ) -> None:
        pass

    monkeypatch.setattr(layernorm.RMSNorm, "forward_cuda", forward_cuda)
    monkeypatch.delattr(activation, "GeluAndMul")
    gone, other = table.misfits()
    assert "activation.GeluAndMul does not exist" in gone
    assert "RMSNorm.forward_cuda has the parameters (x, residual=None, post_residual_addition=None, more=1)" in other


# ---- activations ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 16), (1, 16), (7, 16), (2, 3, 16)], ids=str)
def test_activations(on: Layer2, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Given SiluAndMul and both forms of GeluAndMul, when called, then the operator runs with SGLang's values."""
    from sglang.srt.layers.activation import GeluAndMul, SiluAndMul

    x = normal(*shape, dtype=dtype)
    for layer in (SiluAndMul(), GeluAndMul("tanh"), GeluAndMul("none")):
        both_ways(layer, {"x": x})
        assert on.chip.last()[0][0] is layer
    assert len(on.chip.calls) == 6


def test_an_unknown_gelu_is_sglangs_own_affair(on: Layer2) -> None:
    """Given a form of GELU that the operator lacks, when called, then SGLang's own method refuses it."""
    from sglang.srt.layers.activation import GeluAndMul

    layer = GeluAndMul("fast")
    with pytest.raises(RuntimeError, match="approximate"):
        layer(normal(2, 8))
    assert on.chip.calls == []


# ---- norms ----


def norm(kind: str, **options: Any) -> Any:
    """RMSNorm or GemmaRMSNorm of 16 with a weight of its own."""
    from sglang.srt.layers import layernorm

    layer = getattr(layernorm, kind)(16, **options)
    layer.weight.copy_(normal(16, seed=2))
    return layer


NORMS = ["RMSNorm", "GemmaRMSNorm"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("kind", NORMS)
def test_norms(on: Layer2, kind: str, with_residual: bool, tokens: int, dtype: torch.dtype) -> None:
    """Given rows, none included, with and without a residual, when called, then the operator runs, bit for bit."""
    arguments = {"x": normal(tokens, 16, dtype=dtype)}
    if with_residual:
        arguments["residual"] = normal(tokens, 16, dtype=dtype, seed=8)
    both_ways(norm(kind), arguments)
    assert len(on.chip.calls) == 2


def test_a_strided_input_of_a_norm() -> None:
    """Given a slice of a wider tensor, as of a packed projection, when called, then the values are right."""
    layer = norm("RMSNorm")
    x = normal(5, 48)[:, 16:32]
    assert not x.is_contiguous()
    same(layer(x), layer.forward_native(x.clone()))


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("with_residual", [False, True])
def test_a_third_summand_goes_to_sglangs_own_method(on: Layer2, kind: str, with_residual: bool) -> None:
    """Given post_residual_addition, with a residual (added) and without (ignored), then SGLang's method runs."""
    arguments = {
        "x": normal(3, 16, dtype=torch.bfloat16),
        "residual": normal(3, 16, dtype=torch.bfloat16, seed=8) if with_residual else None,
        "post_residual_addition": normal(3, 16, dtype=torch.bfloat16, seed=9),
    }
    both_ways(norm(kind), arguments)
    assert on.chip.calls == []


@pytest.mark.parametrize("kind", NORMS)
def test_other_dimensions_go_to_sglangs_own_method(on: Layer2, kind: str) -> None:
    """Given one dimension or three, when called, then SGLang's method runs; the next call, of rows, is the chip's."""
    layer = norm(kind)
    for shape in ((16,), (2, 3, 16)):
        both_ways(layer, {"x": normal(*shape)})
    assert on.chip.calls == []
    both_ways(layer, {"x": normal(2, 16)})
    assert len(on.chip.calls) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"var_hidden_size": 8},
        {"cast_x_before_out_mul": True},
        {"fp32_residual": True},
        {"override_orig_dtype": torch.float32},
    ],
    ids=lambda options: next(iter(options)),
)
def test_flags_that_change_the_mathematics_keep_sglangs_own_method(on: Layer2, options: dict[str, Any]) -> None:
    """Given a flag of RMSNorm, when called, then SGLang's method runs for good, with its values."""
    layer = norm("RMSNorm", **options)
    x, residual = normal(3, 16, dtype=torch.bfloat16), normal(3, 16, dtype=torch.bfloat16, seed=8)
    both_ways(layer, {"x": x})
    both_ways(layer, {"x": x, "residual": residual})
    assert on.chip.calls == []
    assert method_of(layer) == "forward_native"


def test_a_norm_without_a_weight_and_one_in_another_dtype(on: Layer2) -> None:
    """Given no weight, or one in float32 beside bfloat16 tokens, when called, then the operator takes it."""
    from sglang.srt.layers.layernorm import RMSNorm

    x = normal(3, 16, dtype=torch.bfloat16)
    for layer in (RMSNorm(16, has_weight=False), norm("RMSNorm", weight_dtype=torch.float32)):
        both_ways(layer, {"x": x})
    assert len(on.chip.calls) == 4


@pytest.mark.parametrize("kind", NORMS)
def test_batch_invariant_mode_is_sglangs_own_whenever_it_is_on(
    on: Layer2, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a bound layer, when the mode goes on and off, then SGLang's method runs exactly while it is on."""
    from sglang.srt.batch_invariant_ops import batch_invariant_ops, is_batch_invariant_mode_enabled

    layer, x = norm(kind), normal(3, 16)
    layer(x)
    monkeypatch.setattr(batch_invariant_ops, "_batch_invariant_MODE", True)
    assert is_batch_invariant_mode_enabled()
    same(layer(x), layer.forward_native(x))
    assert len(on.chip.calls) == 1
    monkeypatch.undo()
    layer(x)
    assert len(on.chip.calls) == 2


# ---- rotary embeddings ----

TOKENS, HEADS, KV_HEADS = 7, 4, 2


def rotary(head_size: int = 16, rotary_dim: int | None = None, is_neox: bool = True, dtype: Any = torch.float32) -> Any:
    """SGLang's RotaryEmbedding."""
    from sglang.srt.layers.rotary_embedding import RotaryEmbedding

    return RotaryEmbedding(head_size, rotary_dim or head_size, 64, 10000, is_neox, dtype)


def tokens_for(layer: Any, dtype: torch.dtype = torch.float32, is_packed: bool = False) -> dict[str, Any]:
    """Positions, query and key; packed: as the slices of one projection, which are strided."""
    size, kv_size = HEADS * layer.head_size, KV_HEADS * layer.head_size
    packed = normal(TOKENS, size + 2 * kv_size, dtype=dtype)
    query, key, _ = packed.split([size, kv_size, kv_size], dim=-1)
    positions = torch.tensor([0, 1, 63, 5, 5, 40, 2])
    if is_packed:
        return {"positions": positions, "query": query, "key": key}
    return {"positions": positions, "query": query.contiguous(), "key": key.contiguous()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_neox", [True, False], ids=["halves", "pairs"])
@pytest.mark.parametrize(("head_size", "rotary_dim"), [(16, 16), (16, 8), (64, 64), (80, 80), (128, 32)])
def test_rotary(on: Layer2, head_size: int, rotary_dim: int, is_neox: bool, dtype: torch.dtype) -> None:
    """Given whole and partial heads, in halves and pairs, when called, then SGLang's values come from the operator."""
    layer = rotary(head_size, rotary_dim, is_neox, dtype)
    cache = layer.cos_sin_cache.clone()
    both_ways(layer, tokens_for(layer, dtype))
    assert len(on.chip.calls) == 2
    (_, query, _, cos, sin, _, is_interleaved, inplace), _ = on.chip.last()
    assert query.shape == (TOKENS, HEADS, rotary_dim)
    assert is_interleaved is not is_neox and inplace is True
    for view in (cos, sin):
        assert view.untyped_storage().data_ptr() == layer.cos_sin_cache.untyped_storage().data_ptr(), "no copy"
    assert torch.equal(layer.cos_sin_cache, cache)


def test_case_34_interleaved_pairs() -> None:
    """Given pairs, x = 1..8 and angles .1 .2 .3 .4, when rotated, then the known values come."""
    layer = rotary(8, is_neox=False)
    angles = torch.tensor([[0.1, 0.2, 0.3, 0.4]])
    layer.cos_sin_cache = torch.cat([angles.cos(), angles.sin()], dim=-1)
    query, _ = layer(torch.tensor([0]), torch.arange(1.0, 9.0).view(1, 8), torch.zeros(1, 8))
    expected = torch.tensor([[0.795, 2.09, 2.146, 4.516, 3.004, 7.21, 3.332, 10.094]])
    torch.testing.assert_close(query, expected, atol=6e-4, rtol=0)


def test_rotary_works_in_place_on_the_slices_of_a_projection() -> None:
    """Given strided query and key, when called, then they are rotated where they are, and what lies beside stays."""
    layer = rotary()
    arguments = tokens_for(layer, is_packed=True)
    expected = layer.forward_native(**cloned(arguments))
    packed = arguments["query"]._base
    value = packed[:, -KV_HEADS * 16 :].clone()
    query, key = layer(**arguments)
    assert query is arguments["query"] and key is arguments["key"]
    same((query, key), expected)
    assert torch.equal(packed[:, -KV_HEADS * 16 :], value)


def test_rotary_takes_heads_as_a_dimension_and_offsets() -> None:
    """Given query and key of three dimensions, then with offsets, when called, then SGLang's values come."""
    layer = rotary()
    arguments = tokens_for(layer)
    heads = {name: v if v.ndim == 1 else v.view(TOKENS, -1, 16) for name, v in arguments.items()}
    both_ways(layer, heads)
    arguments["positions"] = arguments["positions"] // 2
    both_ways(layer, {**arguments, "offsets": torch.arange(TOKENS)})


def test_rotary_of_no_token() -> None:
    """Given no token, when called, then query and key come back, where SGLang's own view of them would fail."""
    query, key = torch.empty(0, 64), torch.empty(0, 32)
    result = rotary()(torch.empty(0, dtype=torch.int64), query, key)
    assert result[0] is query and result[1] is key


class Own:
    """A method of SGLang's in the place of the platform's, which takes notes."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        """Note the call."""
        self.calls.append((*args, *kwargs.values()))
        return "own"


def with_own(name: str, monkeypatch: pytest.MonkeyPatch) -> Own:
    """Let the native method of a rotary class be one that takes notes, before a layer is made."""
    from sglang.srt.layers import rotary_embedding

    own = Own()
    monkeypatch.setattr(getattr(rotary_embedding, name), "forward_native", lambda self, *a, **k: own(*a, **k))
    return own


def test_what_the_rotary_operator_lacks_goes_to_sglang_unchanged(on: Layer2, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a KV buffer to fill, positions of two dimensions, or picked angles, then SGLang's method gets the call."""
    own = with_own("RotaryEmbedding", monkeypatch)
    layer = rotary()
    positions, query, key = tokens_for(layer).values()
    assert layer(positions, query, key, fused_set_kv_buffer_arg="arg") == "own"
    assert own.calls[-1] == (positions, query, key, None, "arg")
    assert layer(positions.view(1, -1), query, key) == "own"
    layer.sin_cos_cache = torch.zeros(TOKENS, 16)
    assert layer(positions, query, key) == "own"
    assert on.chip.calls == []
    del layer.sin_cos_cache
    layer(positions, query, key)
    assert on.chip.called("rotary_embedding") == 1


def test_the_cache_is_followed_and_never_converted(on: Layer2, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a cache that grows, then one in a dtype of neither kind, when called, then it is used or SGLang decides."""
    layer = rotary()
    arguments = tokens_for(layer)
    both_ways(layer, arguments)
    layer._ensure_cos_sin_cache_length(200)
    arguments["positions"] = torch.full((TOKENS,), 190)
    both_ways(layer, arguments)
    (_, _, _, cos, *_), _ = on.chip.last()
    assert cos.shape[0] == layer.cos_sin_cache.shape[0] > 64
    first = cos
    layer(**cloned(arguments))
    assert on.chip.last()[0][3] is first, "views are taken once for a cache"
    both_ways(layer, {**arguments, "query": arguments["query"].bfloat16(), "key": arguments["key"].bfloat16()})
    calls = len(on.chip.calls)
    assert layer.cos_sin_cache.dtype is torch.float32
    layer.cos_sin_cache = layer.cos_sin_cache.bfloat16()
    both_ways(layer, {**arguments, "query": arguments["query"].half(), "key": arguments["key"].half()})
    assert len(on.chip.calls) == calls
    assert layer.cos_sin_cache.dtype is torch.bfloat16


def test_an_implementation_that_returns_other_tensors_is_as_right(on: Layer2, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a vendor that does not work in place, when called, then query and key hold its result."""
    from sglang_fl.dispatch.backends.reference.impl import rotary as reference

    layer = rotary(16, 8)
    arguments = tokens_for(layer)
    expected = layer.forward_native(**cloned(arguments))
    impl = on.manager.registry.implementations("rotary_embedding")[0]

    def out_of_place(*args: Any) -> Any:
        return reference.rotary_embedding(*args[:-1], inplace=False)

    object.__setattr__(impl, "fn", out_of_place)
    query, key = layer(**arguments)
    assert query is arguments["query"] and key is arguments["key"]
    same((query, key), expected)


def test_variants_that_compute_their_cache_in_another_way(on: Layer2) -> None:
    """Given linear, NTK, YaRN and Llama 3 scaling, when called, then the operator gives SGLang's values."""
    from sglang.srt.layers.rotary_embedding.base import LinearScalingRotaryEmbedding
    from sglang.srt.layers.rotary_embedding.rope_variant import (
        DynamicNTKScalingRotaryEmbedding,
        Llama3RotaryEmbedding,
    )
    from sglang.srt.layers.rotary_embedding.yarn import YaRNScalingRotaryEmbedding

    common = (16, 16, 64, 10000, True)
    layers = [
        LinearScalingRotaryEmbedding(*common, [1.0, 2.0], torch.float32),
        DynamicNTKScalingRotaryEmbedding(*common, 2.0, torch.float32),
        YaRNScalingRotaryEmbedding(*common, 2.0, torch.float32),
        Llama3RotaryEmbedding(*common, torch.float32, 8.0, 1.0, 4.0, 32),
    ]
    for layer in layers:
        both_ways(layer, tokens_for(layer))
    assert len(on.chip.calls) == 2 * len(layers)


def mrotary(**options: Any) -> Any:
    """SGLang's MRotaryEmbedding with 3, 3 and 2 pairs."""
    from sglang.srt.layers.rotary_embedding import MRotaryEmbedding

    return MRotaryEmbedding(16, 16, 64, 10000, True, torch.float32, **{"mrope_section": [3, 3, 2], **options})


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dimensions", [1, 2])
def test_mrotary(on: Layer2, interleaved: bool, dimensions: int) -> None:
    """Given text and image positions, when called, then the operator gives SGLang's values."""
    layer = mrotary(mrope_interleaved=interleaved)
    arguments = tokens_for(layer)
    if dimensions == 2:
        arguments["positions"] = torch.stack([arguments["positions"], torch.arange(TOKENS), torch.arange(TOKENS) + 9])
    both_ways(layer, arguments)
    assert on.chip.called("mrotary_embedding") == 2


def test_mrotary_in_its_yarn_form(on: Layer2) -> None:
    """Given YaRN scaling, when called, then the operator gives SGLang's values."""
    from sglang.srt.layers.rotary_embedding.mrope import YaRNScalingMRotaryEmbedding

    layer = YaRNScalingMRotaryEmbedding(16, 16, 64, 10000, True, 2, torch.float32, mrope_section=[3, 3, 2])
    arguments = tokens_for(layer)
    arguments["positions"] = arguments["positions"].expand(3, -1)
    both_ways(layer, arguments)
    assert on.chip.called("mrotary_embedding") == 2


def test_what_the_mrotary_operator_lacks_goes_to_sglang(on: Layer2, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a KV buffer, heads as a dimension, or image positions without sections, then SGLang's method gets it."""
    own = with_own("MRotaryEmbedding", monkeypatch)
    layer, plain = mrotary(), mrotary(mrope_section=None)
    positions, query, key = tokens_for(layer).values()
    assert layer(positions, query, key, fused_set_kv_buffer_arg="arg") == "own"
    assert own.calls[-1] == (positions, query, key, "arg")
    assert layer(positions, query.view(TOKENS, HEADS, 16), key) == "own"
    assert plain(positions.expand(3, -1), query, key) == "own"
    assert on.chip.calls == []


def test_a_planted_error_is_seen_by_these_comparisons(on: Layer2) -> None:
    """Given a chip that is one per cent off, when compared, then the comparison of this file fails."""
    layer = norm("RMSNorm")
    on.chip.scale = 1.01
    with pytest.raises(AssertionError):
        both_ways(layer, {"x": normal(2, 16)})


def test_reference_first_gives_the_same(on: Layer2) -> None:
    """Given another order in a context, when a layer is bound there, then that implementation runs."""
    from sglang_fl.dispatch import policy_context

    layer = norm("RMSNorm")
    with policy_context(SelectionPolicy(prefer="reference")):
        both_ways(layer, {"x": normal(2, 16)})
    assert on.chip.calls == []
