"""Binding: decided once, at a layer's first call, for that layer alone, and it survives what SGLang does afterwards."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_fl.dispatch import SelectionPolicy
from sglang_fl.selection import SelectionError
from sglang_fl.sglang_hooks.operators.lists import ClassLists, unknown_class_names
from tests.unit.bridge_cases import VENDOR, layer2, method_of, normal, settings, sglang_ready


@pytest.fixture(autouse=True)
def _ready() -> Iterator[None]:
    with sglang_ready():
        yield


def rms_norm(**options: Any) -> Any:
    """SGLang's layer, with a weight that is no one."""
    from sglang.srt.layers.layernorm import RMSNorm

    layer = RMSNorm(8, **options)
    layer.weight.copy_(normal(8, seed=3))
    return layer


def test_the_first_call_binds_and_later_ones_only_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a new layer, when it is called three times, then it selected once, and the implementation ran thrice."""
    with layer2() as on:
        layer = rms_norm()
        selected = []
        select = on.manager.select
        monkeypatch.setattr(on.manager, "select", lambda *a, **k: (selected.append(a[0]), select(*a, **k))[1])
        assert selected == []
        for _ in range(3):
            layer(normal(2, 8))
        assert selected == ["rms_norm"]
        assert on.chip.called("rms_norm") == 3
        assert method_of(layer) == "bridge"


def test_what_sglang_sets_after_its_dispatch_counts() -> None:
    """Given a flag that is set after the constructor, when first called, then the layer keeps SGLang's own method."""
    with layer2() as on:
        layer = rms_norm()
        layer.variance_size_override = 4
        result = layer(normal(2, 8))
        assert on.chip.calls == []
        assert method_of(layer) == "forward_native"
        assert torch.equal(result, layer.forward_native(normal(2, 8)))


def test_a_constructor_that_names_its_method_after_the_dispatch_wins() -> None:
    """Given an RL target, when SGLang's constructors put forward_native in, then no bridge takes it away."""
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.rotary_embedding import MRotaryEmbedding

    with sglang_ready(rl_on_policy_target="fsdp") as arguments, layer2() as on:
        layer, norm = SiluAndMul(), rms_norm()
        assert arguments.rl_on_policy_target == "fsdp"
        assert method_of(layer) == "forward_native"
        layer(normal(2, 8))
        norm(normal(2, 8))
        assert method_of(norm) == "forward_native"
        assert on.chip.calls == []
        assert "self._forward_method = self.forward_native" in _source(MRotaryEmbedding)


def _source(cls: type) -> str:
    import inspect

    return inspect.getsource(cls.__init__)  # type: ignore[misc]


@pytest.mark.parametrize("is_called_before", [True, False])
def test_a_compiled_layer_gets_its_binding_back(is_called_before: bool) -> None:
    """Given a layer, when SGLang compiles it and stops, then it runs natively meanwhile, and bound afterwards."""
    with layer2() as on:
        layer, x = rms_norm(), normal(2, 8)
        if is_called_before:
            layer(x)
        layer.enter_torch_compile(1)
        calls = len(on.chip.calls)
        layer(x)
        assert method_of(layer) == "forward_native"
        assert len(on.chip.calls) == calls
        layer.leave_torch_compile()
        layer(x)
        assert method_of(layer) == "bridge"
        assert len(on.chip.calls) == calls + 1


def test_a_layer_that_is_first_called_while_compiled_is_bound_after_it_too() -> None:
    """Given TopK, which SGLang leaves as it is for several tokens, when first called so, then both places are bound."""
    from sglang.srt.layers.moe.topk import TopK

    with layer2() as on:
        layer = TopK(2, layer_id=0)
        layer.enter_torch_compile(4)
        layer(normal(4, 8), normal(4, 8))
        assert layer._original_forward_method is layer._forward_method
        layer.leave_torch_compile()
        layer(normal(4, 8), normal(4, 8))
        assert on.chip.called("topk") == 2


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@pytest.mark.parametrize("is_called_before", [True, False])
def test_a_copy_is_a_layer_of_its_own(way: str, is_called_before: bool) -> None:
    """Given a layer, bound or not, when it is copied and the copy changed, then each has its own values and binding."""
    x = normal(2, 8)
    with layer2() as on:
        layer = rms_norm()
        if is_called_before:
            layer(x)
        twin = copy.deepcopy(layer) if way == "deepcopy" else pickle.loads(pickle.dumps(layer))
        twin.weight.copy_(normal(8, seed=4))
        assert torch.equal(twin(x), twin.forward_native(x))
        assert torch.equal(layer(x), layer.forward_native(x))
        assert not torch.equal(twin(x), layer(x))
        assert {id(args[0]) for _, args, _ in on.chip.calls} == {id(layer), id(twin)}


