"""Hooks: the signature of what they wrap, checked against the installed SGLang, and proof that they are live."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from sglang_fl.comm.errors import AgreementError
from sglang_fl.sglang_hooks.coordinator import METHOD_HOOKS
from sglang_fl.sglang_hooks.groups import compare
from sglang_fl.sglang_hooks.registration import Hook, HookKind, Propagation, dead, foreign, misfits, register


class Target:
    """Something to hook."""

    def method(self, a: int, b: int = 2) -> int:
        """Add."""
        return a + b


@pytest.fixture
def target() -> Iterator[ModuleType]:
    """A module of its own with something to hook, and SGLang's registry empty before and after."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    module = ModuleType("hook_target")
    module.Target = type("Target", (), {"method": Target.method})  # type: ignore[attr-defined]
    exec("def free(a): return a", vars(module))  # a function that only this module holds
    sys.modules["hook_target"] = module
    kept = (dict(HookRegistry._hooks), set(HookRegistry._patched))
    HookRegistry.reset()
    yield module
    HookRegistry.reset()
    HookRegistry._hooks.update(kept[0])
    HookRegistry._patched.update(kept[1])
    del sys.modules["hook_target"]


def around(original: Any, self: Any, a: int, b: int = 2) -> int:
    """Ten times the original."""
    result: int = 10 * original(self, a, b)
    return result


THIS = sys.modules[__name__]
METHOD = Hook("hook_target.Target.method", around)
FREE = Hook("hook_target.free", lambda original, a: 10 * original(a))


@pytest.fixture
def importers() -> Iterator[list[ModuleType]]:
    """Two modules that will have imported something to hook, one of them under two names."""
    modules = [ModuleType(f"hook_importer_{number}") for number in range(2)]
    sys.modules.update({module.__name__: module for module in modules})
    yield modules
    for module in modules:
        del sys.modules[module.__name__]


