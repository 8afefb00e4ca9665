"""CommunicatorFL: every collective and point-to-point transfer of one group, on the backend its ranks agreed on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup

from sglang_fl.comm import tensor_dict as tensor_dicts
from sglang_fl.comm.agreement import Agreed, agree
from sglang_fl.comm.backends.torch_dist import TorchTransport
from sglang_fl.comm.discovery import discover_backends
from sglang_fl.comm.errors import CommError
from sglang_fl.comm.layout import as_movable, check_sizes, gather_to_dim, normalized_dim, split_rows
from sglang_fl.comm.point_to_point import P2PWork, PendingSends, size_bytes
from sglang_fl.comm.policy import communicator_policy
from sglang_fl.comm.types import GroupContext, Transport
from sglang_fl.config import Settings, load_settings


class CommunicatorFL:
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
        settings = settings or load_settings()
        context = group_context(cpu_group, device_group, device, ranks, name, settings, timeout_s)
        agreed = agree(context, discover_backends().backends, communicator_policy(settings))
        self._bind(context, agreed)

    @classmethod
    def from_agreed(cls, context: GroupContext, agreed: Agreed, metadata: Transport | None = None) -> CommunicatorFL:
        """The communicator for what :func:`agree` returned; ``agreed.transport`` must not be None.

        ``metadata`` carries pickled objects and, where the device is none, CPU tensors; the gloo group if left out.
        """
        communicator = cls.__new__(cls)
        communicator._bind(context, agreed, metadata)
        return communicator

    def _bind(self, context: GroupContext, agreed: Agreed, metadata: Transport | None = None) -> None:
        if agreed.transport is None:
            raise CommError(f"group {context.name}: {agreed.backend.name} was chosen, but has no transport")
        self.context = context
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
        self._sends = PendingSends()
        self._closed = False

    def __repr__(self) -> str:
        return f"CommunicatorFL({self.name}, ranks={list(self.ranks)}, backend={self.backend})"

    # Reductions

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place; returns ``input_``.

        Raises:
            TypeError: the backend has no sum for this dtype; before anything is sent.
        """
        self.counts["all_reduce"] += 1
        if self.world_size == 1:
            return input_
        transport = self._host if input_.is_cpu else self._device
        self._check_reducible(transport, input_, "all_reduce")
        if input_.is_contiguous():
            transport.all_reduce(input_)
            return input_
        staged = input_.contiguous()
        transport.all_reduce(staged)
        return input_.copy_(staged)

    def reduce_scatter_tensor(self, output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        """``output`` receives this rank's share (1 / world_size of the elements) of the sum of ``input``."""
        self.counts["reduce_scatter_tensor"] += 1
        check_sizes("reduce_scatter_tensor", self, input, output)
        return self._reduce_scatter_into(output, input)

    def reduce_scatter(self, output: torch.Tensor, input_list: Sequence[torch.Tensor]) -> torch.Tensor:
        """``output`` receives the sum over the ranks of ``input_list[rank]``; sizes may differ between ranks."""
        self.counts["reduce_scatter"] += 1
        self._check_list("reduce_scatter", "input_list", input_list)
        if input_list[self.rank_in_group].numel() != output.numel():
            raise ValueError(
                f"reduce_scatter, group {self.name}: output has {output.numel()} elements, "
                f"input_list[{self.rank_in_group}] has {input_list[self.rank_in_group].numel()}"
            )
        flat = torch.cat([part.reshape(-1) for part in input_list])
        sizes = [part.numel() for part in input_list]
        return output.copy_(self._reduce_scatter_rows(flat, sizes).view(output.shape))

    def reduce_scatterv(
        self,
        input_: torch.Tensor,
        output: torch.Tensor | None = None,
        sizes: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Rank r receives rows ``sum(sizes[:r])`` to ``sum(sizes[:r + 1])`` of the sum of ``input_``.

        ``sizes``: rows for each rank, equal on all ranks; left out, the rows are divided evenly.

        Raises:
            ValueError: ``sizes`` has the wrong length or sum, or ``output`` the wrong shape.
        """
        self.counts["reduce_scatterv"] += 1
        rows = self._row_sizes("reduce_scatterv", input_.shape[0], sizes)
        shape = (rows[self.rank_in_group], *input_.shape[1:])
        if output is not None and tuple(output.shape) != shape:
            raise ValueError(f"reduce_scatterv, group {self.name}: output has shape {tuple(output.shape)}, not {shape}")
        result = self._reduce_scatter_rows(input_.contiguous(), rows)
        return result if output is None else output.copy_(result)

    # Gathers

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        """``output`` (world_size times the elements) receives every rank's ``input`` in rank order."""
        self.counts["all_gather_into_tensor"] += 1
        check_sizes("all_gather_into_tensor", self, output, input)
        return self._all_gather_into(output, input)

    def all_gather(
        self,
        input_: torch.Tensor,
        dim: int = -1,
        output_tensor_list: Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor | None:
        """Concatenation along ``dim`` of every rank's ``input_``.

        With ``output_tensor_list`` (one tensor a rank) the parts go there, and None is returned.
        """
        self.counts["all_gather"] += 1
        if output_tensor_list is not None:
            self._all_gather_list(output_tensor_list, input_)
            return None
        if self.world_size == 1:
            return input_
        dim = normalized_dim("all_gather", dim, input_)
        output = torch.empty((self.world_size, *input_.shape), dtype=input_.dtype, device=input_.device)
        self._all_gather_into(output, input_)
        return gather_to_dim(output, dim)

    def all_gatherv(
        self,
        input_: torch.Tensor | Sequence[torch.Tensor],
        sizes: Sequence[int] | None = None,
    ) -> list[torch.Tensor]:
        """For each input the rows of all ranks in rank order, always as a list.

        ``sizes``: rows of each rank, equal on all ranks; left out, all ranks have as many rows as this one.

        Raises:
            ValueError: ``sizes`` has the wrong length, or this rank's entry is not its number of rows.
        """
        self.counts["all_gatherv"] += 1
        inputs = [input_] if isinstance(input_, torch.Tensor) else list(input_)
        return [self._all_gather_rows(tensor, sizes) for tensor in inputs]

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """On rank ``dst`` the concatenation along ``dim`` of every rank's ``input_``; None elsewhere."""
        self.counts["gather"] += 1
        if self.world_size == 1:
            return input_
        self._check_rank("gather", "dst", dst)
        dim = normalized_dim("gather", dim, input_)
        transport = self._host if input_.is_cpu else self._device
        tensor = as_movable(transport, input_.contiguous())
        if self.rank_in_group != dst:
            transport.gather(None, tensor, dst)
            return None
        output = torch.empty((self.world_size, *input_.shape), dtype=input_.dtype, device=input_.device)
        transport.gather(as_movable(transport, output), tensor, dst)
        return gather_to_dim(output, dim)

    # Broadcasts

    def broadcast(self, input_: torch.Tensor, src: int = 0) -> torch.Tensor:
        """``input_`` receives rank ``src``'s, in place; returns ``input_``."""
        self.counts["broadcast"] += 1
        self._check_rank("broadcast", "src", src)
        if self.world_size == 1:
            return input_
        transport = self._host if input_.is_cpu else self._device
        staged = input_.contiguous()
        work = transport.broadcast(as_movable(transport, staged), src)
        if work is not None:
            work.wait()
        return input_ if staged is input_ else input_.copy_(staged)

    def broadcast_tensor_dict(self, tensor_dict: dict[str, Any] | None = None, src: int = 0) -> dict[str, Any] | None:
        """Every rank receives rank ``src``'s dictionary; other values than tensors travel pickled."""
        self.counts["broadcast_tensor_dict"] += 1
        self._check_rank("broadcast_tensor_dict", "src", src)
        return tensor_dicts.broadcast(self, tensor_dict, src)

    # Point to point

    def send(self, tensor: torch.Tensor, dst: int | None = None) -> None:
        """Send to ``dst`` (the next rank if left out), which must call :meth:`recv`; does not wait for it.

        ``tensor`` may be changed or dropped as soon as this returns.
        """
        self.counts["send"] += 1
        dst = (self.rank_in_group + 1) % self.world_size if dst is None else dst
        self._check_peer("send", "dst", dst)
        self.send_held(tensor, dst)

    def recv(self, size: torch.Size, dtype: torch.dtype, src: int | None = None) -> torch.Tensor:
        """A new tensor of ``size`` and ``dtype`` on the group's device, from ``src`` (the previous rank)."""
        self.counts["recv"] += 1
        src = (self.rank_in_group - 1) % self.world_size if src is None else src
        self._check_peer("recv", "src", src)
        tensor = torch.empty(size, dtype=dtype, device=self.device)
        self.recv_into(tensor, src)
        return tensor

    def send_tensor_dict(
        self,
        tensor_dict: dict[str, Any],
        dst: int | None = None,
        all_gather_group: Any = None,
        async_send: bool = False,
    ) -> Any:
        """Send a dictionary to ``dst`` (the next rank if left out), which must call :meth:`recv_tensor_dict`.

        Never waits for the receiver. With ``all_gather_group`` (of SGLang or of this class) each of its
        ranks sends its share of a tensor whose elements it can divide.

        Returns:
            With ``async_send`` the works to wait on before a tensor is changed; without, an empty list.
            In a group of one rank, the dictionary, as SGLang does.
        """
        self.counts["send_tensor_dict"] += 1
        if self.world_size == 1:
            return tensor_dict
        dst = (self.rank_in_group + 1) % self.world_size if dst is None else dst
        self._check_peer("send_tensor_dict", "dst", dst)
        return tensor_dicts.send(self, tensor_dict, dst, all_gather_group, async_send)

    def recv_tensor_dict(self, src: int | None = None, all_gather_group: Any = None) -> dict[str, Any] | None:
        """The dictionary that ``src`` (the previous rank) sends; None in a group of one rank."""
        self.counts["recv_tensor_dict"] += 1
        if self.world_size == 1:
            return None
        src = (self.rank_in_group - 1) % self.world_size if src is None else src
        self._check_peer("recv_tensor_dict", "src", src)
        return tensor_dicts.receive(self, src, all_gather_group)

    def isend(self, tensor: torch.Tensor, dst: int) -> P2PWork:
        """Start to send; the returned work holds the buffer that is read until it is done."""
        transport = self._host if tensor.is_cpu else self._device
        return _start_send(transport, tensor.contiguous(), dst)

    def send_held(self, tensor: torch.Tensor, dst: int) -> None:
        """Send a copy of ``tensor``, held until it is done, and return at once."""
        transport = self._host if tensor.is_cpu else self._device
        self._sends.reserve(size_bytes(tensor))
        self._sends.add(_start_send(transport, tensor.clone(memory_format=torch.contiguous_format), dst))

    def recv_into(self, tensor: torch.Tensor, src: int) -> None:
        """Receive into ``tensor``, which must be contiguous."""
        transport = self._host if tensor.is_cpu else self._device
        transport.recv(as_movable(transport, tensor), src).wait()

    def isend_object_part(self, tensor: torch.Tensor, dst: int) -> P2PWork:
        """As :meth:`isend`, for metadata: always over the CPU group."""
        return _start_send(self._metadata, tensor, dst)

    def send_object_part(self, tensor: torch.Tensor, dst: int) -> None:
        """As :meth:`send_held`, for metadata; ``tensor`` is the callee's from now on."""
        self._sends.reserve(size_bytes(tensor))
        self._sends.add(_start_send(self._metadata, tensor, dst))

    def recv_object_part(self, tensor: torch.Tensor, src: int) -> None:
        """As :meth:`recv_into`, for metadata."""
        self._metadata.recv(tensor, src).wait()

    # Life

    def barrier(self) -> None:
        """Wait for all ranks, over the CPU group."""
        self.counts["barrier"] += 1
        torch.distributed.barrier(group=self.context.cpu_group)

    def destroy(self) -> None:
        """Give up the transport. Local and idempotent; the groups belong to the caller."""
        if self._closed:
            return
        self._closed = True
        self._device.close()

    def exceptions(self) -> dict[str, str]:
        """Operations that another transport than the agreed one carries, with that one's name."""
        return self._device.exceptions()

    def status(self) -> Mapping[str, Any]:
        """Name, ranks, backend, bytes held for sends, and calls by method, for reports."""
        return {
            "group": self.name,
            "ranks": list(self.ranks),
            "backend": self.backend,
            "send_bytes_held": self._sends.held_bytes,
            "calls": dict(self.counts),
        }

    # What several methods share

    def _check_reducible(self, transport: Transport, tensor: torch.Tensor, method: str) -> None:
        if tensor.dtype in transport.capabilities.reducible:
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

    def _all_gather_into(self, output: torch.Tensor, input_: torch.Tensor) -> torch.Tensor:
        if self.world_size == 1:
            return output.copy_(input_.reshape(output.shape))
        transport = self._host if input_.is_cpu else self._device
        staged = output if output.is_contiguous() else torch.empty_like(output, memory_format=torch.contiguous_format)
        transport.all_gather(
            as_movable(transport, staged).view(-1), as_movable(transport, input_.contiguous()).view(-1)
        )
        return output if staged is output else output.copy_(staged)

    def _all_gather_list(self, outputs: Sequence[torch.Tensor], input_: torch.Tensor) -> None:
        self._check_list("all_gather", "output_tensor_list", outputs)
        gathered = torch.empty((self.world_size, *input_.shape), dtype=input_.dtype, device=input_.device)
        self._all_gather_into(gathered, input_)
        for output, part in zip(outputs, gathered, strict=True):
            output.copy_(part.view(output.shape))

    def _all_gather_rows(self, input_: torch.Tensor, sizes: Sequence[int] | None) -> torch.Tensor:
        rows = input_.shape[0]
        total = rows * self.world_size if sizes is None else sum(sizes)
        per_rank = self._row_sizes("all_gatherv", total, sizes)
        if per_rank[self.rank_in_group] != rows:
            raise ValueError(
                f"all_gatherv, group {self.name}: input has {rows} rows, but sizes[{self.rank_in_group}] is "
                f"{per_rank[self.rank_in_group]}"
            )
        output = torch.empty((total, *input_.shape[1:]), dtype=input_.dtype, device=input_.device)
        if len(set(per_rank)) == 1:
            return self._all_gather_into(output, input_)
        transport = self._host if input_.is_cpu else self._device
        parts = split_rows(output, per_rank)
        parts[self.rank_in_group].copy_(input_)
        works = [
            transport.broadcast(as_movable(transport, part), rank) for rank, part in enumerate(parts) if part.numel()
        ]
        for work in works:
            if work is not None:
                work.wait()
        return output

    def _reduce_scatter_into(self, output: torch.Tensor, input_: torch.Tensor) -> torch.Tensor:
        if self.world_size == 1:
            return output.copy_(input_.reshape(output.shape))
        transport = self._host if input_.is_cpu else self._device
        self._check_reducible(transport, input_, "reduce_scatter")
        staged = output if output.is_contiguous() else torch.empty_like(output, memory_format=torch.contiguous_format)
        transport.reduce_scatter(staged.view(-1), input_.contiguous().view(-1))
        return output if staged is output else output.copy_(staged)

    def _reduce_scatter_rows(self, input_: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        shape = (sizes[self.rank_in_group], *input_.shape[1:])
        output = torch.empty(shape, dtype=input_.dtype, device=input_.device)
        if len(set(sizes)) == 1:
            return self._reduce_scatter_into(output, input_)
        transport = self._host if input_.is_cpu else self._device
        self._check_reducible(transport, input_, "reduce_scatterv")
        # A reduction may leave anything in the buffers of the ranks that do not receive it.
        parts = split_rows(input_.clone(), sizes)
        for rank, part in enumerate(parts):
            if part.numel():
                transport.reduce(part, rank)
        return output.copy_(parts[self.rank_in_group])


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
    )


def _start_send(transport: Transport, tensor: torch.Tensor, dst: int) -> P2PWork:
    payload = as_movable(transport, tensor)
    return P2PWork(transport.send(payload, dst), payload)


def host_transport(context: GroupContext) -> Transport:
    """The way of CPU tensors in a group whose device is another: its gloo group."""
    return TorchTransport(
        "torch",
        GroupContext(
            context.name,
            context.ranks,
            context.rank,
            torch.device("cpu"),
            context.cpu_group,
            context.cpu_group,
        ),
    )
