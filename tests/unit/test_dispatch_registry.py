"""The registry: what may be registered, all or nothing, and descriptors that were made for another plugin."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import pytest
import torch

from sglang_fl.dispatch.registry import FUNCTION_OPERATORS, KNOWN_OPERATORS, OpRegistry, RegistrationError, as_op_impl
from sglang_fl.dispatch.types import BackendImplKind, BackendPriority, OpImpl
from sglang_fl.sglang_hooks.operators import delta_rule


def do_nothing(obj: Any, x: Any) -> Any:
    """An implementation."""
    return x


REFERENCE = OpImpl("silu_and_mul", "reference", BackendImplKind.REFERENCE, do_nothing)
VENDOR = OpImpl("silu_and_mul", "vendor.acme", BackendImplKind.VENDOR, do_nothing, vendor="acme", priority=100)


class OtherKind(str, Enum):
    """Another plugin's kinds, with the same values."""

    DEFAULT = "flagos"
    VENDOR = "vendor"


@dataclass(frozen=True)
class OtherImpl:
    """Another plugin's descriptor: the same fields but for ``supports``."""

    op_name: str
    impl_id: str
    kind: Any
    fn: Any
    vendor: str | None = None
    priority: int = 0
    supported_dtypes: set[str] | None = None
    min_arch: str | None = None


def test_the_standard_operators_are_those_with_a_signature() -> None:
    """Given the base class, then its operators are known, and what it says about a backend is none."""
    assert KNOWN_OPERATORS[:3] == ("silu_and_mul", "gelu_and_mul", "rms_norm")
    assert not {"name", "vendor", "is_available"} & set(KNOWN_OPERATORS)


def test_implementations_come_back_in_the_order_of_their_registration() -> None:
    """Given two for one operator, when asked, then both, as the objects that they were."""
    registry = OpRegistry()
    registry.register_impl(VENDOR)
    registry.register_impl(REFERENCE)
    assert registry.implementations("silu_and_mul") == (VENDOR, REFERENCE)
    assert registry.implementations("silu_and_mul")[0] is VENDOR
    assert registry.implementations("rms_norm") == ()
    assert registry.operators() == ("silu_and_mul",)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (VENDOR, "silu_and_mul has an implementation vendor.acme already, .*do_nothing; .* an impl_id of its own"),
        (object(), "is no implementation: it has no op_name, impl_id, kind, fn"),
        (OtherImpl("x", "vendor.a", OtherKind.VENDOR, do_nothing), "kind vendor needs vendor=, the vendor's name"),
        (OtherImpl("x", "a", "flagoss", do_nothing), "kind is 'flagoss'; allowed: flagos, vendor, reference"),
        (OtherImpl("x", "a", OtherKind.DEFAULT, None), "fn is None, which cannot be called"),
        (OtherImpl("", "a", OtherKind.DEFAULT, do_nothing), "op_name is ''; allowed: a name"),
        (replace(REFERENCE, impl_id="other", min_arch="hopper"), "min_arch is 'hopper'; allowed: a compute capability"),
    ],
)
def test_what_is_wrong_is_refused_and_nothing_of_its_list_registers(wrong: object, message: str) -> None:
    """Given a list with one wrong entry at its end, when registered, then a clear error, and none of it is there."""
    registry = OpRegistry()
    registry.register_impl(VENDOR)
    with pytest.raises(RegistrationError, match=message):
        registry.register_many([REFERENCE, replace(REFERENCE, op_name="rms_norm"), wrong])
    assert registry.all_implementations() == (VENDOR,)


def test_a_list_that_repeats_itself_is_refused_as_a_whole() -> None:
    """Given the same impl_id twice in one list, when registered, then an error, and neither is there."""
    registry = OpRegistry()
    with pytest.raises(RegistrationError, match="already"):
        registry.register_many([REFERENCE, REFERENCE])
    assert registry.operators() == ()


def test_another_plugins_descriptor_becomes_ours() -> None:
    """Given an object with the fields, when registered, then it is an OpImpl with our kind and the canonical vendor."""
    registry = OpRegistry()
    theirs = OtherImpl("rms_norm", "vendor.cuda", OtherKind.VENDOR, do_nothing, "CUDA", 100, {"bfloat16"}, "9.0")
    registry.register_many([theirs])
    expected = OpImpl("rms_norm", "vendor.cuda", BackendImplKind.VENDOR, do_nothing, "nvidia", 100, {"bfloat16"}, "9.0")
    assert registry.implementations("rms_norm") == (expected,)


def test_aliases_of_a_vendor_are_one_vendor() -> None:
    """Given our own descriptor with an alias, when converted, then the vendor has its canonical name."""
    assert as_op_impl(replace(VENDOR, vendor="npu")).vendor == "ascend"


def test_an_unknown_operator_is_kept_with_a_warning() -> None:
    """Given a misspelled operator, when registered, then it is there, and a warning suggests the right name."""
    registry = OpRegistry()
    registry.register_many([replace(VENDOR, op_name="silu_and_mull"), REFERENCE])
    assert registry.operators() == ("silu_and_mul", "silu_and_mull")
    (warning,) = registry.warnings()
    assert "vendor.acme registers the operator 'silu_and_mull', which sglang_fl does not know" in warning
    assert "Did you mean silu_and_mul?" in warning


def test_the_functions_that_sglang_calls_by_name_are_known() -> None:
    """Given the functions that SGLang's own are replaced with, when registered, then without a warning."""
    registry = OpRegistry()
    registry.register_many([replace(VENDOR, op_name=name) for name in FUNCTION_OPERATORS])
    assert registry.warnings() == ()
    assert set(FUNCTION_OPERATORS) == set(delta_rule.FUNCTIONS)


def test_the_priorities_are_those_of_the_public_plugin() -> None:
    """Given the constants that backends use, then flagos comes before vendor, and vendor before reference."""
    assert (BackendPriority.DEFAULT, BackendPriority.VENDOR, BackendPriority.REFERENCE) == (150, 100, 50)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("priority", "100", "priority is '100'; allowed: a whole number"),
        ("priority", None, "priority is None"),
        ("supported_dtypes", "float32", "supported_dtypes is 'float32'; allowed: a set of torch's names"),
        ("supported_dtypes", {"fp32"}, "supported_dtypes is {'fp32'}"),
        ("supported_dtypes", 3, "supported_dtypes is 3"),
        ("supports", "all", "supports is 'all'; allowed: a function of the layer, or None"),
    ],
)
def test_a_rule_that_could_not_be_asked_is_refused(field: str, value: object, message: str) -> None:
    """Given a rule of the wrong type, when registered, then it is refused there, and does not fail at a selection."""
    options: dict[str, Any] = {field: value}
    with pytest.raises(RegistrationError) as refused:
        OpRegistry().register_impl(OpImpl("silu_and_mul", "flagos", BackendImplKind.DEFAULT, print, **options))
    assert message in str(refused.value)


@pytest.mark.parametrize("answer", [torch.ones(2), SystemExit("no device found")])
def test_an_availability_that_is_none_is_a_no_with_its_reason(answer: object) -> None:
    """Given an is_available that answers nothing of use, or that ends the program, then the answer is no, and why."""

    def fn(layer: object, x: object) -> None: ...

    def is_available() -> object:
        if isinstance(answer, SystemExit):
            raise answer
        return answer

    fn._is_available = is_available  # type: ignore[attr-defined]
    found = OpImpl("silu_and_mul", "flagos", BackendImplKind.DEFAULT, fn).availability()
    assert not found.available and "its is_available raised" in found.reason
