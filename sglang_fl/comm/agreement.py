"""Ranks decide together: one bounded exchange per step, a common choice, and one error text on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sglang_fl.comm.backends.torch_dist import TorchTransport
from sglang_fl.comm.errors import AgreementError, CommError
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
_ALL_RANKS = "all ranks"


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
) -> Agreed:
    """Choose and create a backend for the group. All ranks of the group must call it.

    Probing is local, choosing is common: the first candidate in the policy's order that is usable on every
    rank. One whose creation fails anywhere is given up everywhere and the next is tried, unless ``policy``
    is strict. Kinds in ``native_kinds`` are only chosen, not created: the caller has methods of its own.

    Raises:
        AgreementError: the ranks' policies differ, nothing works on all of them, or strict mode forbids
            what does; the same text on every rank.
    """
    local = _local_selection(context, backends, policy)
    views = context.exchange("announce candidates", local)
    _same_settings(context, views)
    passed: list[PassedOver] = []
    for name in local.order:
        reason = _first_refusal(context, [view.reasons[name] for view in views])
        if reason is None:
            backend = backends[name]
            if backend.kind in native_kinds:
                _tell(context, policy, backend, passed)
                return _agreed(context, backend, None, passed, local)
            transport, reason = _create_everywhere(context, backend)
            if transport is not None:
                transport = routed(context, transport, TorchTransport("torch", context))
                _tell(context, policy, backend, passed)
                return _agreed(context, backend, transport, passed, local)
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
    """One rank's candidates in order, with the reason of each that it cannot use (empty: it can)."""

    strict: bool
    order: tuple[str, ...]
    reasons: Mapping[str, str]
    unnamed: tuple[PassedOver, ...]


def _local_selection(context: GroupContext, backends: Mapping[str, Backend], policy: Policy) -> _View:
    def refusal(backend: Backend, candidate: Candidate) -> str:
        availability = backend.probe(context)
        return policy.refusal(candidate) or ("" if availability.available else availability.reason)

    candidates = {
        backend.name: Candidate(backend.name, backend.kind, Availability.yes, vendor=backend.vendor)
        for backend in backends.values()
    }
    # Ranked without probing and without vendor rules, so that the order is the same on every rank.
    order_only = Policy(policy.prefer, policy.per_item)
    try:
        ranked = select(ITEM, candidates.values(), order_only)
    except SelectionError as error:
        raise AgreementError(f"group {context.name}: {error}") from error
    order = tuple(candidate.impl_id for candidate in ranked.usable)
    reasons = {name: refusal(backends[name], candidates[name]) for name in order}
    unnamed = tuple(entry for entry in ranked.passed_over if entry.impl_id not in order)
    return _View(policy.strict, order, reasons, unnamed)


def _same_settings(context: GroupContext, views: Sequence[_View]) -> None:
    for rank, view in enumerate(views):
        if view.order != views[0].order:
            raise AgreementError(
                f"group {context.name}: the ranks' settings order the backends differently: global rank "
                f"{context.ranks[0]} has {', '.join(views[0].order)}; global rank {context.ranks[rank]} has "
                f"{', '.join(view.order)}. Give every node the same SGLANG_FL_DIST_BACKEND, FLAGCX_PATH and "
                f"SGLANG_FL_CONFIG, and the same installed backends."
            )
        if view.strict != views[0].strict:
            modes = {True: "strict mode", False: "no strict mode"}
            raise AgreementError(
                f"group {context.name}: global rank {context.ranks[0]} has {modes[views[0].strict]}, global rank "
                f"{context.ranks[rank]} has {modes[view.strict]}. Give every node the same SGLANG_FL_STRICT and "
                f"SGLANG_FL_CONFIG."
            )


def _tell(context: GroupContext, policy: Policy, chosen: Backend, passed: Sequence[PassedOver]) -> None:
    """Say once for the group what was passed over: aloud if it was asked for by name or failed on some ranks only."""
    if context.rank or not passed:
        return
    order = policy.per_item.get(ITEM, ())
    asked_for = bool(order) and passed[0].impl_id == order[0]
    aloud = asked_for or any(not entry.reason.startswith(_ALL_RANKS) for entry in passed)
    reasons = "; ".join(f"{entry.impl_id}: {entry.reason}" for entry in passed)
    level = logging.WARNING if aloud else logging.INFO
    logger.log(level, "group %s is carried by %s. Passed over: %s", context.name, chosen.name, reasons)


def _first_refusal(context: GroupContext, reasons: Sequence[str]) -> str | None:
    refused = [(context.ranks[rank], reason) for rank, reason in enumerate(reasons) if reason]
    if not refused:
        return None
    rank, reason = refused[0]
    where = _ALL_RANKS if len(refused) == len(reasons) else f"global rank {rank}"
    return f"{where}: {reason}"


def _create_everywhere(context: GroupContext, backend: Backend) -> tuple[Transport | None, str]:
    transport: Transport | None = None
    problem = ""
    try:
        transport = backend.create(context)
    except AgreementError:
        raise  # a rank is missing: no other backend would find it, and the next step would blame those that left
    except CommError as error:
        problem = str(error)
    problems = context.exchange(f"create {backend.name}", problem)
    reason = _first_refusal(context, problems)
    if reason is None:
        return transport, ""
    if transport is not None:
        transport.close()
    return None, f"creation failed on {reason}"


def _agreed(
    context: GroupContext,
    backend: Backend,
    transport: Transport | None,
    passed: list[PassedOver],
    local: _View,
) -> Agreed:
    considered = {entry.impl_id for entry in passed} | {backend.name}
    later = [
        PassedOver(name, local.reasons[name] or f"{backend.name} comes first")
        for name in local.order
        if name not in considered
    ]
    candidate = Candidate(backend.name, backend.kind, Availability.yes, vendor=backend.vendor)
    selection = Selection(context.name, candidate, (candidate,), (*passed, *later, *local.unnamed))
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
