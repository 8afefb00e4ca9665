"""Ranks decide together: one bounded exchange per step, a common choice, and one error text on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sglang_fl.comm.backends.torch_dist import TorchBackend
from sglang_fl.comm.discovery import discover_backends
from sglang_fl.comm.errors import AgreementError, CommError
from sglang_fl.comm.graph_mixing import to_agree_on
from sglang_fl.comm.memory import memory_in_use
from sglang_fl.comm.monitor import creation
from sglang_fl.comm.recorded import recorded
from sglang_fl.comm.routes import routed
from sglang_fl.comm.types import Backend, GroupContext, Transport
from sglang_fl.selection import (
    Availability,
    Candidate,
    Kind,
    PassedOver,
    Policy,
    Selection,
    SelectionError,
    select,
)

ITEM = "communicator"
logger = logging.getLogger(__name__)
REFERENCE = TorchBackend("torch", Kind.REFERENCE)  # carries what the agreed backend does not offer
_ALL_RANKS = "all ranks"
# What code of other distributions may raise without taking its neighbours, or the other ranks' time, with it.
BACKEND_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class Agreed:
    """What a group's ranks agreed on.

    Attributes:
        backend: the backend in use.
        transport: its transport for this group; None where the caller keeps its own methods (a vendor's).
        selection: every candidate; what was passed over, why and, if it was a peer's doing, on which rank.
        passed_over: those of them that the policy puts before the chosen one.
    """

    backend: Backend
    transport: Transport | None
    selection: Selection
    passed_over: tuple[PassedOver, ...] = ()


def agree(
    context: GroupContext,
    backends: Mapping[str, Backend],
    policy: Policy,
    native_kinds: frozenset[Kind] = frozenset(),
    also_equal: Mapping[str, str] | None = None,
) -> Agreed:
    """Choose and create a backend for the group. All ranks of the group must call it.

    Probing is local, choosing is common: the first candidate in the policy's order that is usable on every
    rank. One whose creation fails anywhere is given up everywhere and the next is tried, unless ``policy``
    is strict. A backend that only some ranks have is passed over on all. Native backends of a kind in
    ``native_kinds`` are only chosen, not created: the caller has methods of its own. ``also_equal``: further
    settings by name that decide what the ranks do next together, so that they must be equal before they do.

    Raises:
        AgreementError: the ranks' policies differ, nothing works on all of them, or strict mode forbids
            what does; the same text on every rank.
    """
    with creation(context) as begun:
        return _agree(begun, backends, policy, native_kinds, also_equal or {})


def _agree(
    context: GroupContext,
    backends: Mapping[str, Backend],
    policy: Policy,
    native_kinds: frozenset[Kind],
    also_equal: Mapping[str, str],
) -> Agreed:
    local = replace(_local_view(context, backends, policy), settings={**also_equal, **to_agree_on(context.device.type)})
    views = context.exchange("announce candidates", local)
    _same_settings(context, views)
    order = _common_order(views)
    passed: list[PassedOver] = []
    for name in order:
        reason = first_refusal(context, [view.refusal(name) for view in views])
        if reason is None:
            backend = backends[name]
            if backend.is_native and backend.kind in native_kinds:
                _tell(context, local, backend, passed)
                return _agreed(context, backend, None, passed, _others(order, backends, local))
            transport, reason = create_everywhere(context, backend)
            if transport is not None:
                transport = routed(context, transport, lambda: recorded(context, REFERENCE.create(context)))
                _tell(context, local, backend, passed)
                return _agreed(context, backend, transport, passed, _others(order, backends, local))
        passed.append(PassedOver(name, reason or ""))
        if policy.strict:
            break
    tried = "; ".join(f"{entry.impl_id}: {entry.reason}" for entry in passed)
    strict = " Strict mode allows only the first choice." if policy.strict else ""
    raise AgreementError(
        f"group {context.name}: no communication backend can be used by all ranks. Tried {tried}.{strict} "
        f"Choose another with SGLANG_FL_DIST_BACKEND, or mend what the reasons name."
    )


@dataclass(frozen=True)
class _View:
    """One rank's candidates.

    Attributes:
        strict: whether only the first choice will do.
        named: the policy's tokens in order, each with the backends of this rank that it names.
        reasons: why each of them cannot be used here; empty if it can.
        failures: what did not register on this rank, with the reason.
        settings: further settings that must be equal.
    """

    strict: bool
    named: Mapping[str, tuple[str, ...]]
    reasons: Mapping[str, str]
    failures: Mapping[str, str]
    settings: Mapping[str, str] = field(default_factory=dict)

    def refusal(self, name: str) -> str:
        """Why this rank cannot use ``name``; empty if it can."""
        if name in self.reasons:
            return self.reasons[name]
        failures = "".join(f"; {source} did not register: {text}" for source, text in self.failures.items())
        return f"no backend {name} is installed{failures}"


def _local_view(context: GroupContext, backends: Mapping[str, Backend], policy: Policy) -> _View:
    named = {token: _named_by(token, backends.values()) for token in policy.tokens(ITEM)}
    reasons = {name: local_refusal(context, backends[name], policy) for names in named.values() for name in names}
    failures = {source: text.splitlines()[0] for source, text in discover_backends().failures.items()}
    return _View(policy.strict, named, reasons, failures)


def local_refusal(context: GroupContext, backend: Backend, policy: Policy) -> str:
    """Why this rank cannot use ``backend`` for the group, by the policy's rules or its own probe; "" if it can."""
    forbidden = policy.refusal(_candidate(backend))
    if forbidden:
        return forbidden
    try:
        availability = backend.probe(context)
    except BACKEND_ERRORS as error:
        return f"its probe raised {type(error).__name__}: {error}"
    return "" if availability.available else availability.reason


def _candidate(backend: Backend) -> Candidate:
    return Candidate(backend.name, backend.kind, Availability.yes, vendor=backend.vendor)


def _named_by(token: str, backends: Iterable[Backend]) -> tuple[str, ...]:
    candidates = [_candidate(backend) for backend in backends if token == backend.name or not backend.is_route_only]
    try:
        selection = select(ITEM, candidates, Policy(per_item={ITEM: (token,)}))
    except SelectionError:
        return ()
    return tuple(candidate.impl_id for candidate in selection.usable)


def _common_order(views: Sequence[_View]) -> tuple[str, ...]:
    """Every backend that the order names on any rank; also a name in it that no rank has, so that it is missed."""
    kinds = {kind.value for kind in Kind}
    order: dict[str, None] = {}
    for token in views[0].named:
        names = sorted({name for view in views for name in view.named[token]})
        order.update(dict.fromkeys(names or ([] if token in kinds else [token])))
    return tuple(order)


def _same_settings(context: GroupContext, views: Sequence[_View]) -> None:
    for rank, view in enumerate(views):
        if list(view.named) != list(views[0].named):
            raise AgreementError(
                f"group {context.name}: the ranks' settings order the backends differently: global rank "
                f"{context.ranks[0]} has {', '.join(views[0].named)}; global rank {context.ranks[rank]} has "
                f"{', '.join(view.named)}. Give every node the same SGLANG_FL_DIST_BACKEND, FLAGCX_PATH, "
                f"SGLANG_FL_PER_OP, SGLANG_FL_PREFER and SGLANG_FL_CONFIG."
            )
        if view.strict != views[0].strict:
            modes = {True: "strict mode", False: "no strict mode"}
            raise AgreementError(
                f"group {context.name}: global rank {context.ranks[0]} has {modes[views[0].strict]}, global rank "
                f"{context.ranks[rank]} has {modes[view.strict]}. Give every node the same SGLANG_FL_STRICT and "
                f"SGLANG_FL_CONFIG."
            )
        for name in views[0].settings:
            if view.settings.get(name) != views[0].settings[name]:
                raise AgreementError(
                    f"group {context.name}: the ranks differ in {name}: global rank {context.ranks[0]} has "
                    f"{views[0].settings[name]}; global rank {context.ranks[rank]} has {view.settings.get(name)}. Give "
                    f"every node the same settings, SGLANG_FL_CONFIG among them."
                )


def _tell(context: GroupContext, local: _View, chosen: Backend, passed: Sequence[PassedOver]) -> None:
    """Say once for the group what was passed over: aloud if it was asked for by name or failed on some ranks only."""
    if context.rank or not passed:
        return
    first = next(iter(local.named))
    asked_for = first not in {kind.value for kind in Kind}
    aloud = asked_for or any(not entry.reason.startswith(_ALL_RANKS) for entry in passed)
    reasons = "; ".join(f"{entry.impl_id}: {entry.reason}" for entry in passed)
    level = logging.WARNING if aloud else logging.INFO
    logger.log(level, "group %s is carried by %s. Passed over: %s", context.name, chosen.name, reasons)


def first_refusal(context: GroupContext, reasons: Sequence[str]) -> str | None:
    """The first of the ranks' ``reasons`` with who has it; None if all are empty."""
    refused = [(context.ranks[rank], reason) for rank, reason in enumerate(reasons) if reason]
    if not refused:
        return None
    rank, reason = refused[0]
    where = _ALL_RANKS if len(refused) == len(reasons) else f"global rank {rank}"
    return f"{where}: {reason}"


def create_everywhere(context: GroupContext, backend: Backend) -> tuple[Transport | None, str]:
    """The group's transport of ``backend``, or None and the reason if any rank could not create it.

    All ranks of the group must call it.
    """
    transport: Transport | None = None
    problem = ""
    before = memory_in_use(context.device)
    try:
        transport = recorded(context, backend.create(context))
        transport.extra_bytes = max(0, memory_in_use(context.device) - before)
    except AgreementError:
        raise  # a rank is missing: no other backend would find it, and the next step would blame those that left
    except CommError as error:
        problem = str(error)
    except BACKEND_ERRORS as error:
        problem = f"{type(error).__name__}: {error}"
    problems = context.exchange(f"create {backend.name}", problem)
    reason = first_refusal(context, problems)
    if reason is None:
        return transport, ""
    if transport is not None:
        transport.close()
    return None, f"creation failed on {reason}"


def _others(order: Sequence[str], backends: Mapping[str, Backend], local: _View) -> list[PassedOver]:
    """Every candidate of this rank and why it is not used; an empty reason: it could be."""
    tokens = ", ".join(local.named)
    return [
        *(PassedOver(name, local.refusal(name)) for name in order),
        *(PassedOver(name, f"not named by the order {tokens}") for name in backends if name not in order),
        *(PassedOver(source, f"did not register: {text}") for source, text in local.failures.items()),
    ]


def _agreed(
    context: GroupContext,
    backend: Backend,
    transport: Transport | None,
    passed: list[PassedOver],
    others: list[PassedOver],
) -> Agreed:
    considered = {entry.impl_id for entry in passed} | {backend.name}
    later = [
        PassedOver(entry.impl_id, entry.reason or f"{backend.name} comes first")
        for entry in others
        if entry.impl_id not in considered
    ]
    candidate = _candidate(backend)
    selection = Selection(context.name, candidate, (candidate,), (*passed, *later))
    return Agreed(backend, transport, selection, tuple(passed))


def compare(views: Sequence[dict[str, str]]) -> None:
    """``views[r]``: field to text of global rank r. A field that only some ranks have is not compared.

    Raises:
        AgreementError: names the field, and for each value the ranks that have it.
    """
    problems = []
    for name in sorted({name for view in views for name in view}):
        by_value: dict[str, list[int]] = {}
        for rank, view in enumerate(views):
            if name in view:
                by_value.setdefault(view[name], []).append(rank)
        if len(by_value) > 1:
            values = ", ".join(f"{value!r} on rank(s) {ranks}" for value, ranks in by_value.items())
            problems.append(f"{name} is {values}")
    if problems:
        raise AgreementError(
            "the ranks differ: " + "; ".join(problems) + ". Give all nodes the same settings and the same versions."
        )
