"""The operations that add up over the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_fl.comm.core import GroupCore
from sglang_fl.comm.layout import check_sizes, split_rows


class Reductions(GroupCore):
    """Every rank of the group must call each of these, in the same order. All of them sum."""

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place; returns ``input_``.

        Raises:
            TypeError: the backend has no sum for this dtype; before anything is sent.
        """
        self.counts["all_reduce"] += 1
        if self.world_size == 1:
            return input_
        transport = self._host if input_.is_cpu else self._device
        if input_.dtype not in transport.capabilities.reducible or input_.is_neg():
            self._check_reducible(transport, input_, "all_reduce")  # raises: asked here, it costs no call
        if input_.is_contiguous():
            transport.all_reduce(input_)
            return input_
        staged = input_.contiguous()
        transport.all_reduce(staged)
        return input_.copy_(staged)

    # Where routes by size may make all_reduce return another tensor, this one still writes into its argument.
    all_reduce_in_place = all_reduce

    def _all_reduce_by_route(self, input_: torch.Tensor) -> torch.Tensor:
        """:meth:`all_reduce` of a group with routes by size: the result may be a new tensor, ``input_`` is given up.

        Source: SGLang's contract, whose callers use the result.
        """
        if input_.device.type != self.device.type or self.world_size == 1 or not input_.is_contiguous():
            return self.all_reduce_in_place(input_)
        self.counts["all_reduce"] += 1
        self._check_reducible(self._device, input_, "all_reduce")
        return self._device.all_reduce_result(input_)

    def all_reduce_new(self, input_: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks in a new, contiguous tensor; ``input_`` stays as it is."""
        self.counts["all_reduce"] += 1
        if self.world_size == 1:
            return input_.clone(memory_format=torch.contiguous_format)
        transport = self._host if input_.is_cpu else self._device
        self._check_reducible(transport, input_, "all_reduce")
        return transport.all_reduce_new(input_.contiguous())

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

    def quant_all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """As :meth:`all_reduce`: no backend here quantises; SGLang asks for it on NPUs only."""
        return self.all_reduce(input_)

    def fused_allreduce_rmsnorm(
        self, input_: torch.Tensor, residual_inp_: torch.Tensor, weight_: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """None: no backend here offers it, and SGLang then calls all_reduce and its own norm."""
        return None

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
