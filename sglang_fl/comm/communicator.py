"""CommunicatorFL: every collective and point-to-point transfer of one group, on the backend its ranks agreed on."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.distributed import ProcessGroup

from sglang_fl.comm.agreement import Agreed, agree
from sglang_fl.comm.discovery import discover_backends
from sglang_fl.comm.errors import CommError
from sglang_fl.comm.gathers import Gathers
from sglang_fl.comm.policy import communicator_policy
from sglang_fl.comm.reductions import Reductions
from sglang_fl.comm.sizes import SizedTransport, add_routes, settings_to_agree_on
from sglang_fl.comm.transfers import Transfers
from sglang_fl.comm.types import ClosedTransport, GroupContext, Transport
from sglang_fl.config import CommMode, Settings, load_settings
from sglang_fl.devices import detect_platform

logger = logging.getLogger(__name__)
DRAIN_LIMIT_S = 5.0


class CommunicatorFL(Reductions, Gathers, Transfers):
    """The collectives of one group of ranks.

    Ranks (``src``, ``dst``) are ranks within the group. Unless a method says otherwise every rank of the
    group must call it, in the same order. Tensors live on the group's device, or on the CPU, where they
    travel over ``cpu_group``. What only moves works for every dtype, non-contiguous tensors are staged.

    Usable without SGLang: ``CommunicatorFL(cpu_group=…, device_group=…, device=…, ranks=…)`` in any script
    that has called ``torch.distributed.init_process_group``.
    """

    def __init__(
        self,
        *,
        cpu_group: ProcessGroup,
        device_group: ProcessGroup,
        device: torch.device | str,
        ranks: Sequence[int],
        name: str = "anonymous",
        settings: Settings | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        """Agree with the other ranks on a backend and create its transport. All ranks of the group must call it.

        Args:
            cpu_group: gloo group of ``ranks``.
            device_group: torch.distributed group of the same ranks for tensors on ``device``.
            device: where this rank's tensors live.
            ranks: global ranks in group order.
            name: equal on all ranks; appears in errors and reports.
            settings: read from the environment if left out.
            timeout_s: limit for each step of creation, seconds.

        Raises:
            AgreementError: a rank is missing, the ranks' settings differ, or no backend works on all of them.
        """
        settings = settings or load_settings(platform=detect_platform())
        context = group_context(cpu_group, device_group, device, ranks, name, settings, timeout_s)
        backends, policy = discover_backends().backends, communicator_policy(settings)
        agreed = agree(context, backends, policy, also_equal=settings_to_agree_on(settings.comm))
        routes: tuple[str, ...] = ()
        if settings.comm.mode is CommMode.FASTEST:
            agreed, routes = add_routes(context, agreed, settings.comm.routes, backends, policy)
        self._bind_group(context, agreed, None, routes)

    @classmethod
    def from_agreed(
        cls,
        context: GroupContext,
        agreed: Agreed,
        metadata: Transport | None = None,
        routes: Sequence[str] = (),
    ) -> CommunicatorFL:
        """The communicator for what :func:`agree` returned; ``agreed.transport`` must not be None.

        ``metadata`` carries pickled objects and, where the device is none, CPU tensors; the gloo group if left out.
        ``routes``: the words of :func:`add_routes`, where it made the transport.
        """
        communicator = cls.__new__(cls)
        communicator._bind_group(context, agreed, metadata, routes)
        return communicator

    def _bind_group(
        self, context: GroupContext, agreed: Agreed, metadata: Transport | None, routes: Sequence[str]
    ) -> None:
        self._bind(context, agreed, metadata)
        self.routes = tuple(routes)
        self.carried_by = self.backend
        if isinstance(agreed.transport, SizedTransport):
            self.carried_by = f"by size: {', '.join(agreed.transport.names())}"
            # Bound to the object, so that a group without such routes looks none up.
            setattr(self, "all_reduce", self._all_reduce_by_route)  # noqa: B010 - a method is replaced
        self.graph_name = _name_for_graphs(self)

    def __repr__(self) -> str:
        return f"CommunicatorFL({self.name}, ranks={list(self.ranks)}, backend={self.backend})"

    def barrier(self) -> None:
        """Wait for all ranks, over the CPU group."""
        self.counts["barrier"] += 1
        torch.distributed.barrier(group=self.context.cpu_group)

    @contextmanager
    def graph_capture(self) -> Iterator[None]:
        """Nothing to prepare: transports are warm, enqueue on the current stream and allocate nothing."""
        yield

    def destroy(self) -> None:
        """Give up the transport. Local and idempotent; the groups belong to the caller.

        Waits up to ``DRAIN_LIMIT_S`` seconds for sends that are not received yet: a process that ends takes them along.
        """
        if self._closed:
            return
        self._closed = True
        lost = self._sends.drain(DRAIN_LIMIT_S)
        if lost:
            logger.warning(
                "group %s: destroyed with %d send(s) that no rank received within %g s",
                self.name,
                lost,
                DRAIN_LIMIT_S,
            )
        self._device.close()
        self._device = ClosedTransport(self.name, self._device)
        self._host = self._device if self.device.type == "cpu" else self._metadata

    @property
    def extra_bytes(self) -> int:
        """Memory that creating the group's transports took where its tensors live, bytes.

        0 for a group that shares a communicator; other processes' use of an accelerator at that moment counts as well.
        """
        return self._device.extra_bytes

    def exceptions(self) -> dict[str, str]:
        """Operations that another transport than the agreed one carries, with that one's name."""
        return self._device.exceptions()

    def status(self) -> Mapping[str, Any]:
        """Name, ranks, backend, routes by size, bytes taken and held for sends, calls by method; for reports."""
        return {
            "group": self.name,
            "ranks": list(self.ranks),
            "backend": self.backend,
            "routes": list(self.routes),
            "extra_bytes": self.extra_bytes,
            "send_bytes_held": self._sends.held_bytes,
            "calls": dict(self.counts),
        }


_groups: WeakValueDictionary[str, CommunicatorFL] = WeakValueDictionary()


def find_group(graph_name: str) -> CommunicatorFL:
    """The group of this process with that ``graph_name``.

    Raises:
        CommError: there is none any more.
    """
    group = _groups.get(graph_name)
    if group is None:
        raise CommError(f"a traced graph calls the group {graph_name}, which this process no longer has")
    return group


def _name_for_graphs(group: CommunicatorFL) -> str:
    name, number = group.name, 2
    while name in _groups:
        name, number = f"{group.name}#{number}", number + 1
    _groups[name] = group
    return name


def group_context(
    cpu_group: ProcessGroup,
    device_group: ProcessGroup,
    device: torch.device | str,
    ranks: Sequence[int],
    name: str,
    settings: Settings,
    timeout_s: float,
) -> GroupContext:
    """One rank's view of a group; ``ranks`` are global ranks in group order."""
    rank = torch.distributed.get_rank()
    if rank not in ranks:
        raise CommError(f"group {name}: global rank {rank} is not among its ranks {list(ranks)}")
    return GroupContext(
        name=name,
        ranks=tuple(ranks),
        rank=list(ranks).index(rank),
        device=torch.device(device),
        device_group=device_group,
        cpu_group=cpu_group,
        timeout_s=timeout_s,
        options={"flagcx_path": str(settings.comm.flagcx_path or "")},
        records=settings.comm.record,
    )
