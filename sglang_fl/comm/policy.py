"""From settings to the order in which communication backends are tried."""

from __future__ import annotations

from sglang_fl.comm.agreement import ITEM
from sglang_fl.config import Settings
from sglang_fl.config.values import CommBackend
from sglang_fl.selection import Kind, Policy

# What is not named is not tried; a kind stands for every backend of that kind. AUTO has the order of all operators.
ORDERS: dict[CommBackend, tuple[str, ...]] = {
    CommBackend.FLAGCX: ("flagcx", Kind.VENDOR.value, Kind.REFERENCE.value),
    CommBackend.NCCL: ("nccl", Kind.REFERENCE.value),
    CommBackend.HCCL: ("hccl", Kind.REFERENCE.value),
    CommBackend.TORCH: ("torch",),
}


def communicator_policy(settings: Settings) -> Policy:
    """The policy for groups; vendor rules and strict mode are those of the operators."""
    allowed = settings.ops.allow_vendors
    return Policy(
        prefer=Kind(settings.ops.prefer.value),
        per_item={ITEM: communicator_order(settings)},
        deny_vendors=frozenset(settings.ops.deny_vendors),
        allow_vendors=None if allowed is None else frozenset(allowed),
        strict=settings.ops.strict,
    )


def communicator_order(settings: Settings) -> tuple[str, ...]:
    """The ordered tokens: those of ``communicator`` in SGLANG_FL_PER_OP, else what SGLANG_FL_DIST_BACKEND means.

    Under ``auto`` the kinds come in the order of SGLANG_FL_PREFER, as for an operator.
    """
    own = settings.ops.backends_for(ITEM)
    if own:
        return tuple(map(str, own))
    if settings.comm.backend is CommBackend.AUTO:
        return Policy(prefer=Kind(settings.ops.prefer.value)).tokens(ITEM)
    return ORDERS[settings.comm.backend]


def describe_order(settings: Settings) -> str:
    """What is asked for and which setting asks, for reports."""
    source = settings.source("comm.backend").where
    backend = f"{settings.comm.backend} (from {source})"
    if not settings.ops.backends_for(ITEM):
        return backend
    order = f"{'|'.join(communicator_order(settings))} (from {ITEM} in {settings.source('ops.backends').where})"
    return order if source == "default" else f"{order}, which wins over {backend}"


def puts_first(settings: Settings, backend: str, vendor: str) -> bool:
    """Whether the settings ask for ``vendor``'s ``backend`` by name before any other, and no rule forbids it."""
    policy = communicator_policy(settings)
    if vendor in policy.deny_vendors or (policy.allow_vendors is not None and vendor not in policy.allow_vendors):
        return False
    return communicator_order(settings)[0] in (backend, f"{Kind.VENDOR.value}:{vendor}")
