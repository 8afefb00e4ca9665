"""Selects and binds operators' implementations by the policy, and calls them by name."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from sglang_fl.config import closest
from sglang_fl.dispatch import policy as policies
from sglang_fl.dispatch.builtin_ops import BrokenBackend, register_all
from sglang_fl.dispatch.calls import Asking, Call, Reports, make_call
from sglang_fl.dispatch.policy import RESOLVED, SelectionPolicy
from sglang_fl.dispatch.registry import FUNCTION_OPERATORS, KNOWN_OPERATORS, OpRegistry, as_op_impl
from sglang_fl.dispatch.rules import has_open_rule, refusal
from sglang_fl.dispatch.types import OpImpl
from sglang_fl.selection import Availability, Candidate, Kind, Selection, SelectionError, select

logger = logging.getLogger("sglang_fl.dispatch")

NOTHING = "No available implementation"
# Among implementations of one kind those that cannot be used come last, so that strict mode asks whether the kind
# can be used and not whether the alphabetically first vendor can.
_UNUSABLE_LAST = 1_000_000
_VENDOR_TOKEN = f"{Kind.VENDOR.value}:"


class UnknownOperatorError(SelectionError):
    """No backend offers an operator of this name, and it is none of the standard ones."""


@dataclass(frozen=True)
class Bound:
    """An operator bound for one layer.

    Attributes:
        impl: the implementation that was chosen.
        selection: why; every other candidate with its reason.
        call: what to call, with the operator's standard arguments, and its parts.
    """

    impl: OpImpl
    selection: Selection
    call: Call

    @property
    def fn(self) -> Callable[..., Any]:
        """The function to call with the operator's standard arguments."""
        return self.call.fn


