"""What each fused operator and each collective would get here, what was passed over and why, in a child process."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang_fl.cli.doctor.report import Choice, Finding, Other, Report
from sglang_fl.config import CommBackend, CommMode, Settings, SettingsError, SourceKind, load_settings

if TYPE_CHECKING:
    from sglang_fl.comm.types import Backend, GroupContext
    from sglang_fl.dispatch.explanation import Explanation
    from sglang_fl.selection import Policy, Selection

EXPLICIT = (SourceKind.ENVIRONMENT, SourceKind.YAML)
_PROBE_LIMIT_S = 10.0
_COMM_ACTION = "Mend what the reason names, or choose another with SGLANG_FL_DIST_BACKEND."
_ROUTES_ACTION = "Correct SGLANG_FL_COMM_ROUTES."
FLAGCX = "flagcx"


def process_settings() -> Settings:
    """This process's; where they are wrong, which the parent tells, those of an environment without any."""
    from sglang_fl.devices import detect_platform

    platform = detect_platform()
    try:
        return load_settings(platform=platform)
    except SettingsError:
        return load_settings({}, platform)


def operators() -> Report:
    """What each fused operator gets, as ``explain`` tells it."""
    from sglang_fl.cli.explain import _sglangs_own
    from sglang_fl.dispatch import configure, get_manager
    from sglang_fl.dispatch.explanation import explanation
    from sglang_fl.sglang_hooks.operators.layer import off_reason

    chosen = process_settings()
    configure(chosen)
    found = [explanation(name, extra=_sglangs_own(name)) for name in get_manager().operators()]
    report = Report(operators=[_operator(each) for each in found])
    if not off_reason(chosen):
        _judge(report, chosen, found)
    return report


def _operator(found: Explanation) -> Choice:
    chosen = next((row for row in found.rows if row.is_chosen), None)
    others = tuple(Other(row.impl_id, row.reason) for row in found.rows if not row.is_chosen)
    note = found.problem or (chosen.reason if chosen else "")
    return Choice(found.op_name, chosen.impl_id if chosen else "", others, found.order, note)


def _judge(report: Report, chosen: Settings, found: list[Explanation]) -> None:
    """Nothing to run on is a problem; where an order's first entry is not the one in use, its fallback is at work."""
    from sglang_fl.dispatch.registry import FUNCTION_OPERATORS

    action = "Mend what the reasons name, or change the order."
    without = [each for each in found if each.problem and each.op_name not in FUNCTION_OPERATORS]
    if without:
        names = ", ".join(each.op_name for each in without)
        strict = f", with {chosen.source('ops.strict').where}" if chosen.ops.strict else ""
        text = f"nothing can run {names}{strict}: {_reasons(without[0])}"
        report.problems.append(Finding("operators", text, action))
    orders = chosen.source("ops.backends").where
    for each in found:
        own = chosen.ops.backends_for(each.op_name)
        if own and not each.problem and not _is_of(str(own[0]), _candidate_of(each)):
            taken = _candidate_of(each)[1]
            text = f"{orders} puts {own[0]} first for {each.op_name}, which gets {taken}: {_reasons(each)}"
            report.warnings.append(Finding("operators", text, action))
    preferred = chosen.source("ops.prefer")
    by_preference = [each for each in found if not each.problem and not chosen.ops.backends_for(each.op_name)]
    kinds = {_candidate_of(each)[0] for each in by_preference}
    if preferred.kind in EXPLICIT and kinds and chosen.ops.prefer.value not in kinds:
        text = f"{preferred.where} prefers {chosen.ops.prefer}, which no operator gets: {_reasons(by_preference[0])}"
        report.warnings.append(Finding("operators", text, action))


def _reasons(found: Explanation) -> str:
    rows = [
        row for row in found.rows if not row.is_chosen and not row.reason.startswith(("available, but", "not named"))
    ]
    return "; ".join(f"{row.impl_id}: {row.reason}" for row in rows)


