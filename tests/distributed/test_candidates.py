"""Backends as candidates of the tools: which of them fail a run when they cannot be created."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from sglang_fl.comm.backends.torch_dist import TorchBackend
from sglang_fl.comm.communicator import group_context
from sglang_fl.comm.discovery import discover_backends
from sglang_fl.comm.errors import CommError
from sglang_fl.comm.tools.candidates import opened
from sglang_fl.comm.types import GroupContext, Transport
from sglang_fl.config import load_settings
from sglang_fl.selection import Kind
from sglang_fl.testing.ranks import RankContext, run_ranks


class Broken(TorchBackend):
    """Available, and then not to be created."""

    def create(self, context: GroupContext) -> Transport:  # type: ignore[override]  # it makes none
        """Fail, on all ranks."""
        raise CommError("the devices do not reach each other")


class BrokenRoute(Broken):
    """The same, for routes alone."""

    is_route_only = True


@dataclass
class LaunchOfOne:
    """What of a launch is looked at."""

    context: GroupContext
    settings: Any

    def exchange(self, stage: str, value: object) -> list[object]:
        """Of all ranks."""
        return self.context.exchange(stage, value)


def failed(context: RankContext) -> list[tuple[bool, bool]]:
    """Of each backend, whether its reason is told and whether it fails a run."""
    backends = discover_backends().backends
    for backend in (Broken("broken", Kind.VENDOR, vendor="acme"), BrokenRoute("broken_route", Kind.VENDOR, "acme")):
        backends[backend.name] = backend
    settings = load_settings(platform="cpu")
    group = dist.new_group(list(range(context.world_size)), backend="gloo")
    described = group_context(group, group, "cpu", range(context.world_size), "all", settings, 20.0)
    launch: Any = LaunchOfOne(described, settings)
    found = []
    for name in ("broken", "broken_route"):
        with opened(launch, name) as route:
            assert route.communicator is None
            found.append(("the devices do not reach each other" in route.reason, route.has_failed))
    return found


def test_what_fails_a_run() -> None:
    """Given backends that say that they are available and cannot be created, then both tell why, and one for routes
    alone fails no run: where its ranks are is only seen there."""
    assert run_ranks(failed, 2) == [[(True, True), (True, False)]] * 2
