"""What every operation of a group needs: its transports, its counters and its argument checks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from sglang_fl.comm.agreement import Agreed
from sglang_fl.comm.backends.torch_dist import TorchTransport, Waiting, broadcast_packed, packed, unpack_into
from sglang_fl.comm.errors import CommError
from sglang_fl.comm.monitor import MONITOR
from sglang_fl.comm.point_to_point import PendingSends
from sglang_fl.comm.recorded import recorded
from sglang_fl.comm.ring import CallRing
from sglang_fl.comm.types import GroupContext, Transport

_Result = TypeVar("_Result")


class GroupCore:
    """State and checks of one rank's view of a group; the operations are in the classes built on it.

    Attributes:
        context, agreed: the group, and what its ranks agreed on.
        name, ranks, world_size, rank_in_group, device, backend: of the group, for callers and reports.
        counts: calls by method.
        graph_name: the group's name in a graph that Dynamo traced.
        carried_by: the backend, or with routes by size all that carry calls; for reports.
    """

    graph_name: str
    carried_by: str

    def _bind(self, context: GroupContext, agreed: Agreed, metadata: Transport | None = None) -> None:
        if agreed.transport is None:
            raise CommError(f"group {context.name}: {agreed.backend.name} was chosen, but has no transport")
        self.context = replace(context, creation_ends_s=None)
        self.agreed = agreed
        self.name = context.name
        self.backend = agreed.backend.name
        self.device = context.device
        self.ranks = context.ranks
        self.world_size = context.world_size
        self.rank_in_group = context.rank
        self.counts: dict[str, int] = defaultdict(int)
        self._device: Transport = agreed.transport
        self._metadata = metadata or host_transport(context)
        self._host: Transport = self._device if context.device.type == "cpu" else self._metadata
        self._sends = PendingSends(self.name, context.operation_timeout_s)
        # What is called on the CPU group itself: barriers and objects.
        self._waiting = Waiting(context.operation_timeout_s, context.cpu_group)
        self._host_calls = CallRing(
            f"{self.name} CPU group", self.ranks, torch.device("cpu"), interrupt=self._interrupt
        )
        self._closed = False

    def _require_usable(self) -> None:
        """Before what a destroyed or failed group would still begin.

        Raises:
            CommError: it is destroyed; or what a call of it ended with, CollectiveTimeout or PeerLost.
        """
        if self._closed:
            raise CommError(f"group {self.name} is destroyed; make a new one")
        if not MONITOR.has_concluded:
            return
        for recorder in (*self._device.recorders(), *self._metadata.recorders(), self._host_calls):
            if recorder.refusal is not None:
                raise recorder.explained(CommError(recorder.refusal))

    def _interrupt(self) -> bool:
        self._waiting.interrupt()
        return True

    def _host_call(self, operation: str, call: Callable[[], _Result]) -> _Result:
        self._require_usable()
        row = self._host_calls.enter(operation)
        try:
            result = call()
        except BaseException as error:
            told = self._host_calls.failed(row, error)
            if told is error:
                raise
            raise told from error
        self._host_calls.leave(row)
        return result

    def _broadcast_objects(self, objects: list[Any], src: int) -> None:
        """``objects`` receives rank ``src``'s, in place; pickled, over the CPU group."""
        source = self.ranks[src]
        own = packed(objects) if src == self.rank_in_group else None
        payload = self._host_call("broadcast_object_list", lambda: broadcast_packed(own, source, self._waiting))
        if own is None:
            unpack_into(objects, payload, source)

    def _check_reducible(self, transport: Transport, tensor: torch.Tensor, method: str) -> None:
        if tensor.dtype in transport.capabilities.reducible:
            if tensor.is_neg():
                raise TypeError(f"{method}, group {self.name}: a lazily negated view; call resolve_neg() first")
            return
        names = ", ".join(sorted(str(dtype) for dtype in transport.capabilities.reducible))
        raise TypeError(
            f"{method}, group {self.name}: backend {transport.name} has no sum for {tensor.dtype}; "
            f"it sums {names}. Convert the tensor first."
        )

    def _check_rank(self, method: str, parameter: str, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"{method}, group {self.name}: {parameter}={rank} is not a rank within the group "
                f"(0 to {self.world_size - 1})"
            )

    def _check_peer(self, method: str, parameter: str, rank: int) -> None:
        self._check_rank(method, parameter, rank)
        if rank == self.rank_in_group:
            raise ValueError(f"{method}, group {self.name}: {parameter}={rank} is this rank itself")

    def _check_list(self, method: str, parameter: str, tensors: Sequence[torch.Tensor]) -> None:
        if len(tensors) != self.world_size:
            raise ValueError(
                f"{method}, group {self.name}: {parameter} has {len(tensors)} tensors for {self.world_size} ranks"
            )

    def _row_sizes(self, method: str, rows: int, sizes: Sequence[int] | None) -> list[int]:
        if sizes is None:
            if rows % self.world_size:
                raise ValueError(
                    f"{method}, group {self.name}: {rows} rows cannot be divided evenly among "
                    f"{self.world_size} ranks; pass sizes"
                )
            return [rows // self.world_size] * self.world_size
        if len(sizes) != self.world_size or sum(sizes) != rows or min(sizes) < 0:
            raise ValueError(
                f"{method}, group {self.name}: sizes={list(sizes)} must be {self.world_size} numbers of rows "
                f"whose sum is {rows}"
            )
        return list(sizes)


def host_transport(context: GroupContext) -> Transport:
    """The way of CPU tensors in a group whose device is another, and of objects: its gloo group."""
    host = replace(context, name=f"{context.name} (CPU)", device=torch.device("cpu"), device_group=context.cpu_group)
    return recorded(host, TorchTransport("torch", host))