def _candidate_of(found: Explanation) -> tuple[str, str, str]:
    """Kind, id and vendor of what an operator got; empty where it got nothing."""
    from sglang_fl.dispatch import get_manager

    chosen = next((row.impl_id for row in found.rows if row.is_chosen), "")
    for impl in get_manager().registry.implementations(found.op_name):
        if impl.impl_id == chosen:
            return impl.kind.value, impl.impl_id, impl.vendor or ""
    vendor = chosen.partition(" ")[0].removeprefix("vendor.") if chosen.startswith("vendor.") else ""
    return ("vendor" if vendor else "", chosen, vendor)


def _is_of(token: str, candidate: tuple[str, str, str]) -> bool:
    kind, name, vendor = candidate
    return bool(name) and token in (kind, name, f"vendor:{vendor}")


def collectives() -> Report:
    """What a group of this device would get, asked of each backend with a group of this process alone."""
    import torch.distributed as dist

    from sglang_fl.comm.policy import communicator_policy
    from sglang_fl.comm.types import Operation

    chosen = process_settings()
    context = _context(chosen)
    policy = communicator_policy(chosen)
    selection, problem = _select(context, policy)
    report = Report()
    if problem and not _is_flagcx_told(chosen):
        report.problems.append(Finding("collectives", problem, _COMM_ACTION))
    report.problems += _not_as_asked(chosen, selection)
    report.problems += _unknown_routes(chosen)
    report.warnings += _idle_routes(chosen)
    for operation in Operation:
        report.collectives.append(_collective(operation.value, chosen, context, selection))
    dist.destroy_process_group()
    return report