class OpManager:
    """Chooses among the implementations of a registry.

    Args:
        registry: the implementations; None: every folder of ``dispatch.backends`` and every installed distribution
            with an entry point in ``sglang_fl.ops``.
        policy: the order; None: the process's settings. A :func:`policy_context` around a call wins over it.

    ``broken`` holds the backends that did not register, with the reason.
    """

    def __init__(self, registry: OpRegistry | None = None, policy: SelectionPolicy | None = None) -> None:
        self.registry = OpRegistry() if registry is None else registry
        self.broken: tuple[BrokenBackend, ...] = () if registry is not None else register_all(self.registry)
        self._policy = policy
        self._reports = Reports()
        for warning in self.warnings():
            logger.warning("[sglang_fl] %s", warning)

    def policy(self) -> SelectionPolicy:
        """The policy that holds for a call from here."""
        override = RESOLVED.get().policy
        return override or self._policy or policies.current_policy()

    def warnings(self) -> tuple[str, ...]:
        """What is wrong without being fatal, for the report."""
        left_out = (f"operator backend {broken.name} is left out, {broken.reason}" for broken in self.broken)
        return (*left_out, *self.registry.warnings())

    def vendors(self) -> tuple[str, ...]:
        """The canonical names of the vendors that registered something or failed to, sorted."""
        found = {impl.vendor for impl in self.registry.all_implementations()} | {left.vendor for left in self.broken}
        return tuple(sorted(vendor for vendor in found if vendor))

    def operators(self) -> tuple[str, ...]:
        """The standard operators, in the order of their signatures, and then what backends registered beyond them."""
        return (*KNOWN_OPERATORS, *(name for name in self.registry.operators() if name not in KNOWN_OPERATORS))

    def select(
        self,
        op_name: str,
        obj: Any = None,
        policy: SelectionPolicy | None = None,
        extra: Iterable[OpImpl] = (),
        *,
        dtype: torch.dtype | None = None,
    ) -> Selection:
        """Which implementation would be used, and why not the others; ``Candidate.payload`` is the :class:`OpImpl`.

        Args:
            op_name: the operator.
            obj: the layer; None: it is not known yet, and rules that depend on it are left open.
            policy: the order; None: :meth:`policy`.
            extra: further implementations that are candidates in this selection only.
            dtype: of the layer's input; None: not known, and rules on dtypes are asked by the function in the call.

        Raises:
            SelectionError: nothing is left, or the policy is strict and its first choice cannot be used.
            UnknownOperatorError: nobody offers such an operator.
        """
        order = self.policy() if policy is None else policy
        candidates = self.candidates(op_name, obj, order, extra, dtype=dtype)
        rules = order.for_selection()
        try:
            return select(op_name, candidates, rules)
        except SelectionError as error:
            if not order.strict:
                raise
            raise SelectionError(_strict_message(op_name, error, candidates, order)) from error

    def bind(
        self,
        op_name: str,
        obj: Any,
        policy: SelectionPolicy | None = None,
        extra: Iterable[OpImpl] = (),
        *,
        dtype: torch.dtype | None = None,
    ) -> Bound:
        """Decide once for ``obj``; what remains is to call ``Bound.fn`` with ``obj`` and the operator's arguments.

        With one candidate ``fn`` is the implementation itself. With several, an implementation that refuses a call
        (:class:`NotSupportedError`), or that raises where the operator hands no input over, leaves this one call to
        the next; after a failure of the device or of its memory the error stands. In strict mode only the first is
        ever called, and what it raises gets a note that names it. Arguments and errors are those of :meth:`select`.
        """
        order = self.policy() if policy is None else policy
        selection = self.select(op_name, obj, order, extra, dtype=dtype)
        impls = _usable(selection)
        return Bound(impls[0], selection, self._call(op_name, impls, order, obj, dtype))

    def resolve(self, op_name: str) -> Callable[..., Any]:
        """The function for calls of ``op_name`` with any layer, under :meth:`policy`. Errors as :meth:`select`."""
        order = self.policy()
        return self._call(op_name, _usable(self.select(op_name, policy=order)), order, None, None).fn

    def candidates(
        self,
        op_name: str,
        obj: Any = None,
        policy: SelectionPolicy | None = None,
        extra: Iterable[OpImpl] = (),
        *,
        dtype: torch.dtype | None = None,
    ) -> list[Candidate]:
        """Everything that :meth:`select` chooses from, in no order, backends that did not register among it.

        Raises:
            UnknownOperatorError: nobody offers such an operator.
        """
        order = self.policy() if policy is None else policy
        impls = [*self.registry.implementations(op_name), *map(as_op_impl, extra)]
        if not impls and op_name not in (*KNOWN_OPERATORS, *FUNCTION_OPERATORS):
            raise UnknownOperatorError(self._unknown(op_name))
        candidates = [_candidate(impl, obj, dtype) for impl in impls]
        if op_name in KNOWN_OPERATORS:
            candidates += [_unusable(left.name, left.kind.value, left.vendor, left.reason) for left in self.broken]
        candidates += _of_nobody(op_name, candidates, order)
        return _with_usable_first(candidates, order)

    def _call(
        self, op_name: str, impls: list[OpImpl], order: SelectionPolicy, obj: Any, dtype: torch.dtype | None
    ) -> Call:
        open_rules = Asking.EVERY_CALL if obj is None else Asking.FIRST_CALL
        asking = [open_rules if has_open_rule(impl, obj, dtype) else Asking.NEVER for impl in impls]
        return make_call(op_name, impls, asking, order.strict, self._reports)

    def _unknown(self, op_name: str) -> str:
        known = self.operators()
        suggestion = closest(op_name, known)
        meant = f" Did you mean {suggestion}?" if suggestion else ""
        return f"{NOTHING} for {op_name!r}: there is no such operator.{meant} Known: {', '.join(known)}."


def _usable(selection: Selection) -> list[OpImpl]:
    return [candidate.payload for candidate in selection.usable]


def _candidate(impl: OpImpl, obj: Any, dtype: torch.dtype | None) -> Candidate:
    def probe() -> Availability:
        availability = impl.availability()
        if not availability.available:
            return availability
        reason = refusal(impl, obj, dtype)
        return Availability.no(reason) if reason else availability

    return Candidate(impl.impl_id, Kind(impl.kind.value), cache(probe), impl.vendor or "", impl.priority, impl)


