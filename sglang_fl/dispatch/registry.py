"""Every implementation of every operator in this process: checked when it registers, read without a lock."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

import torch

from sglang_fl.config import canonical_vendor, closest
from sglang_fl.dispatch.ops import FLBackendBase
from sglang_fl.dispatch.types import BackendImplKind, OpImpl

_NO_OPERATORS = {"name", "is_available", "vendor"}
KNOWN_OPERATORS: tuple[str, ...] = tuple(
    name
    for name, member in vars(FLBackendBase).items()
    if inspect.isfunction(member) and not name.startswith("_") and name not in _NO_OPERATORS
)
"""The operators whose standard signatures are in :class:`FLBackendBase`, in its order."""

FUNCTION_OPERATORS: tuple[str, ...] = (
    "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gated_delta_rule_packed_decode",
)
"""Functions of SGLang that an implementation of the same name and parameters replaces; they have no layer."""

_FIELDS = tuple(field.name for field in fields(OpImpl))
_REQUIRED = ("op_name", "impl_id", "kind", "fn")


class RegistrationError(ValueError):
    """An implementation that cannot be registered; nothing of its call to the registry was."""


class OpRegistry:
    """Implementations by operator.

    Writers take a lock and replace the table as a whole, so that readers need none.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_operator: Mapping[str, tuple[OpImpl, ...]] = MappingProxyType({})
        self._listeners: list[Callable[[], None]] = []

    def register_impl(self, impl: object) -> None:
        """Add one implementation; see :meth:`register_many`."""
        self.register_many([impl])

    def register_many(self, impls: Iterable[object]) -> None:
        """Add implementations: all of them, or none if one is wrong.

        Args:
            impls: :class:`OpImpl`, or objects with its fields, such as vllm-plugin-FL's, which are converted.

        Raises:
            RegistrationError: a missing or wrong field, a vendor's implementation without the vendor's name, or an
                impl_id that the operator has already.
        """
        converted = [as_op_impl(impl) for impl in impls]
        with self._lock:
            table = dict(self._by_operator)
            for impl in converted:
                present = table.get(impl.op_name, ())
                _check_new(impl, present)
                table[impl.op_name] = (*present, impl)
            self._by_operator = MappingProxyType(table)
        for listener in self._listeners:
            listener()

    def implementations(self, op_name: str) -> tuple[OpImpl, ...]:
        """Everything that was registered for ``op_name``, in that order; empty for an unknown name."""
        return self._by_operator.get(op_name, ())

    def operators(self) -> tuple[str, ...]:
        """The names for which something was registered, sorted."""
        return tuple(sorted(self._by_operator))

    def all_implementations(self) -> tuple[OpImpl, ...]:
        """Everything, operator by operator."""
        return tuple(impl for impls in self._by_operator.values() for impl in impls)

    def warnings(self) -> tuple[str, ...]:
        """A line for each implementation whose operator has no standard signature: it can be called by name only."""
        known = {*KNOWN_OPERATORS, *FUNCTION_OPERATORS}
        unknown = (impl for impl in self.all_implementations() if impl.op_name not in known)
        return tuple(_unknown_operator(impl) for impl in unknown)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` after every registration."""
        self._listeners.append(listener)


def as_op_impl(impl: object) -> OpImpl:
    """``impl`` as our :class:`OpImpl`, its vendor by the canonical name.

    What counts are the fields, not the class: a backend may bring the descriptor of vllm-plugin-FL. Its kind is
    compared by value.

    Raises:
        RegistrationError: see :meth:`OpRegistry.register_many`.
    """
    missing = [name for name in _REQUIRED if not hasattr(impl, name)]
    if missing:
        raise RegistrationError(
            f"{impl!r} is no implementation: it has no {', '.join(missing)}. Register an OpImpl of "
            "sglang_fl.dispatch.types, or an object with the same fields."
        )
    values: dict[str, Any] = {name: getattr(impl, name) for name in _FIELDS if hasattr(impl, name)}
    label = f"implementation {values['impl_id']!r} of {values['op_name']!r}"
    values["kind"] = _kind(values["kind"], label)
    _check_fields(values, label)
    vendor = values.get("vendor") and canonical_vendor(values["vendor"])
    if isinstance(impl, OpImpl) and impl.kind is values["kind"] and impl.vendor == vendor:
        return impl
    return OpImpl(**{**values, "vendor": vendor})


def parse_arch(text: str) -> tuple[int, int]:
    """A compute capability such as "9.0" as numbers that compare.

    Raises:
        ValueError: the text is none.
    """
    major, _, minor = text.partition(".")
    return int(major), int(minor or 0)


def _kind(kind: object, label: str) -> BackendImplKind:
    value = getattr(kind, "value", kind)
    try:
        return BackendImplKind(value)
    except ValueError:
        allowed = ", ".join(member.value for member in BackendImplKind)
        raise RegistrationError(f"{label}: kind is {kind!r}; allowed: {allowed}") from None


def _check_fields(values: Mapping[str, Any], label: str) -> None:
    for name in ("op_name", "impl_id"):
        if not isinstance(values[name], str) or not values[name]:
            raise RegistrationError(f"{label}: {name} is {values[name]!r}; allowed: a name")
    if not callable(values["fn"]):
        raise RegistrationError(f"{label}: fn is {values['fn']!r}, which cannot be called")
    if values["kind"] is BackendImplKind.VENDOR and not values.get("vendor"):
        raise RegistrationError(f"{label}: kind vendor needs vendor=, the vendor's name, such as vendor='ascend'")
    _check_rules(values, label)
    if values.get("min_arch") is not None:
        try:
            parse_arch(values["min_arch"])
        except (ValueError, AttributeError):
            raise RegistrationError(
                f"{label}: min_arch is {values['min_arch']!r}; allowed: a compute capability such as '9.0', or None"
            ) from None


def _check_rules(values: Mapping[str, Any], label: str) -> None:
    priority, dtypes, supports = (values.get(name) for name in ("priority", "supported_dtypes", "supports"))
    if "priority" in values and (not isinstance(priority, int) or isinstance(priority, bool)):
        raise RegistrationError(f"{label}: priority is {priority!r}; allowed: a whole number, see BackendPriority")
    if dtypes is not None:
        names = set(dtypes) if isinstance(dtypes, (set, frozenset, list, tuple)) else {dtypes}
        wrong = [name for name in names if not _is_dtype(str(name).removeprefix("torch."))]
        if wrong or not isinstance(dtypes, (set, frozenset, list, tuple)):
            raise RegistrationError(
                f"{label}: supported_dtypes is {dtypes!r}; allowed: a set of torch's names of dtypes, such as "
                "{'bfloat16', 'float32'}, or None"
            )
    if supports is not None and not callable(supports):
        raise RegistrationError(f"{label}: supports is {supports!r}; allowed: a function of the layer, or None")


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype)


def _check_new(impl: OpImpl, present: Iterable[OpImpl]) -> None:
    for other in present:
        if other.impl_id == impl.impl_id:
            raise RegistrationError(
                f"{impl.op_name} has an implementation {impl.impl_id} already, {_place(other.fn)}; "
                f"{_place(impl.fn)} needs an impl_id of its own"
            )


def _place(fn: Callable[..., Any]) -> str:
    name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
    return f"{getattr(fn, '__module__', 'unknown module')}.{name}"


def _unknown_operator(impl: OpImpl) -> str:
    known = (*KNOWN_OPERATORS, *FUNCTION_OPERATORS)
    suggestion = closest(impl.op_name, known)
    meant = f" Did you mean {suggestion}?" if suggestion else ""
    return (
        f"{impl.impl_id} registers the operator {impl.op_name!r}, which sglang_fl does not know; only "
        f"call_op({impl.op_name!r}, ...) reaches it.{meant} Known: {', '.join(known)}."
    )
