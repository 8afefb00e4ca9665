"""A group in mode fastest whose routes count their calls."""

from __future__ import annotations

import torch.distributed as dist

from sglang_fl.comm.agreement import agree
from sglang_fl.comm.audit import HookClock, TimedTransport
from sglang_fl.comm.communicator import CommunicatorFL, group_context
from sglang_fl.comm.discovery import discover_backends
from sglang_fl.comm.policy import communicator_policy
from sglang_fl.comm.sizes import add_routes
from sglang_fl.config import load_settings
from sglang_fl.testing.ranks import RankContext


def counted_group(context: RankContext) -> tuple[CommunicatorFL, HookClock]:
    """The group of all ranks, and the clock whose ``carried`` has what carried how many calls of which operation."""
    settings = load_settings(platform="cpu")
    group = dist.new_group(list(range(context.world_size)), backend="gloo")
    described = group_context(group, group, "cpu", range(context.world_size), "tp:0", settings, 20.0)
    backends, policy = discover_backends().backends, communicator_policy(settings)
    clock = HookClock()
    agreed, routes = add_routes(
        described,
        agree(described, backends, policy),
        settings.comm.routes,
        backends,
        policy,
        wrap=lambda transport: TimedTransport(transport, "tp:0", clock),
    )
    return CommunicatorFL.from_agreed(described, agreed, routes=routes), clock
