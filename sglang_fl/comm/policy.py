"""From settings to the order in which communication backends are tried."""

from __future__ import annotations

from sglang_fl.comm.agreement import ITEM
from sglang_fl.config import Settings
from sglang_fl.config.values import CommBackend
from sglang_fl.selection import Kind, Policy

# What is not named is not tried; a kind stands for every backend of that kind.
ORDERS: dict[CommBackend, tuple[str, ...]] = {
    CommBackend.AUTO: (Kind.FLAGOS.value, Kind.VENDOR.value, Kind.REFERENCE.value),
    CommBackend.FLAGCX: ("flagcx", Kind.VENDOR.value, Kind.REFERENCE.value),
    CommBackend.NCCL: ("nccl", Kind.REFERENCE.value),
    CommBackend.HCCL: ("hccl", Kind.REFERENCE.value),
    CommBackend.TORCH: ("torch",),
}


def communicator_policy(settings: Settings) -> Policy:
    """The policy for groups; vendor rules and strict mode are those of the operators."""
    allowed = settings.ops.allow_vendors
    return Policy(
        per_item={ITEM: ORDERS[settings.comm.backend]},
        deny_vendors=frozenset(settings.ops.deny_vendors),
        allow_vendors=None if allowed is None else frozenset(allowed),
        strict=settings.ops.strict,
    )
