"""The operators' policy: from settings and by hand, with a vendor's aliases, for the process and in one context."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import pickle
import threading
from collections.abc import Iterator
from enum import Enum
from typing import Any

import pytest

from sglang_fl.config import BackendKind, load_settings
from sglang_fl.dispatch import (
    BackendImplKind,
    NotSupportedError,
    SelectionPolicy,
    call_op,
    configure,
    current_policy,
    policy,
    policy_context,
    resolve_op,
    set_manager,
)
from sglang_fl.selection import Kind, SelectionError
from tests.unit.dispatch_cases import Counted, manager_of, raised

REFERENCE_FIRST = SelectionPolicy(prefer="reference")


@pytest.fixture(autouse=True)
def own_process_state() -> Iterator[None]:
    """Each test configures the process by itself; afterwards it is as before."""
    before = (policy._settings, policy._process_policy)
    configure(load_settings({}))
    yield
    policy._settings, policy._process_policy = before
    set_manager(None)


def chosen(order: SelectionPolicy, *implementations: Counted) -> str:
    """The implementation that the policy chooses."""
    candidate = manager_of(*implementations).select("silu_and_mul", policy=order).chosen
    assert candidate is not None
    return candidate.impl_id


FLAGOS, REFERENCE = Counted("flagos"), Counted("reference")
NVIDIA, ACME = Counted("vendor.nvidia"), Counted("vendor.acme")
EVERYTHING = (REFERENCE, NVIDIA, FLAGOS, ACME)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "flagos"),
        ({"SGLANG_FL_PREFER": "reference"}, "reference"),
        ({"SGLANG_FL_PREFER": "vendor"}, "vendor.acme"),
        ({"SGLANG_FL_PREFER": "vendor", "SGLANG_FL_DENY_VENDORS": "acme"}, "vendor.nvidia"),
        ({"SGLANG_FL_PREFER": "vendor", "SGLANG_FL_ALLOW_VENDORS": "cuda"}, "vendor.nvidia"),
        ({"SGLANG_FL_PREFER": "vendor", "SGLANG_FL_ALLOW_VENDORS": "nvidia"}, "vendor.nvidia"),
        ({"SGLANG_FL_PREFER": "vendor", "SGLANG_FL_DENY_VENDORS": "acme,cuda"}, "flagos"),
        (
            {
                "SGLANG_FL_PREFER": "vendor",
                "SGLANG_FL_ALLOW_VENDORS": "cuda,acme",
                "SGLANG_FL_DENY_VENDORS": "nvidia",
            },
            "vendor.acme",
        ),
        ({"SGLANG_FL_PER_OP": "silu_and_mul=vendor:cuda|reference"}, "vendor.nvidia"),
        ({"SGLANG_FL_PER_OP": "silu_and_mul=vendor:nvidia|reference"}, "vendor.nvidia"),
        ({"SGLANG_FL_PER_OP": "silu_and_mul=vendor:nvidia|reference", "SGLANG_FL_DENY_VENDORS": "cuda"}, "reference"),
        ({"SGLANG_FL_PER_OP": "rms_norm=reference", "SGLANG_FL_PREFER": "vendor"}, "vendor.acme"),
        ({"SGLANG_FL_PER_OP": "silu_and_mul=reference", "SGLANG_FL_PREFER": "vendor"}, "reference"),
    ],
)
def test_settings_decide(variables: dict[str, str], expected: str) -> None:
    """Given the environment, when it becomes a policy, then this implementation of four is chosen."""
    assert chosen(SelectionPolicy.from_settings(load_settings(variables)), *EVERYTHING) == expected


@pytest.mark.parametrize("name", ["cuda", "nvidia", "CUDA"])
def test_a_policy_by_hand_knows_the_aliases(name: str) -> None:
    """Given a vendor by any of its names, when a policy is made, then it means the same in all three places."""
    by_order = SelectionPolicy(per_op_order={"silu_and_mul": (f"vendor:{name}",)})
    assert chosen(by_order, *EVERYTHING) == "vendor.nvidia"
    assert chosen(SelectionPolicy(prefer="vendor", allow_vendors=frozenset({name})), *EVERYTHING) == "vendor.nvidia"
    denied = SelectionPolicy(per_op_order={"silu_and_mul": ("vendor:nvidia",)}, deny_vendors=frozenset({name}))
    with pytest.raises(SelectionError, match=r"^No available implementation.*\n.*vendor nvidia is denied"):
        chosen(denied, *EVERYTHING)


@pytest.mark.parametrize("kinds", [Kind, BackendKind, BackendImplKind])
def test_a_kind_may_be_a_member_of_an_enumeration(kinds: type[Enum]) -> None:
    """Given kinds as any of the enumerations that have them, then the policy is that of their words."""
    member = kinds("vendor")
    assert SelectionPolicy(prefer=member) == SelectionPolicy(prefer="vendor")
    by_member = SelectionPolicy(per_op_order={"rms_norm": (member,)})
    assert by_member == SelectionPolicy(per_op_order={"rms_norm": ("vendor",)})


def test_an_implementation_can_be_named_by_its_id() -> None:
    """Given an order of ids, then the one that is named is chosen, and the unnamed are never asked."""
    asked = Counted("flagos")
    order = SelectionPolicy(per_op_order={"silu_and_mul": ("vendor.nvidia", "reference")})
    assert chosen(order, asked, NVIDIA, REFERENCE) == "vendor.nvidia"
    assert asked.probes == 0


def test_a_denied_vendor_is_not_even_asked() -> None:
    """Given a denied vendor beside another, when selected, then its availability was not asked: that may import it."""
    denied = Counted("vendor.acme")
    assert chosen(SelectionPolicy(prefer="vendor", deny_vendors=frozenset({"acme"})), denied, NVIDIA) == "vendor.nvidia"
    assert denied.probes == 0


def test_equal_policies_are_equal_and_nothing_can_be_changed() -> None:
    """Given two policies of the same meaning, then they are one key; their parts cannot be assigned."""
    order: dict[str, tuple[str, ...]] = {"rms_norm": ("vendor:cuda",)}
    one = SelectionPolicy(per_op_order=order, deny_vendors=frozenset({"npu"}))
    two = SelectionPolicy(per_op_order={"rms_norm": ("vendor:nvidia",)}, deny_vendors=frozenset({"ascend"}))
    assert one == two
    assert len({one, two, SelectionPolicy()}) == 2
    order["rms_norm"] = ("reference",)
    assert one.per_op_order["rms_norm"] == ("vendor:nvidia",)
    assert isinstance(raised(lambda: one.per_op_order.__setitem__("x", ())), AttributeError)


@pytest.mark.parametrize("wrong", [{"prefer": "flagoss"}, {"per_op_order": {"rms_norm": ()}}])
def test_a_policy_that_means_nothing_is_an_error(wrong: dict[str, object]) -> None:
    """Given a kind that is none, or an empty order, when a policy is made, then a ValueError."""
    with pytest.raises(ValueError, match=r"flagoss|rms_norm is empty"):
        SelectionPolicy(**wrong)


def test_the_process_policy_comes_from_the_environment_when_nobody_configured_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Given no plugin that loaded, when the policy is asked for, then the environment's is read once."""
    monkeypatch.setattr(policy, "_settings", None)
    monkeypatch.setattr(policy, "_process_policy", None)
    monkeypatch.setenv("SGLANG_FL_PREFER", "reference")
    assert current_policy().prefer == "reference"
    monkeypatch.setenv("SGLANG_FL_PREFER", "vendor")
    assert current_policy().prefer == "reference"


