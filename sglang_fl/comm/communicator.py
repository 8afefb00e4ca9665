"""CommunicatorFL: every collective and point-to-point transfer of one group, on the backend its ranks agreed on."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.distributed import ProcessGroup

from sglang_fl.comm import dumps
from sglang_fl.comm.agreement import Agreed, agree
from sglang_fl.comm.discovery import discover_backends
from sglang_fl.comm.dump_signal import watch_signal
from sglang_fl.comm.dumps import include, write_dump
from sglang_fl.comm.errors import CommError
from sglang_fl.comm.gathers import Gathers
from sglang_fl.comm.members import check_groups, checked_name, checked_ranks, creation_of
from sglang_fl.comm.monitor import MONITOR, GroupWatch, begin, watch_group
from sglang_fl.comm.policy import communicator_policy
from sglang_fl.comm.recorder import Recorder
from sglang_fl.comm.reductions import Reductions
from sglang_fl.comm.sizes import SizedTransport, add_routes, end_memory, settings_to_agree_on
from sglang_fl.comm.threads import aside
from sglang_fl.comm.transfers import Transfers
from sglang_fl.comm.types import ClosedTransport, GroupContext, Transport
from sglang_fl.config import CommMode, Settings, load_settings
from sglang_fl.devices import detect_platform

logger = logging.getLogger(__name__)
END_LIMIT_S = 5.0
OPERATION_TIMEOUT_S = 600.0  # where neither a setting nor SGLang's --dist-timeout says otherwise


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
        timeout_s: float | None = None,
        operation_timeout_s: float | None = None,
        shares_communicator: bool = False,
    ) -> None:
        """Agree with the other ranks on a backend and create its transport. All ranks of the group must call it.

        Args:
            cpu_group: gloo group of ``ranks``.
            device_group: torch.distributed group of the same ranks for tensors on ``device``.
            device: where this rank's tensors live.
            ranks: global ranks in group order, each once.
            name: a text that is not empty, equal on all ranks; appears in errors and reports.
            settings: read from the environment if left out.
            timeout_s: limit for the creation, seconds; ``comm.create_timeout_s`` if left out.
            operation_timeout_s: limit for each call afterwards, seconds; ``comm.timeout_s`` if left out. A call that
                does not complete raises CollectiveTimeout, or PeerLost as soon as a process is gone, on host memory;
                on a device the process ends with code 71, since nothing that an abort leaves behind may be used.
            shares_communicator: use the library's communicator of another such group of the same ranks, if there is
                one; it saves memory, and then the calls of these groups must come in one order on all ranks: two
                threads that use one group each would get each other's values. SGLang's groups share.

        Raises:
            AgreementError: a rank is missing or has left with an error, the ranks' settings differ, or no backend works
                on all of them.
            CommError: the name is no text or empty; ``ranks`` has one that does not exist, one twice or not this one;
                a process group is none.
            ValueError: a limit is no number of seconds from a millisecond to a year.
        """
        made = creation_of(name, ranks, cpu_group)
        with made.telling():
            settings = settings or load_settings(platform=detect_platform())
            described = group_context(
                cpu_group, device_group, device, made.ranks, name, settings, timeout_s, operation_timeout_s
            )
            check_groups(name, cpu_group=cpu_group, device_group=device_group)
            if described.records and described.world_size > 1:
                dump_on_signal()  # a creation that hangs can be looked into as well
            context = begin(replace(described, shares_communicator=shares_communicator, creation=made))
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
        self._watch = context.watch if isinstance(context.watch, GroupWatch) else watch_group(context)
        self._watch.created(self.recorders)
        include(self)
        if context.records and self.world_size > 1:
            for recorder in self.recorders():
                self._watch(recorder)  # what happens before the monitor's next look has names, too
            dump_on_signal()

    def __repr__(self) -> str:
        return f"CommunicatorFL({self.name}, ranks={list(self.ranks)}, backend={self.backend})"

    def barrier(self) -> None:
        """Wait for all ranks, over the CPU group.

        Raises:
            CollectiveTimeout: they have not all come within the limit; PeerLost: a process is gone.
        """
        self.counts["barrier"] += 1
        self._host_call("barrier", lambda: self._waiting.run(torch.distributed.barrier))

    def recorders(self) -> tuple[Recorder, ...]:
        """What records this group's calls; empty where ``comm.record`` is off, and once it is destroyed."""
        if self._closed or not self.context.records:
            return ()
        found = (*self._device.recorders(), *self._metadata.recorders(), self._host_calls)
        return tuple(dict.fromkeys(found))

    def dump(self, reason: str = "on request") -> Path:
        """Write this group's recorded calls as JSON into ``comm.dump_dir``; local. Returns the file.

        Raises:
            DumpError: the folder cannot be used.
        """
        return write_dump(reason, self.recorders(), MONITOR.dump_folder)

    @contextmanager
    def graph_capture(self) -> Iterator[None]:
        """Nothing to prepare: transports are warm, enqueue on the current stream and allocate nothing."""
        yield

    def destroy(self) -> None:
        """Give up the transport. Local and idempotent; the groups belong to the caller.

        Waits for sends that are not received yet, since a process that ends takes them along, and for the library, both
        together ``END_LIMIT_S`` seconds at most; what does not come to its end is abandoned with a warning. So is a
        communicator whose calls are in a CUDA graph: a library waits for the graph that may be replayed.
        """
        if self._closed:
            return
        ends_s = time.monotonic() + END_LIMIT_S
        lost = self._sends.close(END_LIMIT_S)
        if lost:
            logger.warning("group %s: destroyed with %s", self.name, lost)
        in_graphs = any(recorder.has_captured() for recorder in self.recorders())
        self._closed = True
        end_memory(self)
        self._watch.ended()
        self._end(self._device, in_graphs, ends_s - time.monotonic())
        self._device, self._metadata = (ClosedTransport(self.name, was) for was in (self._device, self._metadata))
        self._host = self._device

    def _end(self, transport: Transport, in_graphs: bool, limit_s: float) -> None:
        if in_graphs:
            logger.warning("group %s: calls of it are in a CUDA graph, its communicator is left as it is", self.name)
            _abandoned.append(transport)
            return
        # A library's destroy may wait for peers that are gone; most take milliseconds.
        why = f"did not end within {END_LIMIT_S:g} s"
        try:
            has_ended = aside(partial(_close, self.name, transport), "sglang_fl-destroy").wait(max(0.5, limit_s))
        except CommError as error:
            why, has_ended = f"cannot be ended: {error}", False
        if not has_ended:
            logger.warning("group %s: %s %s; it is abandoned", self.name, transport.name, why)
            _abandoned.append(transport)

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


