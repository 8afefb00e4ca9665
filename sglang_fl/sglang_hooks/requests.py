"""Watches how SGLang's schedulers hand requests to each other: there a rank waits while nothing is asked of a server.

SGLang does so over the gloo groups of torch.distributed, around CommunicatorFL, and without a limit of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from sglang_fl.comm.dumps import include
from sglang_fl.comm.monitor import MONITOR
from sglang_fl.comm.monitor.ending import end_process
from sglang_fl.comm.recorder import Recorder
from sglang_fl.comm.ring import CallRing
from sglang_fl.sglang_hooks.registration import Hook

_UTILS = "sglang.srt.utils.common"
_CPU = torch.device("cpu")


class RequestRing(CallRing):
    """The calls of one group, or of one direction of a pair; one that is stuck ends only with its process."""

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        super().__init__(name, ranks, _CPU, interrupt=self._end)

    def _end(self) -> bool:
        """Called by the monitor once it has found, and written, why the call cannot complete."""
        if self.under_way() is not None:
            end_process(self.refusal or "")
        return True


@dataclass(eq=False)
class Requests:
    """What the schedulers' exchanges of requests are recorded in.

    Attributes:
        limit_s: how long one may take, seconds.
    """

    key: ClassVar[str] = ""  # an exchange that cannot complete ends the process
    limit_s: Callable[[], float]
    _rings: dict[Any, RequestRing | None] = field(default_factory=dict)

    def recorders(self) -> tuple[Recorder, ...]:
        """For the monitor and the dumps."""
        return tuple(ring for ring in list(self._rings.values()) if ring is not None)

    def operation_limit_s(self) -> float:
        """For the monitor."""
        return self.limit_s()

    def hooks(self) -> list[Hook]:
        """Around the two functions that every such exchange goes through."""
        return [
            Hook(f"{_UTILS}.broadcast_pyobj", self._broadcast),
            Hook(f"{_UTILS}.point_to_point_pyobj", self._point_to_point),
        ]

    def _broadcast(
        self,
        original: Callable[..., Any],
        data: Any,
        rank: int,
        dist_group: Any = None,
        src: int = 0,
        force_cpu_device: bool = True,
    ) -> Any:
        ring = self._rings.get(dist_group) or self._group_ring(dist_group)
        arguments = (data, rank, dist_group, src, force_cpu_device)
        return _recorded(ring, "broadcast of requests", src, original, *arguments)

    def _point_to_point(
        self,
        original: Callable[..., Any],
        data: Any,
        rank: int,
        group: Any = None,
        src: int = 0,
        dst: int = 1,
        async_send: bool = False,
    ) -> Any:
        ring = self._pair_ring(src, dst) if rank in (src, dst) else None
        operation, peer = ("send", dst) if rank == src else ("recv", src)
        return _recorded(ring, operation, peer, original, data, rank, group, src, dst, async_send)

    def _group_ring(self, group: Any) -> RequestRing | None:
        if group not in self._rings:
            ranks = tuple(dist.get_process_group_ranks(group))
            if len(ranks) == 1:
                self._rings[group] = None
            else:
                self._add(group, RequestRing(f"requests of {list(ranks)}", ranks))
        return self._rings[group]

    def _pair_ring(self, src: int, dst: int) -> RequestRing | None:
        if (src, dst) not in self._rings:
            self._add((src, dst), RequestRing(f"requests {src}>{dst}", (src, dst)))
        return self._rings[src, dst]

    def _add(self, key: Any, ring: RequestRing) -> None:
        if not self.recorders():
            include(self)
            MONITOR.watch(self)
        self._rings[key] = ring
        MONITOR.notice(ring, self.limit_s())


def _recorded(
    ring: RequestRing | None, operation: str, peer: int, original: Callable[..., Any], *arguments: Any
) -> Any:
    if ring is None:
        return original(*arguments)
    row = ring.enter(operation, None, 0, peer)
    try:
        result = original(*arguments)
    except BaseException as error:
        told = ring.failed(row, error)
        if told is error:
            raise
        raise told from error
    ring.leave(row)
    return result