def test_a_copy_of_a_rotary_layer_follows_its_own_cache() -> None:
    """Given a rotary layer whose views are taken, when a copy gets another cache, then neither uses the other's."""
    from sglang.srt.layers.rotary_embedding import RotaryEmbedding

    positions, query, key = torch.tensor([3, 5]), normal(2, 16), normal(2, 8)
    with layer2():
        layer = RotaryEmbedding(8, 8, 16, 10000, True, torch.float32)
        layer(positions, query.clone(), key.clone())
        twin = copy.deepcopy(layer)
        twin.cos_sin_cache = layer.cos_sin_cache.flip(0).contiguous()
        for each in (layer, twin, layer):
            expected = each.forward_native(positions, query, key)
            assert torch.equal(each(positions, query.clone(), key.clone())[0], expected[0])


def test_a_layer_whose_weight_or_dtype_changes_gives_the_new_values() -> None:
    """Given a bound layer, when its weight is replaced, or it gets another dtype, then its values follow."""
    with layer2() as on:
        layer = rms_norm()
        layer(normal(2, 8))
        layer.weight = torch.nn.Parameter(normal(8, seed=9))
        assert torch.equal(layer(normal(2, 8)), layer.forward_native(normal(2, 8)))
        layer.to(torch.bfloat16)
        x = normal(2, 8, dtype=torch.bfloat16)
        assert torch.equal(layer(x), layer.forward_native(x))
        assert on.chip.called("rms_norm") == 3


@pytest.mark.parametrize("method", ["forward_native", "forward_cuda", "forward"])
def test_a_subclass_with_a_method_of_its_own_keeps_it(method: str) -> None:
    """Given a subclass that overrides a method behind forward, or forward, then no bridge is put before it."""
    from sglang.srt.layers.layernorm import RMSNorm

    def own(self: Any, x: torch.Tensor, *_: Any) -> torch.Tensor:
        return x + 1

    with layer2() as on:
        plain = type("Plain", (RMSNorm,), {})(8)
        other = type("Other", (RMSNorm,), {method: own})(8)
        assert method_of(plain) == "bridge"
        assert method_of(other) != "bridge"
        other(normal(2, 8))
        assert on.chip.calls == []


def test_sglangs_own_variants_are_bridged_or_not_as_they_should() -> None:
    """Given SGLang's subclasses, when looked up, then those that only compute a cache are bridged, the others not."""
    from sglang.srt.layers.layernorm import Gemma3RMSNorm, LayerNorm
    from sglang.srt.layers.rotary_embedding import base, rope_variant, yarn
    from sglang.srt.layers.rotary_embedding.mrope import Ernie4_5_VLRotaryEmbedding, YaRNScalingMRotaryEmbedding

    lists = ClassLists()
    for cls in (
        base.LinearScalingRotaryEmbedding,
        yarn.YaRNScalingRotaryEmbedding,
        rope_variant.DynamicNTKScalingRotaryEmbedding,
        rope_variant.DynamicNTKAlphaRotaryEmbedding,
        rope_variant.Llama3RotaryEmbedding,
        rope_variant.Gemma4RotaryEmbedding,
    ):
        row = lists.bridge_of(cls)
        assert row is not None and row.name == "RotaryEmbedding", cls
    row = lists.bridge_of(YaRNScalingMRotaryEmbedding)
    assert row is not None and row.name == "MRotaryEmbedding"
    for cls in (
        Ernie4_5_VLRotaryEmbedding,
        rope_variant.DeepseekScalingRotaryEmbedding,
        rope_variant.Llama4VisionRotaryEmbedding,
        Gemma3RMSNorm,
        LayerNorm,
    ):
        assert lists.bridge_of(cls) is None, cls