@pytest.fixture
def own_propagation(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's, in its place before and after."""
    from sglang.srt.plugins import hook_registry

    while isinstance(hook_registry._propagate_patch, Propagation):
        monkeypatch.setattr(hook_registry, "_propagate_patch", hook_registry._propagate_patch._own)
    own = hook_registry._propagate_patch
    monkeypatch.setattr(hook_registry, "_propagate_patch", own)
    return own


def apply() -> None:
    """What SGLang does after its plugins have been executed."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_hook_reaches_every_module_that_has_imported_its_target(
    target: ModuleType, importers: list[ModuleType], own_propagation: Any, is_ours: bool
) -> None:
    """Given importers of a function, when a hook of ours or another's on it is applied, then all have the hooked one,
    as with SGLang's own way."""
    from sglang.srt.plugins import hook_registry
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    first, second = importers
    vars(first).update(free=target.free, alias=target.free)
    vars(second).update(free=target.free, other=len)
    if is_ours:
        register([FREE])
    else:
        register([METHOD])
        HookRegistry.register(FREE.target, FREE.function, HookType.AROUND)
    assert isinstance(hook_registry._propagate_patch, Propagation)
    apply()
    assert [first.free(3), first.alias(3), second.free(3), target.free(3)] == [30, 30, 30, 30]
    assert second.other is len


def test_propagation_counts_what_sglang_counts_and_looks_again_where_modules_came_in(
    target: ModuleType, importers: list[ModuleType], own_propagation: Any
) -> None:
    """Given one importer and, after a first call, another, then each call changes as many names as SGLang's would."""

    def hooked(a: int) -> int:
        return a

    first, second = importers
    original = target.free
    ours = Propagation(own_propagation, ["hook_target.free", "hook_target.gone", "no_such_module.free"])
    counts = []
    for propagate in (own_propagation, ours):
        vars(first).update(free=original, alias=original)
        counts.append(propagate(original, hooked, target))
        assert first.free is first.alias is hooked
        # The module itself is set by SGLang, not by this.
        assert target.free is original
    assert counts == [2, 2]
    late = ModuleType("hook_importer_2")
    vars(late).update(free=original)
    sys.modules["hook_importer_2"] = late
    try:
        assert ours(original, hooked, target) == 1 and late.free is hooked
    finally:
        del sys.modules["hook_importer_2"]
    vars(second).update(other=around)
    sys.modules.pop(__name__)  # which has it as well, and keeps it
    try:
        # Not wanted here: SGLang's own does it.
        assert ours(around, hooked, target) == 1 and second.other is hooked
    finally:
        sys.modules[__name__] = THIS


def test_an_sglang_that_propagates_otherwise_is_left_alone(target: ModuleType, own_propagation: Any) -> None:
    """Given a registry without that function, or with other parameters, then nothing of it is replaced."""
    bare, other = ModuleType("bare"), ModuleType("other")
    exec("def _propagate_patch(original, wrapped): return 0", vars(other))
    function = other._propagate_patch
    for module in (bare, other):
        Propagation.install(module, ["hook_target.free"])
    assert not hasattr(bare, "_propagate_patch") and other._propagate_patch is function


def test_every_hook_has_the_signature_of_what_it_wraps() -> None:
    """Given the installed SGLang, when the hooks on GroupCoordinator are compared with it, then all fit."""
    assert misfits(METHOD_HOOKS) == []


def test_a_missing_target_and_other_parameters_are_misfits(target: ModuleType) -> None:
    """Given a target that is gone, or has other parameters or defaults, when checked, then each is named."""
    assert misfits([METHOD]) == []
    gone = Hook("hook_target.Target.removed", around)

    def other_default(original: Any, self: Any, a: int, b: int = 3) -> None:
        pass

    def one_less(original: Any, self: Any, a: int) -> None:
        pass

    problems = misfits([gone, replace(METHOD, function=other_default), replace(METHOD, function=one_less)])
    assert len(problems) == 3
    assert "removed does not exist" in problems[0]
    assert "(self, a, b=2), the plugin knows (self, a, b=3)" in problems[1]
    assert "(self, a, b=2), the plugin knows (self, a)" in problems[2]


def test_a_live_hook_is_found_beneath_another_plugins(target: ModuleType) -> None:
    """Given our hook and another plugin's around it, when checked by identity, then ours is live."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    register([METHOD])
    assert dead([METHOD]) == ["hook_target.Target.method: SGLang did not apply the hook"]
    HookRegistry.register(METHOD.target, lambda original, *a, **k: original(*a, **k), HookType.AROUND)
    apply()
    assert dead([METHOD]) == []
    assert target.Target().method(1, b=4) == 50


def test_other_plugins_hooks_around_and_beneath_ours_are_named(target: ModuleType) -> None:
    """Given hooks of others before and after ours, when reported, then each is named with what it does to calls."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def before_us(original: Any, *arguments: Any) -> Any:
        return original(*arguments)

    def after_us(original: Any, *arguments: Any) -> Any:
        return original(*arguments)

    HookRegistry.register(METHOD.target, before_us, HookType.AROUND)
    register([METHOD])
    assert foreign([METHOD]) == []
    HookRegistry.register(METHOD.target, after_us, HookType.AROUND)
    apply()
    around, beneath = foreign([METHOD])
    assert "after_us lies around ours" in around
    assert "before_us lies beneath ours and is not reached" in beneath


def test_two_hooks_of_ours_on_one_target_are_not_another_plugins(target: ModuleType) -> None:
    """Given two of our hooks on one target, when others' hooks are looked for, then there are none."""

    def first(self: Any, a: int, b: int = 2) -> None:
        pass

    both = [METHOD, Hook(METHOD.target, first, HookKind.BEFORE)]
    register(both)
    apply()
    assert dead(both) == []
    assert foreign(both) == []


def test_a_hook_that_was_taken_away_again_is_dead(target: ModuleType) -> None:
    """Given a live hook, when something puts the original back, then the hook is reported dead."""
    register([METHOD])
    apply()
    target.Target.method = Target.method
    assert dead([METHOD]) == ["hook_target.Target.method: SGLang did not apply the hook"]


def test_a_binding_made_before_the_plugin_loaded_is_live_too(
    target: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a module that imported the function earlier, when hooked, then its name is hooked; else it is named."""
    original = target.free
    early = ModuleType("early_importer")
    early.alias = original  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "early_importer", early)

    def after(result: int, a: int) -> int:
        return result + 100

    hook = Hook("hook_target.free", after, HookKind.AFTER)
    register([hook])
    apply()
    assert early.alias(1) == 101
    assert dead([hook]) == []
    early.alias = original  # type: ignore[attr-defined]
    assert dead([hook]) == ["hook_target.free: early_importer.alias is still the unhooked function"]


def test_ranks_that_differ_are_named_with_the_field() -> None:
    """Given three ranks of which one differs in one field, when compared, then rank and field are named."""
    same = {"comm.backend": "torch", "version of torch": "2.11.0"}
    compare([same, dict(same), dict(same)])
    with pytest.raises(
        AgreementError, match=r"comm.backend is 'torch' on rank\(s\) \[0, 2\], 'auto' on rank\(s\) \[1\]"
    ):
        compare([same, {**same, "comm.backend": "auto"}, same])


def test_what_only_some_ranks_have_is_not_compared() -> None:
    """Given groups that only some ranks belong to, when compared, then their choices do not disturb the others."""
    compare([{"backend of pp:0 [0, 2]": "torch"}, {"backend of pp:0 [1, 3]": "flagcx"}])