def test_call_op_follows_the_context_and_then_the_process_again() -> None:
    """Given a policy in a context, when called inside, in a nested one, and outside, then each has its own choice."""
    set_manager(manager_of(*EVERYTHING))
    vendors = SelectionPolicy(prefer="vendor", allow_vendors=frozenset({"nvidia"}))
    assert call_op("silu_and_mul", None) == "flagos"
    with policy_context(REFERENCE_FIRST):
        assert (call_op("silu_and_mul", None), current_policy()) == ("reference", REFERENCE_FIRST)
        with policy_context(vendors):
            assert call_op("silu_and_mul", None) == "vendor.nvidia"
        assert call_op("silu_and_mul", None) == "reference"
    assert call_op("silu_and_mul", None) == "flagos"


def test_an_error_inside_a_context_ends_it() -> None:
    """Given a context that an error leaves, then the process's policy holds again."""
    set_manager(manager_of(*EVERYTHING))
    with pytest.raises(NotSupportedError), policy_context(REFERENCE_FIRST):
        raise NotSupportedError
    assert call_op("silu_and_mul", None) == "flagos"


def test_a_context_is_not_seen_by_other_threads_unless_they_are_given_it() -> None:
    """Given a policy in this context, when threads call meanwhile, then a plain one has the process's choice, one that
    runs in a copy of this context has ours, and one with a policy of its own does not change ours."""
    set_manager(manager_of(*EVERYTHING))
    seen: dict[str, str] = {}

    def note(name: str) -> None:
        seen[name] = call_op("silu_and_mul", None)

    def with_own_policy() -> None:
        with policy_context(SelectionPolicy(prefer="vendor", deny_vendors=frozenset({"acme"}))):
            note("own")

    with policy_context(REFERENCE_FIRST):
        context = contextvars.copy_context()
        threads = [
            threading.Thread(target=note, args=("plain",)),
            threading.Thread(target=context.run, args=(note, "copied")),
            threading.Thread(target=with_own_policy),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        note("here")
    assert seen == {"plain": "flagos", "copied": "reference", "own": "vendor.nvidia", "here": "reference"}


def test_tasks_of_one_thread_have_their_own_contexts() -> None:
    """Given two tasks that take turns, each in a context of its own, then neither sees the other's policy."""
    set_manager(manager_of(*EVERYTHING))

    async def one(prefer: str) -> list[str]:
        with policy_context(SelectionPolicy(prefer=prefer, deny_vendors=frozenset({"acme"}))):
            results = []
            for _ in range(3):
                results.append(call_op("silu_and_mul", None))
                await asyncio.sleep(0)
            return results

    async def both() -> list[list[str]]:
        return await asyncio.gather(one("reference"), one("vendor"))

    assert asyncio.run(both()) == [["reference"] * 3, ["vendor.nvidia"] * 3]


def test_call_op_selects_once_and_again_when_something_changes() -> None:
    """Given calls by name, then availability is asked once; a new implementation or setting is seen by the next."""
    reference = Counted("reference")
    manager = manager_of(reference)
    manager._policy = None
    set_manager(manager)
    for _ in range(3):
        assert call_op("silu_and_mul", None) == "reference"
    assert reference.probes == 1
    manager.registry.register_impl(Counted("flagos").impl)
    assert call_op("silu_and_mul", None) == "flagos"
    configure(load_settings({"SGLANG_FL_PREFER": "reference"}))
    assert call_op("silu_and_mul", None) == "reference"
    set_manager(manager_of(Counted("vendor.acme")))
    assert call_op("silu_and_mul", None) == "vendor.acme"


def test_what_was_resolved_while_something_changed_is_not_kept() -> None:
    """Given an implementation that registers another while it is asked, then the next call selects anew."""
    manager = manager_of()
    late = Counted("flagos")

    class Registering(Counted):
        def _is_available(self) -> object:
            if not manager.registry.implementations("silu_and_mul")[1:]:
                manager.registry.register_impl(late.impl)
            return super()._is_available()

    manager.registry.register_impl(Registering("reference").impl)
    set_manager(manager)
    assert resolve_op("silu_and_mul")(None) == "reference"
    assert call_op("silu_and_mul", None) == "flagos"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"deny_vendors": "acme"}, TypeError, "deny_vendors is the text 'acme'; allowed: a set or sequence of names"),
        ({"allow_vendors": "acme"}, TypeError, "allow_vendors is the text 'acme'"),
        ({"per_op_order": {"rms_norm": "vendor"}}, TypeError, "per_op_order of rms_norm is the text 'vendor'"),
        ({"strict": "0"}, TypeError, "strict is '0'; allowed: True or False"),
        ({"prefer": "vendr"}, ValueError, "prefer is 'vendr'; allowed: flagos, vendor, reference"),
    ],
)
def test_a_policy_of_the_wrong_types_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    """Given what would silently mean something else, then the policy is refused with what is allowed."""
    with pytest.raises(error) as refused:
        SelectionPolicy(**options)
    assert message in str(refused.value)


def test_a_policy_travels_to_another_process() -> None:
    """Given a policy, when pickled or copied, then it is the same."""
    policy = SelectionPolicy(
        prefer="vendor", per_op_order={"rms_norm": ("vendor:cuda",)}, deny_vendors=frozenset({"x"})
    )
    for copied in (pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy)):
        assert copied == policy and dict(copied.per_op_order) == {"rms_norm": ("vendor:nvidia",)}
