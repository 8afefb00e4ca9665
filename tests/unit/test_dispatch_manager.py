"""Selecting and binding: what is passed over and why, who gets a call that failed, and what strict mode forbids."""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from sglang_fl.dispatch import (
    BackendImplKind,
    NotSupportedError,
    OpImpl,
    OpManager,
    OpRegistry,
    OwnMethodError,
    SelectionPolicy,
    UnknownOperatorError,
    rules,
)
from sglang_fl.dispatch.contracts import HANDS_OVER
from sglang_fl.dispatch.registry import KNOWN_OPERATORS
from sglang_fl.selection import SelectionError
from tests.unit.dispatch_cases import Counted, manager_of, raised

STRICT = SelectionPolicy(strict=True)
LAYER = object()


@dataclass
class Layer:
    """A layer; ``hidden`` is what ``supports`` asks for."""

    hidden: int = 64


def reasons(manager: OpManager, op_name: str = "silu_and_mul", **options: Any) -> dict[str, str]:
    """Why each candidate was passed over."""
    return {entry.impl_id: entry.reason for entry in manager.select(op_name, **options).passed_over}


# --- selecting ---


def test_every_candidate_is_chosen_or_has_a_reason() -> None:
    """Given four implementations, two of them unusable, when selected, then each of the others says why."""
    manager = manager_of(
        Counted("flagos", unavailable="no device"),
        Counted("vendor.acme"),
        Counted("reference"),
        Counted("vendor.nvidia"),
        policy=SelectionPolicy(deny_vendors=frozenset({"cuda"})),
    )
    selection = manager.select("silu_and_mul")
    assert selection.chosen is not None
    assert selection.chosen.impl_id == "vendor.acme"
    assert reasons(manager) == {
        "flagos": "no device",
        "vendor.nvidia": "vendor nvidia is denied",
        "reference": "available, but vendor.acme comes first",
    }


def test_availability_is_asked_once_in_a_selection() -> None:
    """Given two vendors, whose order depends on who can be used, when selected, then each was asked once."""
    vendors = [Counted("vendor.acme", unavailable="no driver"), Counted("vendor.nvidia")]
    manager_of(*vendors).select("silu_and_mul")
    assert [vendor.probes for vendor in vendors] == [1, 1]


def test_a_probe_that_raises_says_no_with_its_error() -> None:
    """Given an availability that raises, when selected, then the next is chosen, and the error is the reason."""
    broken = Counted("flagos")
    broken._is_available = lambda: {}["the driver"]
    assert reasons(manager_of(broken, Counted("reference")))["flagos"] == (
        "its is_available raised KeyError: 'the driver'"
    )


def test_extra_implementations_are_candidates_of_one_selection_only() -> None:
    """Given a further implementation, when bound with it, then it is chosen as the object that it is, and not later."""
    manager = manager_of(Counted("reference"))
    extra = Counted("vendor.nvidia", priority=90).impl
    bound = manager.bind("silu_and_mul", LAYER, extra=[extra])
    assert bound.impl is extra
    assert bound.selection.usable[0].payload is extra
    assert manager.bind("silu_and_mul", LAYER).impl.impl_id == "reference"


def test_a_vendors_own_method_comes_after_its_kernels() -> None:
    """Given the vendor's implementation and SGLang's own method of the same id and a lower priority, then the first."""
    kernel, own = Counted("vendor.nvidia"), Counted("vendor.nvidia", priority=90)
    manager = manager_of(kernel, policy=SelectionPolicy(prefer="vendor"))
    assert manager.bind("silu_and_mul", LAYER, extra=[own.impl]).impl.fn is kernel
    kernel.unavailable = "no sgl_kernel"
    assert manager.bind("silu_and_mul", LAYER, extra=[own.impl]).impl.fn is own