@pytest.mark.parametrize(
    ("lists", "bridged"),
    [
        (ClassLists(), True),
        (ClassLists(frozenset({"RotaryEmbedding"})), False),
        (ClassLists(frozenset({"MRotaryEmbedding"})), False),
        (ClassLists(frozenset({"RMSNorm"})), True),
        (ClassLists(whitelist=frozenset({"RotaryEmbedding"})), True),
        (ClassLists(whitelist=frozenset({"MRotaryEmbedding", "RMSNorm"})), True),
        (ClassLists(whitelist=frozenset({"RMSNorm"})), False),
    ],
)
def test_lists_hold_for_a_class_and_what_derives_from_it(lists: ClassLists, bridged: bool) -> None:
    """Given a list that names a class or an ancestor of it, then it decides, and off means SGLang's own, unlogged."""
    from sglang.srt.layers.rotary_embedding import MRotaryEmbedding

    with layer2(lists=lists) as on:
        layer = MRotaryEmbedding(8, 8, 16, 10000, True, torch.float32, mrope_section=[2, 1, 1])
        layer(torch.tensor([1, 2]), normal(2, 16), normal(2, 8))
        assert method_of(layer) == ("bridge" if bridged else "forward_native")
        assert bool(on.chip.calls) is bridged


def test_what_the_lists_leave_of_the_table() -> None:
    """Given lists, when asked what is left, then a list that names an ancestor counts, and nothing left is nothing."""
    names = [row.name for row in ClassLists(frozenset({"RotaryEmbedding", "TopK"})).rows()]
    assert names == ["SiluAndMul", "GeluAndMul", "RMSNorm", "GemmaRMSNorm", "UnquantizedFusedMoEMethod"]
    only = ClassLists(whitelist=frozenset({"Llama3RotaryEmbedding"})).rows()
    assert [row.name for row in only] == ["RotaryEmbedding"]
    assert ClassLists(frozenset({"MultiPlatformOp"})).rows() == ()


def test_an_unknown_class_is_reported_with_a_suggestion() -> None:
    """Given lists with a typo and with names that are right, when checked, then only the typo is told, and what for."""
    (line,) = unknown_class_names(settings(SGLANG_FL_OOT_BLACKLIST="RMSNrom,Llama3RotaryEmbedding,TopK"))
    assert "RMSNrom" in line and "Did you mean 'RMSNorm'?" in line and "SGLANG_FL_OOT_BLACKLIST" in line


def test_a_dispatch_log_line_per_class_and_none_for_what_is_left_to_sglang(tmp_path: Path) -> None:
    """Given a log file and a blacklisted class, when layers run, then exactly the promised lines are written."""
    from sglang.srt.layers.activation import SiluAndMul

    log = tmp_path / "dispatch.log"
    lists = ClassLists(frozenset({"SiluAndMul"}))
    with layer2(lists=lists, SGLANG_FL_DISPATCH_LOG=str(log)):
        SiluAndMul()(normal(2, 8))
        for _ in range(2):
            rms_norm()(normal(2, 8))
        rms_norm(cast_x_before_out_mul=True)(normal(2, 8))
    assert log.read_text() == f"[OOT-DISPATCH] RMSNorm → vendor(vendor.{VENDOR})\n"


def test_a_class_is_reported_once_with_the_choice_and_the_reasons(caplog: pytest.LogCaptureFixture) -> None:
    """Given two layers of a class and one with a flag, when they run, then one line tells each outcome."""
    caplog.set_level(logging.INFO, "sglang_fl")
    with layer2():
        for layer in (rms_norm(), rms_norm(), rms_norm(fp32_residual=True), rms_norm(fp32_residual=True)):
            layer(normal(2, 8))
            layer(normal(2, 8))
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        f"[sglang_fl] RMSNorm: rms_norm is vendor.{VENDOR}; not reference: available, but vendor.{VENDOR} comes first",
        "[sglang_fl] RMSNorm: SGLang's own method: fp32_residual is True",
    ]


