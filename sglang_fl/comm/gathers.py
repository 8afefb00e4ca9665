"""The operations that collect what every rank has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_fl.comm.core import GroupCore
from sglang_fl.comm.layout import as_movable, check_sizes, gather_to_dim, normalized_dim, split_rows


class Gathers(GroupCore):
    """Every rank of the group must call each of these, in the same order. Any dtype."""

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

    def cp_all_gather_into_tensor_async(self, output: torch.Tensor, input: torch.Tensor, stream: Any) -> None:
        """As :meth:`all_gather_into_tensor`, enqueued on ``stream``; the caller synchronises with it."""
        self.counts["cp_all_gather_into_tensor_async"] += 1
        check_sizes("cp_all_gather_into_tensor_async", self, output, input)
        if self.device.type == "cpu" or stream is None:
            self._all_gather_into(output, input)
            return
        with torch.get_device_module(self.device).stream(stream):
            self._all_gather_into(output, input)

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
