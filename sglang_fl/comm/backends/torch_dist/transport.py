"""A transport over a torch.distributed process group, whichever c10d backend it has (gloo, nccl, hccl, ...)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from sglang_fl.comm.backends.torch_dist.pairs import Pairs
from sglang_fl.comm.backends.torch_dist.waiting import BoundedWork, Waiting
from sglang_fl.comm.types import Backend, Capabilities, GroupContext, Operation, Transport, Work
from sglang_fl.selection import Availability, Kind

# Sums that have a meaning in every backend; gloo would also "sum" bool, NCCL and FlagCX would not.
REDUCIBLE = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
    }
)


class TorchTransport(Transport):
    """Collectives over ``context.device_group``, which belongs to the caller.

    On host memory each is waited for ``context.operation_timeout_s`` seconds at most; on a device torch only enqueues,
    with the stream behind it.
    """

    def __init__(self, name: str, context: GroupContext) -> None:
        """Local; what transfers on a device need comes with the first one between two ranks, see :class:`Pairs`."""
        self.name = name
        self.capabilities = Capabilities(
            operations=frozenset(Operation),
            reducible=REDUCIBLE,
            movable=REDUCIBLE,
            device_types=frozenset({context.device.type}),
        )
        self._group = context.device_group
        self._ranks = context.ranks
        self._waiting = Waiting(context.operation_timeout_s, context.device_group)
        self._is_host = context.device.type == "cpu"
        self._run: Callable[..., None] = self._waiting.run if self._is_host else self._enqueue
        self._pairs = None if self._is_host else Pairs(name, context)
        # torch.distributed sorts a group's ranks; where ours are in another order, parts change places.
        torch_ranks = dist.get_process_group_ranks(context.device_group)
        is_sorted = list(context.ranks) == torch_ranks
        self._torch_places = None if is_sorted else torch.tensor([torch_ranks.index(r) for r in context.ranks])
        self._own = context.rank
        on_gloo = self._is_host and "cpu:gloo" in dist.get_backend_config(context.device_group).split(",")
        self._reduce_scatter = self._sum_and_take if on_gloo else self._reduce_scatter_tensor

    def _enqueue(self, call: Callable[..., object], *arguments: object) -> None:
        call(*arguments, group=self._group)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """See :meth:`Transport.all_reduce`."""
        self._run(dist.all_reduce, tensor)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """See :meth:`Transport.all_gather`."""
        if self._torch_places is None:
            self._run(dist.all_gather_into_tensor, output, tensor)
            return
        gathered = torch.empty_like(output)
        self._run(dist.all_gather_into_tensor, gathered, tensor)
        parts = gathered.view(len(self._ranks), -1)
        torch.index_select(parts, 0, self._torch_places.to(parts.device), out=output.view(parts.shape))

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """See :meth:`Transport.reduce_scatter`."""
        self._reduce_scatter(output, tensor)

    def _reduce_scatter_tensor(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        if self._torch_places is not None:
            parts = tensor.view(len(self._ranks), -1)
            tensor = torch.empty_like(parts).index_copy_(0, self._torch_places.to(parts.device), parts).view(-1)
        self._run(dist.reduce_scatter_tensor, output, tensor)

    def _sum_and_take(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        # As torch does in its reduce_scatter_tensor over gloo; but the wait for its work heeds no limit (torch 2.11).
        total = tensor.clone()
        self._run(dist.all_reduce, total)
        output.copy_(total.view(len(self._ranks), -1)[self._own])

    def reduce(self, tensor: torch.Tensor, dst: int) -> None:
        """See :meth:`Transport.reduce`."""
        self._run(dist.reduce, tensor, self._ranks[dst])

    def broadcast(self, tensor: torch.Tensor, src: int) -> Work | None:
        """See :meth:`Transport.broadcast`."""
        if not self._is_host:
            on_device: Work | None = dist.broadcast(tensor, self._ranks[src], group=self._group, async_op=True)
            return on_device
        work = self._waiting.begin(dist.broadcast, tensor, self._ranks[src], async_op=True)
        return None if work is None else BoundedWork(work, self._waiting, is_transfer=False)

    def gather(self, output: torch.Tensor | None, tensor: torch.Tensor, dst: int) -> None:
        """See :meth:`Transport.gather`."""
        parts = None if output is None else list(output.view(len(self._ranks), -1))
        if parts is not None and self._torch_places is not None:
            parts = [parts[place] for place in torch.argsort(self._torch_places).tolist()]
        flat = tensor.view(-1)
        self._run(dist.gather, flat, parts, self._ranks[dst])

    def send(self, tensor: torch.Tensor, dst: int) -> Work:
        """See :meth:`Transport.send`."""
        if self._pairs is not None:
            return self._pairs.send(tensor, dst)
        return self._started(dist.isend, tensor, dst)

    def recv(self, tensor: torch.Tensor, src: int) -> Work:
        """See :meth:`Transport.recv`."""
        if self._pairs is not None:
            return self._pairs.recv(tensor, src)
        return self._started(dist.irecv, tensor, src)

    def transfer_stream(self, operation: Operation, peer: int) -> int | None:
        """See :meth:`Transport.transfer_stream`: sends have one for each receiver."""
        if self._pairs is None or operation is not Operation.SEND:
            return None
        return self._pairs.raw_stream_to(peer)

    def _started(self, call: Callable[..., Any], tensor: torch.Tensor, peer: int) -> Work:
        work = self._waiting.begin(call, tensor, self._ranks[peer])
        assert work is not None  # None only for a rank outside the group
        return BoundedWork(work, self._waiting, is_transfer=True)

    def interrupt(self) -> bool:
        """See :meth:`Transport.interrupt`."""
        if self._is_host:
            self._waiting.interrupt()
        return self._is_host

    def close(self) -> None:
        """Give up the pairs, where there are any."""
        if self._pairs is not None:
            self._pairs.close()


class TorchBackend(Backend):
    """torch.distributed over the group that the caller made."""

    def __init__(self, name: str, kind: Kind, vendor: str = "", c10d_backend: str | None = None) -> None:
        """``c10d_backend``: the only c10d backend that will do, such as ``nccl``; None takes any.

        SGLang's own methods run on the same one, so inside it they may stay.
        """
        self.name = name
        self.kind = kind
        self.vendor = vendor
        self._c10d_backend = c10d_backend
        self.is_native = c10d_backend is not None

    def probe(self, context: GroupContext) -> Availability:
        """Available if the group runs on the wanted c10d backend."""
        if self._c10d_backend is None:
            return Availability.yes()
        found = str(dist.get_backend(context.device_group))
        if found == self._c10d_backend:
            return Availability.yes()
        return Availability.no(
            f"the group's torch.distributed backend is {found} (device {context.device.type}), not {self._c10d_backend}"
        )

    def create(self, context: GroupContext) -> TorchTransport:
        """The group exists already; on a device its communicator is made now."""
        warm_up(context)
        return TorchTransport(self.name, context)


def warm_up(context: GroupContext) -> None:
    """Have torch make the group's communicator while all ranks are here; nothing on a CPU.

    All ranks of the group must call it.
    """
    if context.device.type != "cpu":
        dist.all_reduce(torch.zeros(1, device=context.device), group=context.device_group)