def _unusable(name: str, kind: str, vendor: str, reason: str) -> Candidate:
    return Candidate(name, Kind(kind), partial(Availability.no, reason), vendor)


def _of_nobody(op_name: str, candidates: list[Candidate], order: SelectionPolicy) -> list[Candidate]:
    """A candidate that cannot be used for each token of the operator's own order that nobody answers to."""
    found = {candidate.kind.value for candidate in candidates} | {candidate.impl_id for candidate in candidates}
    found |= {f"{_VENDOR_TOKEN}{candidate.vendor}" for candidate in candidates if candidate.vendor}
    missing = []
    for token in order.per_op_order.get(op_name, ()):
        if token in found:
            continue
        vendor = token.removeprefix(_VENDOR_TOKEN) if token.startswith(_VENDOR_TOKEN) else ""
        # Kind VENDOR without a vendor's name would be refused by an allow list, in words that name nobody.
        kind = Kind.VENDOR if vendor else Kind.REFERENCE
        missing.append(_unusable(token, kind.value, vendor, f"no backend of {token} offers {op_name}"))
    return missing


def _with_usable_first(candidates: list[Candidate], order: SelectionPolicy) -> list[Candidate]:
    rules = order.for_selection()
    kinds = [candidate.kind for candidate in candidates]

    def ranked(candidate: Candidate) -> Candidate:
        if kinds.count(candidate.kind) == 1 or (not rules.refusal(candidate) and candidate.probe().available):
            return candidate
        return replace(candidate, priority=candidate.priority - _UNUSABLE_LAST)

    return [ranked(candidate) for candidate in candidates]


def _strict_message(op_name: str, error: SelectionError, candidates: list[Candidate], order: SelectionPolicy) -> str:
    text = str(error)
    if text.startswith(NOTHING):
        return text
    selection = select(op_name, candidates, replace(order, strict=False).for_selection())
    others = "\n".join(f"  {entry.impl_id}: {entry.reason}" for entry in selection.passed_over)
    return f"{NOTHING} for {op_name}: {text}\n{others}"


_manager: OpManager | None = None
_making = False
_lock = threading.RLock()


def get_manager() -> OpManager:
    """This process's manager: made, with every backend, when it is first asked for.

    Raises:
        RuntimeError: a backend asked for it while it was registering.
    """
    global _making
    if _manager is not None:
        return _manager
    with _lock:
        if _manager is None:
            if _making:
                raise RuntimeError("a backend asked for the manager, or called an operator, while it was registering")
            _making = True
            try:
                set_manager(OpManager())
            finally:
                _making = False
        assert _manager is not None
        return _manager


def set_manager(manager: OpManager | None) -> None:
    """Make ``manager`` this process's; None: a new one is made when it is next asked for."""
    global _manager
    with _lock:
        _manager = manager
        if manager is not None:
            manager.registry.on_change(policies.forget_resolved)
    policies.forget_resolved()


def resolve_op(op_name: str) -> Callable[..., Any]:
    """The function that :func:`call_op` would call for ``op_name`` here; errors as :meth:`OpManager.select`."""
    table = RESOLVED.get()
    function = table.get(op_name)
    if function is None:
        manager = get_manager()
        generation = policies.generation()
        function = manager.resolve(op_name)
        policies.remember_resolved(table, op_name, function, generation)
    return function


def call_op(op_name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call ``op_name``'s implementation; its signature is in :class:`sglang_fl.dispatch.ops.FLBackendBase`.

    Selected at the first call, afterwards looked up by name. A layer that is called often binds instead, see
    :meth:`OpManager.bind`. Errors as :meth:`OpManager.select`, and what the implementation raises.
    """
    function = RESOLVED.get().get(op_name)
    if function is None:
        function = resolve_op(op_name)
    return function(*args, **kwargs)