def _context(chosen: Settings) -> GroupContext:
    """A group of one rank. Neither gloo nor NCCL connects anything for it, nor touches the device."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    from sglang_fl.comm.communicator import group_context
    from sglang_fl.comm.tools.launch import detect_device_type

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # what is wrong with the user's is the network section's matter
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    where = torch.device(detect_device_type(chosen))
    cpu_group: Any = dist.new_group([0], backend="gloo")
    device_group: Any = dist.new_group([0], backend=dist.get_default_backend_for_device(where))
    return group_context(cpu_group, device_group, where, [0], "doctor", chosen, _PROBE_LIMIT_S)


def _select(context: GroupContext, policy: Policy) -> tuple[Selection, str]:
    """The choice, and why strict mode, or nothing, forbids it; empty if it stands."""
    from sglang_fl.comm.agreement import ITEM, local_refusal
    from sglang_fl.comm.discovery import discover_backends
    from sglang_fl.selection import Availability, Candidate, PassedOver, Selection, SelectionError, select

    registry = discover_backends()

    def probe(backend: Backend) -> Availability:
        reason = local_refusal(context, backend, policy)
        return Availability.no(reason) if reason else Availability.yes()

    candidates = [
        Candidate(each.name, each.kind, partial(probe, each), each.vendor) for each in registry.backends.values()
    ]
    broken = tuple(PassedOver(name, f"did not register: {text}") for name, text in registry.failures.items())
    problem = ""
    try:
        select(ITEM, candidates, policy)
    except SelectionError as error:
        problem = str(error)
    try:
        found = select(ITEM, candidates, replace(policy, strict=False))
    except SelectionError:
        reasons = (PassedOver(each.impl_id, each.probe().reason or "not named by the order") for each in candidates)
        return Selection(ITEM, None, (), (*reasons, *broken)), problem
    return replace(found, passed_over=(*found.passed_over, *broken)), problem


def _not_as_asked(chosen: Settings, selection: Selection) -> list[Finding]:
    from sglang_fl.comm.agreement import ITEM
    from sglang_fl.comm.policy import communicator_order, describe_order
    from sglang_fl.selection import Kind, PassedOver

    own = chosen.ops.backends_for(ITEM)
    backend = chosen.comm.backend
    is_named = chosen.source("comm.backend").kind in EXPLICIT and backend is not CommBackend.AUTO
    if selection.chosen is None or not (own or is_named):
        return []
    first = communicator_order(chosen)[0]
    taken = selection.chosen
    if _is_of(first, (taken.kind.value, taken.impl_id, taken.vendor)) or _is_flagcx_told(chosen):
        return []
    reasons = [each for each in selection.passed_over if first in (each.impl_id, Kind.VENDOR.value)] or [
        PassedOver(first, "nothing here is of that name")
    ]
    words = "; ".join(f"{each.impl_id}: {each.reason}" for each in reasons)
    found = f"asked for is {describe_order(chosen)}, and groups would get {taken.impl_id}; {words}"
    return [Finding("collectives", found, _COMM_ACTION)]


def _collective(name: str, chosen: Settings, context: GroupContext, selection: Selection) -> Choice:
    from sglang_fl.comm.agreement import REFERENCE
    from sglang_fl.comm.policy import communicator_order

    taken = selection.chosen
    others = tuple(Other(each.impl_id, each.reason) for each in selection.passed_over)
    order = ", ".join(communicator_order(chosen))
    if taken is None:
        return Choice(name, "", others, order, "no backend can be used: groups cannot be made")
    notes = [_routes(name, chosen)]
    if taken.impl_id == FLAGCX and name not in _flagcx_operations(chosen):
        notes.append(f"{FLAGCX} lacks it")
        return Choice(name, REFERENCE.name, others, order, "; ".join(filter(None, notes)))
    if context.device.type != "cpu" and taken.kind.value == "vendor":
        notes.append("inside SGLang its own methods")
    return Choice(name, taken.impl_id, others, order, "; ".join(filter(None, notes)))


def _routes(name: str, chosen: Settings) -> str:
    """Mode fastest: what carries a call of this operation instead, by its size."""
    if chosen.comm.mode is not CommMode.FASTEST:
        return ""
    own = next((order.routes for order in chosen.comm.routes if order.op == name), ())
    return f"by size: {'|'.join(map(str, own))}" if own else ""


def _unknown_routes(chosen: Settings) -> list[Finding]:
    """A server in mode fastest ends on a route whose backend no rank has."""
    from sglang_fl.comm.discovery import discover_backends
    from sglang_fl.comm.route_table import NATIVE

    if chosen.comm.mode is not CommMode.FASTEST:
        return []
    known = [*sorted(discover_backends().backends), NATIVE]
    named = dict.fromkeys(route.backend for order in chosen.comm.routes for route in order.routes)
    where = chosen.source("comm.routes").where
    return [
        Finding(
            "collectives", f"{where} names {name!r}, which no rank has; there are {', '.join(known)}", _ROUTES_ACTION
        )
        for name in named
        if name not in known
    ]


def _idle_routes(chosen: Settings) -> list[Finding]:
    source = chosen.source("comm.routes")
    if source.kind not in EXPLICIT or chosen.comm.mode is CommMode.FASTEST:
        return []
    found = f"comm.routes (from {source.where}) has no effect: the mode is {chosen.comm.mode}"
    return [Finding("collectives", found, "Set SGLANG_FL_COMM_MODE=fastest, or unset it.")]


def _is_flagcx_told(chosen: Settings) -> bool:
    """Whether FlagCX comes first and cannot be opened, which is a problem of its own already."""
    from sglang_fl.comm.backends.flagcx import FlagCXError
    from sglang_fl.comm.policy import communicator_order

    if communicator_order(chosen)[0] != FLAGCX:
        return False
    try:
        _flagcx_operations(chosen)
    except FlagCXError:
        return True
    return False


def _flagcx_operations(chosen: Settings) -> frozenset[str]:
    """Of the library that the collectives' probe has opened."""
    from sglang_fl.comm.backends.flagcx import FlagCXLibrary

    path = chosen.comm.flagcx_path
    library = FlagCXLibrary.open("" if path is None else path)
    return frozenset(operation.value for operation in library.capabilities.operations)