_abandoned: list[Transport] = []  # never collected: a library may still use what they hold


def _close(name: str, transport: Transport) -> None:
    try:
        transport.close()
    except CommError as error:
        logger.warning("group %s: destroyed, but not in good order: %s", name, error)


def dump_calls(reason: str = "on request") -> Path:
    """Write the recorded calls of all groups of this process as JSON into ``comm.dump_dir``; local. Returns the file.

    Raises:
        DumpError: the folder cannot be used.
    """
    path = dumps.dump_calls(reason, MONITOR.dump_folder)
    logger.info("[sglang_fl] the recorded calls are in %s: %s", path, reason)
    return path


def dump_on_signal() -> None:
    """Let SIGUSR1 write a dump of this process's calls; idempotent. Why it cannot is logged, once."""
    reason = watch_signal(lambda: dump_calls("SIGUSR1"))
    if reason:
        logger.warning("[sglang_fl] %s", reason)


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
    timeout_s: float | None = None,
    operation_timeout_s: float | None = None,
) -> GroupContext:
    """One rank's view of a group; ``ranks`` are global ranks in group order. Limits left out are the settings'.

    Raises:
        CommError: this rank is not among them, one of them does not exist or is there twice, or the name is none.
        ValueError: a limit is no number of seconds from a millisecond to a year.
    """
    MONITOR.dump_folder = settings.comm.dump_dir
    members = checked_ranks(checked_name(name), ranks)
    return GroupContext(
        name=name,
        ranks=members,
        rank=members.index(torch.distributed.get_rank()),
        device=torch.device(device),
        device_group=device_group,
        cpu_group=cpu_group,
        timeout_s=settings.comm.create_timeout_s if timeout_s is None else timeout_s,
        operation_timeout_s=_operation_limit_s(settings) if operation_timeout_s is None else operation_timeout_s,
        options={"flagcx_path": str(settings.comm.flagcx_path or "")},
        records=settings.comm.record,
    )


def _operation_limit_s(settings: Settings) -> float:
    own = settings.comm.timeout_s
    return OPERATION_TIMEOUT_S if own is None else own