def test_nothing_left_begins_as_the_public_documents_say() -> None:
    """Given nothing that can be used, when selected, bound or resolved, then the message begins so and has all."""
    manager = manager_of(Counted("flagos", unavailable="no device"), Counted("vendor.acme", unavailable="no driver"))
    for attempt in (
        lambda: manager.select("silu_and_mul"),
        lambda: manager.bind("silu_and_mul", LAYER),
        lambda: manager.resolve("silu_and_mul"),
    ):
        error = raised(attempt)
        assert isinstance(error, SelectionError)
        assert str(error).startswith("No available implementation for silu_and_mul")
        assert "not flagos: no device" in str(error)
        assert "not vendor.acme: no driver" in str(error)


def test_a_known_operator_that_nobody_offers_is_no_typing_error() -> None:
    """Given an empty registry, when a standard operator is selected, then nothing is available."""
    error = raised(lambda: manager_of().select("rms_norm"))
    assert str(error).startswith("No available implementation for rms_norm")
    assert not isinstance(error, UnknownOperatorError)


def test_a_misspelled_operator_gets_a_suggestion() -> None:
    """Given a name that nobody offers, when selected, then the error suggests the nearest."""
    with pytest.raises(UnknownOperatorError, match=r"^No available implementation for 'rms_nrom'.*mean rms_norm\?"):
        manager_of(Counted("reference")).select("rms_nrom")


def test_an_operator_without_a_signature_can_be_called_if_somebody_offers_it() -> None:
    """Given an operator that only a backend knows, when resolved, then its function."""
    manager = manager_of(Counted("vendor.acme", op_name="attention"))
    assert manager.resolve("attention")(LAYER) == "vendor.acme"
    assert manager.operators()[-1] == "attention"
    assert manager.vendors() == ("acme",)


def test_a_token_that_nobody_answers_to_has_a_reason() -> None:
    """Given an order with a vendor that is not installed, when selected, then it is passed over by name."""
    order = SelectionPolicy(per_op_order={"silu_and_mul": ("vendor:acme", "vendor", "reference")})
    manager = manager_of(Counted("reference"))
    found = reasons(manager, policy=order)
    assert found["vendor:acme"] == "no backend of vendor:acme offers silu_and_mul"
    assert found["vendor"] == "no backend of vendor offers silu_and_mul"


# --- rules on layer, dtype and device ---


def test_a_layer_decides() -> None:
    """Given an implementation that is wrong for some layers, when bound, then those get the next one."""
    picky = Counted("flagos", options={"supports": lambda layer: "" if layer.hidden == 64 else "hidden is not 64"})
    manager = manager_of(picky, Counted("reference"))
    assert manager.bind("silu_and_mul", Layer(64)).impl.fn is picky
    bound = manager.bind("silu_and_mul", Layer(80))
    assert bound.impl.impl_id == "reference"
    assert bound.selection.passed_over[0].reason == "hidden is not 64"


def test_a_layer_decides_in_each_call_by_name() -> None:
    """Given the same, when called by name with layers in turn, then each gets the right one."""
    picky = Counted("flagos", options={"supports": lambda layer: "" if layer.hidden == 64 else "hidden is not 64"})
    function = manager_of(picky, Counted("reference")).resolve("silu_and_mul")
    assert [function(Layer(hidden)) for hidden in (64, 80, 64)] == ["flagos", "reference", "flagos"]


def test_a_supports_that_raises_says_no() -> None:
    """Given a layer without what supports reads, when bound, then the next, and the error is the reason."""
    picky = Counted("flagos", options={"supports": lambda layer: layer.nothing})
    assert "its supports raised AttributeError" in reasons(manager_of(picky, Counted("reference")), obj=LAYER)["flagos"]


@pytest.mark.parametrize("names", [{"bfloat16"}, frozenset({"torch.bfloat16"}), {torch.bfloat16}])
def test_a_dtype_decides_before_the_call_where_it_is_known(names: Any) -> None:
    """Given an implementation for bfloat16, when bound with the input's dtype, then only bfloat16 gets it."""
    narrow = Counted("flagos", options={"supported_dtypes": names})
    manager = manager_of(narrow, Counted("reference"))
    bound = manager.bind("silu_and_mul", LAYER, dtype=torch.bfloat16)
    assert bound.impl.fn is narrow
    bound = manager.bind("silu_and_mul", LAYER, dtype=torch.float16)
    assert bound.selection.passed_over[0].reason == "the input is float16; it does bfloat16"
    assert bound.fn is bound.impl.fn