OWN = {"platform": "cuda", "has_kernels": True}


def test_sglangs_own_method_is_a_vendor_where_it_has_kernels(tmp_path: Path) -> None:
    """Given a platform with kernels and no better vendor, when vendor is asked for, then the layer keeps its method."""
    log = tmp_path / "dispatch.log"
    order = SelectionPolicy(per_op_order={"rms_norm": ("vendor:cuda", "reference")})
    with layer2(order, **OWN, SGLANG_FL_DISPATCH_LOG=str(log)) as on:  # type: ignore[arg-type]
        layer = rms_norm()
        layer(normal(2, 8))
        assert method_of(layer) == "forward_native"
        assert layer._forward_method.__self__ is layer
        assert on.chip.calls == []
    assert log.read_text() == "[OOT-DISPATCH] RMSNorm → vendor(vendor.nvidia)\n"


@pytest.mark.parametrize("lacking", [{"platform": "cpu", "has_kernels": False}, {"platform": "cuda"}])
def test_without_kernels_it_is_none_and_nothing_left_says_so(lacking: dict[str, Any]) -> None:
    """Given a CPU, or CUDA with the stand-in only, when only that vendor may run, then the seeds' message comes."""
    order = SelectionPolicy(per_op_order={"rms_norm": ("vendor:nvidia",)})
    with layer2(order, **lacking):
        layer = rms_norm()
        for _ in range(2):
            with pytest.raises(SelectionError, match=r"^No available implementation for rms_norm"):
                layer(normal(2, 8))


def test_a_denied_vendor_takes_sglangs_own_method_with_it() -> None:
    """Given deny_vendors=cuda, when the order names its vendor first, then the next one runs."""
    order = SelectionPolicy(per_op_order={"rms_norm": ("vendor:nvidia", "reference")}, deny_vendors=frozenset({"cuda"}))
    with layer2(order, **OWN):  # type: ignore[arg-type]
        layer = rms_norm()
        layer(normal(2, 8))
        assert method_of(layer) == "bridge"


def test_a_call_that_is_refused_goes_to_sglangs_own_method_with_sglangs_arguments() -> None:
    """Given a chip that refuses a call and SGLang's method next, when called, then that runs, and nothing is lost."""
    from sglang.srt.layers.activation import SiluAndMul

    order = SelectionPolicy(prefer="vendor")
    with layer2(order, **OWN) as on:  # type: ignore[arg-type]
        on.chip.refuses |= {"rms_norm", "silu_and_mul"}
        norm, activation = rms_norm(), SiluAndMul()
        x, residual = normal(2, 8), normal(2, 8, seed=8)
        result = norm(x.clone(), residual.clone())
        expected = norm.forward_native(x, residual)
        assert torch.equal(result[0], expected[0]) and torch.equal(result[1], expected[1])
        assert torch.equal(activation(x), activation.forward_native(x))
        assert on.chip.calls == []
        assert method_of(norm) == "bridge"


def test_the_next_implementation_gets_what_the_first_refuses() -> None:
    """Given a chip that refuses and no method of SGLang's own, when called, then the reference's values come."""
    with layer2() as on:
        on.chip.refuses.add("rms_norm")
        layer = rms_norm()
        assert torch.equal(layer(normal(2, 8)), layer.forward_native(normal(2, 8)))
        on.chip.refuses.clear()
        layer(normal(2, 8))
        assert on.chip.called("rms_norm") == 1, "one refused call marks nothing as bad"


def test_strict_raises_the_error_unchanged_and_calls_nobody_else() -> None:
    """Given strict and a chip that raises, when called, then that very error comes, with a note of who it was."""
    error = ArithmeticError("planted")
    with layer2(SelectionPolicy(prefer="vendor", strict=True), **OWN) as on:  # type: ignore[arg-type]
        on.chip.fails["rms_norm"] = error
        layer = rms_norm()
        with pytest.raises(ArithmeticError) as caught:
            layer(normal(2, 8))
        assert caught.value is error
        assert on.chip.called("rms_norm") == 1