def test_a_dtype_that_is_not_known_is_asked_until_a_call_was_right() -> None:
    """Given no dtype, when called with a wrong one and then a right one, then the next gets the wrong call only."""
    narrow = Counted("flagos", options={"supported_dtypes": {"bfloat16"}})
    bound = manager_of(narrow, Counted("reference")).bind("silu_and_mul", LAYER)
    wrong, right = torch.ones(2), torch.ones(2, dtype=torch.bfloat16)
    assert [bound.fn(LAYER, x) for x in (wrong, right, right)] == ["reference", "flagos", "flagos"]


@pytest.mark.parametrize(("capability", "expected"), [((9, 0), "flagos"), ((8, 9), "reference"), ((10, 0), "flagos")])
def test_a_compute_capability_decides(
    capability: tuple[int, int], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a device of a capability (made up: there is none here), then an implementation for 9.0 fits or not."""
    monkeypatch.setattr(rules, "_current_capability", lambda: capability)
    manager = manager_of(Counted("flagos", options={"min_arch": "9.0"}), Counted("reference"))
    assert manager.bind("silu_and_mul", LAYER).impl.impl_id == expected
    assert manager.resolve("silu_and_mul")(LAYER) == expected


def test_without_a_cuda_device_no_compute_capability_is_asked_for() -> None:
    """Given no CUDA device, then a rule on compute capability says nothing."""
    manager = manager_of(Counted("flagos", options={"min_arch": "9.0"}), Counted("reference"))
    assert manager.bind("silu_and_mul", LAYER).impl.impl_id == "flagos"


# --- what a bound function does ---


def test_one_candidate_is_bound_as_it_is() -> None:
    """Given one usable implementation, when bound, then its function itself."""
    only = Counted("reference")
    manager = manager_of(Counted("flagos", unavailable="no device"), only)
    assert manager.bind("silu_and_mul", LAYER).fn is only


REFUSAL = NotSupportedError("not this shape")
FAILURE = ValueError("a mistake of the kernel")
X, RESIDUAL = torch.ones(2), torch.zeros(2)
ROTARY = (X, X, X, X, X)


@pytest.mark.parametrize(
    ("op_name", "arguments", "named", "error", "goes_on"),
    [
        ("silu_and_mul", (X,), {}, REFUSAL, True),
        ("silu_and_mul", (X,), {}, FAILURE, True),
        ("rms_norm", (X, RESIDUAL), {}, REFUSAL, True),
        ("rms_norm", (X, RESIDUAL), {}, FAILURE, False),
        ("rms_norm", (X,), {"residual": RESIDUAL}, FAILURE, False),
        ("rms_norm", (X, None), {}, FAILURE, True),
        ("rms_norm", (), {"x": X}, FAILURE, True),
        ("gemma_rms_norm", (X, RESIDUAL), {}, FAILURE, False),
        ("rotary_embedding", ROTARY, {}, FAILURE, False),
        ("rotary_embedding", ROTARY, {}, REFUSAL, True),
        ("rotary_embedding", ROTARY, {"inplace": False}, FAILURE, True),
        ("mrotary_embedding", (X, X, X), {}, FAILURE, False),
        ("topk", (X, 2), {"renormalize": False}, FAILURE, True),
        ("fused_moe", (X, X, X, X, X), {}, FAILURE, True),
        ("attention", (X,), {}, FAILURE, False),
        ("attention", (X,), {}, REFUSAL, True),
        # Plain NotImplementedError is what torch raises for a missing kernel, perhaps in the middle of the work.
        ("rms_norm", (X, RESIDUAL), {}, NotImplementedError("aten::x"), False),
        ("silu_and_mul", (X, X, X, X), {}, TypeError("too many arguments"), False),
        ("silu_and_mul", (X,), {}, torch.OutOfMemoryError("CUDA out of memory"), False),
        ("silu_and_mul", (X,), {}, MemoryError(), False),
        ("silu_and_mul", (X,), {}, RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        ("silu_and_mul", (X,), {}, RuntimeError("Triton Error [CUDA]: device-side assert triggered"), False),
        ("silu_and_mul", (X,), {}, RuntimeError("NPU error, error code is 107003"), False),
        ("silu_and_mul", (X,), {}, KeyboardInterrupt(), False),
        ("silu_and_mul", (X,), {}, OwnMethodError(), False),
    ],
)
def test_who_gets_a_call_that_failed(
    op_name: str, arguments: tuple[Any, ...], named: dict[str, Any], error: BaseException, goes_on: bool
) -> None:
    """Given a first implementation that raises, when called, then the next gets the call once if the inputs are surely
    as they were and the device is well; otherwise that very error comes out, and nobody else was called. The bad call
    marks nobody: the next one goes to the first again. So in calls by name."""
    first, second = Counted("flagos", error, op_name=op_name), Counted("reference", op_name=op_name)
    manager = manager_of(first, second)
    for number, function in enumerate((manager.bind(op_name, LAYER).fn, manager.resolve(op_name))):
        first.error = error
        if goes_on:
            assert function(LAYER, *arguments, **named) == "reference"
            assert second.calls[-1] == (LAYER, *arguments, *named.items())
        else:
            assert raised(lambda function=function: function(LAYER, *arguments, **named)) is error
        assert len(first.calls) == 2 * number + 1
        assert len(second.calls) == (number + 1 if goes_on else 0)
        first.error = None
        assert function(LAYER, *arguments, **named) == "flagos"
        assert len(second.calls) == (number + 1 if goes_on else 0)


def test_every_standard_operator_says_what_it_hands_over() -> None:
    """Given the operators with a signature, then each has a rule."""
    assert set(HANDS_OVER) == set(KNOWN_OPERATORS)


def test_a_third_implementation_gets_what_the_second_refused() -> None:
    """Given two that refuse, when called, then the third gets it, each of them having been called once."""
    first, second, third = Counted("flagos", REFUSAL), Counted("vendor.acme", FAILURE), Counted("reference")
    assert manager_of(first, second, third).bind("silu_and_mul", LAYER).fn(LAYER, X) == "reference"
    assert [len(each.calls) for each in (first, second, third)] == [1, 1, 1]


@pytest.mark.parametrize("refusing", [1, 2, 3])
def test_a_call_that_went_on_holds_on_to_nothing(refusing: int) -> None:
    """Given implementations that refuse, when the call is done, then its input is free at once: no cycle of errors and
    frames keeps device memory until Python collects garbage."""

    def refuse(obj: Any, x: torch.Tensor) -> str:
        raise NotSupportedError(f"not {x.shape}")

    registry = OpRegistry()
    kind = BackendImplKind.VENDOR
    registry.register_many(
        OpImpl("silu_and_mul", f"vendor.chip{number}", kind, refuse, f"chip{number}") for number in range(refusing)
    )
    registry.register_impl(OpImpl("silu_and_mul", "reference", BackendImplKind.REFERENCE, lambda obj, x: "reference"))
    function = OpManager(registry, SelectionPolicy()).bind("silu_and_mul", LAYER).fn
    x = torch.ones(2)
    alive = weakref.ref(x)
    gc.disable()
    try:
        assert function(LAYER, x) == "reference"
        del x
        assert alive() is None
    finally:
        gc.enable()


def test_when_all_refuse_a_call_the_error_has_each_reason() -> None:
    """Given a call that nobody can do, then the error begins as ever and has what each said."""
    manager = manager_of(Counted("flagos", FAILURE), Counted("reference", NotSupportedError("nor this dtype")))
    error = raised(lambda: manager.bind("silu_and_mul", LAYER).fn(LAYER, X))
    assert isinstance(error, NotSupportedError)
    assert str(error) == (
        "No available implementation for this call of silu_and_mul:\n"
        "  flagos: a mistake of the kernel\n  reference: nor this dtype"
    )


def test_a_failure_of_the_last_one_comes_out_unchanged() -> None:
    """Given a first that refuses and a last that fails, then the last one's own error, the first in its context."""
    last = Counted("reference", FAILURE)
    error = raised(lambda: manager_of(Counted("flagos", REFUSAL), last).bind("silu_and_mul", LAYER).fn(LAYER, X))
    assert error is FAILURE
    assert error.__context__ is REFUSAL


def test_the_frameworks_own_method_is_asked_for_in_its_turn() -> None:
    """Given the stand-in for SGLang's method behind one that refuses, when called, then its demand comes out."""
    own = Counted("vendor.nvidia", OwnMethodError())
    manager = manager_of(Counted("flagos", REFUSAL), Counted("reference"))
    bound = manager.bind("silu_and_mul", LAYER, extra=[own.impl])
    assert isinstance(raised(lambda: bound.fn(LAYER, X)), OwnMethodError)


def test_falling_through_is_logged_once_for_each_kind_of_error(caplog: pytest.LogCaptureFixture) -> None:
    """Given calls that fail again and again, in two layers, then one line per operator, implementation and kind."""
    first = Counted("flagos", FAILURE)
    manager = manager_of(first, Counted("reference"))
    with caplog.at_level(logging.INFO, "sglang_fl"):
        for _ in range(2):
            function = manager.bind("silu_and_mul", LAYER).fn
            for first.error in (FAILURE, REFUSAL, FAILURE):
                function(LAYER, X)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (
            "WARNING",
            "[sglang_fl] silu_and_mul: flagos raised ValueError: a mistake of the kernel; reference gets this call",
        ),
        (
            "INFO",
            "[sglang_fl] silu_and_mul: flagos raised NotSupportedError: not this shape; reference gets this call",
        ),
    ]


# --- strict ---


@pytest.mark.parametrize("op_name", ["silu_and_mul", "rms_norm"])
@pytest.mark.parametrize("error", [REFUSAL, FAILURE], ids=["refuses", "fails"])
def test_strict_raises_the_error_unchanged_and_names_who_raised_it(
    op_name: str, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """Given strict mode and a first choice that raises, when called, then that error, a note and a line that name
    operator and implementation, and nobody else is called, however often."""
    fresh = type(error)(*error.args)
    first, second = Counted("flagos", fresh, op_name=op_name), Counted("reference", op_name=op_name)
    manager = manager_of(first, second, policy=STRICT)
    for function in (manager.bind(op_name, LAYER).fn, manager.resolve(op_name)):
        assert raised(lambda function=function: function(LAYER, X)) is fresh
    assert (len(first.calls), len(second.calls)) == (2, 0)
    wanted = f"[sglang_fl] {op_name}: raised by flagos; strict mode: nothing else is tried"
    if sys.version_info >= (3, 11):
        assert fresh.__notes__ == [wanted]
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.getMessage() == (
        f"[sglang_fl] {op_name}: flagos raised {type(error).__name__}: {error}; strict mode: nothing else is tried"
    )


def test_strict_without_the_first_choice_names_operator_implementation_and_reason() -> None:
    """Given strict mode and a first choice that cannot be used, when bound, then an error with all three; nobody is
    called."""
    second = Counted("reference")
    manager = manager_of(Counted("flagos", unavailable="no device"), second, policy=STRICT)
    for attempt in (lambda: manager.bind("silu_and_mul", LAYER), lambda: manager.resolve("silu_and_mul")):
        error = raised(attempt)
        assert isinstance(error, SelectionError)
        assert str(error).startswith("No available implementation for silu_and_mul: strict mode")
        assert "the first choice for silu_and_mul is flagos, which cannot be used here: no device" in str(error)
    assert second.calls == []


def test_strict_asks_whether_the_kind_can_be_used_not_the_first_vendor_by_name() -> None:
    """Given two vendors, the first by name without a device, when strict prefers vendors, then the other."""
    manager = manager_of(Counted("vendor.acme", unavailable="no device"), Counted("vendor.nvidia"), Counted("flagos"))
    strict = SelectionPolicy(prefer="vendor", strict=True)
    assert manager.bind("silu_and_mul", LAYER, strict).impl.impl_id == "vendor.nvidia"
    by_name = SelectionPolicy(per_op_order={"silu_and_mul": ("vendor:acme", "vendor")}, strict=True)
    with pytest.raises(SelectionError, match=r"first choice for silu_and_mul is vendor\.acme"):
        manager.bind("silu_and_mul", LAYER, by_name)


@pytest.mark.parametrize("order", [("vendor:acme", "reference"), ("vendor", "reference"), ("flagos", "reference")])
def test_strict_does_not_pass_over_a_first_choice_that_nobody_offers(order: tuple[str, ...]) -> None:
    """Given strict mode and an order whose first token nobody answers to, when bound, then an error that says so."""
    strict = SelectionPolicy(per_op_order={"silu_and_mul": order}, strict=True)
    with pytest.raises(SelectionError, match=f"no backend of {order[0]} offers silu_and_mul"):
        manager_of(Counted("reference")).bind("silu_and_mul", LAYER, strict)


def test_strict_holds_for_a_layer_that_the_first_choice_is_wrong_for() -> None:
    """Given strict mode and a first choice that is wrong for the layer, when bound, then an error with its reason."""
    picky = Counted("flagos", options={"supports": lambda layer: "this layer is quantized"})
    with pytest.raises(SelectionError, match="flagos, which cannot be used here: this layer is quantized"):
        manager_of(picky, Counted("reference"), policy=STRICT).bind("silu_and_mul", LAYER)


# --- what backends do wrong ---


def test_a_manager_of_everything_has_the_built_in_backends() -> None:
    """Given no registry, when a manager is made, then every standard operator has a reference, and none is broken."""
    manager = OpManager(policy=SelectionPolicy(prefer="reference"))
    assert manager.broken == ()
    assert manager.warnings() == ()
    for op_name in KNOWN_OPERATORS:
        chosen = manager.select(op_name).chosen
        assert chosen is not None
        assert chosen.impl_id == "reference", op_name


def test_an_empty_registry_is_taken_as_it_is() -> None:
    """Given an empty registry, when a manager is made of it, then nothing is added to it."""
    assert OpManager(OpRegistry(), SelectionPolicy()).registry.operators() == ()


@pytest.mark.parametrize("error", [REFUSAL, FAILURE])
def test_a_changed_input_is_never_handed_on(error: Exception) -> None:
    """Case 23. Given an implementation that writes to an input that it must keep and then raises, when called, then
    that error comes out, even a refusal, and nobody else gets the changed input."""

    def writes(layer: object, x: torch.Tensor) -> str:
        x.mul_(2)
        raise error

    second = Counted("reference")
    first = OpImpl("silu_and_mul", "flagos", BackendImplKind.DEFAULT, writes)
    registry = OpRegistry()
    registry.register_many([first, OpImpl("silu_and_mul", "reference", BackendImplKind.REFERENCE, second)])
    manager = OpManager(registry, SelectionPolicy())
    for function in (manager.bind("silu_and_mul", LAYER).fn, manager.resolve("silu_and_mul")):
        assert raised(lambda function=function: function(LAYER, torch.ones(2))) is error
        assert raised(lambda function=function: function(LAYER, x=torch.ones(2))) is error
    assert second.calls == []


def test_without_a_count_of_changes_only_a_refusal_goes_on() -> None:
    """Given inference mode, in which a tensor keeps no count, then an error comes out, and a refusal goes on."""
    with torch.inference_mode():
        x = torch.ones(2)
        for error, goes_on in ((FAILURE, False), (REFUSAL, True)):
            bound = manager_of(Counted("flagos", error), Counted("reference")).bind("silu_and_mul", LAYER)
            if goes_on:
                assert bound.fn(LAYER, x) == "reference"
            else:
                assert raised(lambda bound=bound: bound.fn(LAYER, x)) is error
