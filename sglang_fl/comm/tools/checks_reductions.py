"""Self-test of the operations that sum; expected values are sums of whole numbers, made on each rank alone."""

from __future__ import annotations

import torch

from sglang_fl.comm.tools import data
from sglang_fl.comm.tools.data import Layout
from sglang_fl.comm.tools.scope import Case, Scope

_EPSILON = 1e-6
_RELATIVE_ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}


def all_reduce(scope: Scope, method: str = "all_reduce") -> None:
    """In place, the tensor's identity kept."""
    call = getattr(scope.communicator, method)
    for case in scope.summing_cases(call):
        placed = scope.place(case, scope.summand(case, scope.rank))
        result = call(placed.tensor)
        if result is placed.tensor:
            scope.tally.count(case, placed.wrong(scope.total(case)))
        else:
            # With routes by size all_reduce may give a new tensor.
            may_be_new = method == "all_reduce" and bool(scope.communicator.routes)
            scope.tally.count(case, data.wrong_elements(result, scope.total(case)) + (not may_be_new))


def all_reduce_in_place(scope: Scope) -> None:
    """In place, whatever routes there are."""
    all_reduce(scope, "all_reduce_in_place")


def all_reduce_new(scope: Scope) -> None:
    """In a new tensor; the argument keeps its bytes."""
    call = scope.communicator.all_reduce_new
    for case in scope.summing_cases(call):
        values = scope.summand(case, scope.rank)
        placed = scope.place(case, values)
        result = call(placed.tensor)
        wrong = data.wrong_elements(result, scope.total(case))
        scope.tally.count(case, wrong + placed.wrong(values) + (result is placed.tensor))


def quant_all_reduce(scope: Scope) -> None:
    """Sums exactly, too: no backend here quantises."""
    all_reduce(scope, "quant_all_reduce")


def reduce_scatter_tensor(scope: Scope) -> None:
    """Out of place, and in place where the output is this rank's block of a contiguous input."""
    communicator = scope.communicator

    def refused(tensor: torch.Tensor) -> object:
        return communicator.reduce_scatter_tensor(
            torch.empty_like(tensor[: tensor.numel() // scope.world_size]), tensor
        )

    for case in scope.summing_cases(refused):
        shape = (scope.world_size, *case.shape)
        values = scope.summand(case, scope.rank, shape)
        input_, output = scope.place(case, values), scope.place_empty(case, case.shape)
        communicator.reduce_scatter_tensor(output.tensor, input_.tensor)
        expected = scope.total(case, shape)[scope.rank]
        scope.tally.count(case, output.wrong(expected) + input_.wrong(values))
        if case.layout is Layout.CONTIGUOUS:
            whole = scope.place(case, values).tensor
            own = whole[scope.rank]
            communicator.reduce_scatter_tensor(own, whole)
            scope.tally.count(f"{case} in place", data.wrong_elements(own, expected))


def reduce_scatter(scope: Scope) -> None:
    """From a list, with as many rows for each rank, and with different ones."""
    communicator = scope.communicator
    rank, size = scope.rank, scope.world_size

    def refused(tensor: torch.Tensor) -> object:
        parts = list(tensor.chunk(size))
        return communicator.reduce_scatter(torch.empty_like(parts[rank]), parts)

    for case in scope.summing_cases(refused):
        shape = (size, *case.shape)
        values = scope.summand(case, rank, shape)
        inputs = [scope.place(case, part) for part in values]
        output = scope.place_empty(case, case.shape)
        communicator.reduce_scatter(output.tensor, [placed.tensor for placed in inputs])
        changed = sum(placed.wrong(part) for placed, part in zip(inputs, values, strict=True))
        scope.tally.count(case, output.wrong(scope.total(case, shape)[rank]) + changed)
    for case in _uneven_cases(scope):
        rows = scope.rows()
        shape = (sum(rows), *case.shape)
        parts = data.row_blocks(scope.summand(case, rank, shape), rows)
        output = scope.place_empty(case, (rows[rank], *case.shape))
        communicator.reduce_scatter(output.tensor, [scope.place(case, part).tensor for part in parts])
        scope.tally.count(f"{case} rows {rows}", output.wrong(data.row_blocks(scope.total(case, shape), rows)[rank]))


def reduce_scatterv(scope: Scope) -> None:
    """With sizes, with an output given, and without sizes."""
    communicator = scope.communicator
    rank, size = scope.rank, scope.world_size
    for case in scope.summing_cases(communicator.reduce_scatterv):
        for rows in (scope.rows(), [2] * size):
            shape = (sum(rows), *case.shape)
            values = scope.summand(case, rank, shape)
            expected = data.row_blocks(scope.total(case, shape), rows)[rank]
            input_ = scope.place(case, values)
            result = communicator.reduce_scatterv(input_.tensor, sizes=rows)
            scope.tally.count(f"{case} rows {rows}", data.wrong_elements(result, expected) + input_.wrong(values))
            output = scope.place_empty(case, tuple(expected.shape))
            result = communicator.reduce_scatterv(input_.tensor, output.tensor, rows)
            scope.tally.count(f"{case} rows {rows} output", output.wrong(expected) + (result is not output.tensor))
        result = communicator.reduce_scatterv(input_.tensor)  # of the loop's last turn: two rows each
        scope.tally.count(f"{case} no sizes", data.wrong_elements(result, expected))


def fused_allreduce_rmsnorm(scope: Scope) -> None:
    """None where it is not offered, else the normalised sum with the residual, and their sum."""
    for dtype in _RELATIVE_ERROR:
        case = next((case for case in scope.cases if case.dtype is dtype and case.shape == (3, 5)), None)
        if case is not None:
            _fused_case(scope, case)


def _fused_case(scope: Scope, case: Case) -> None:
    residual = scope.summand(case, scope.world_size)  # equal on all ranks
    weight = scope.summand(case, scope.world_size + 1)[0]
    input_, added_to, scale = (
        scope.place(case, values).tensor for values in (scope.summand(case, scope.rank), residual, weight)
    )
    result = scope.communicator.fused_allreduce_rmsnorm(input_, added_to, scale, _EPSILON)
    if result is None:
        scope.tally.count(f"{case}: not offered", False)
        return
    added = scope.total(case).double() + residual.double()
    normalised = added * torch.rsqrt(added.square().mean(-1, keepdim=True) + _EPSILON) * weight.double()
    wrong = 0
    for actual, expected in zip(result, (normalised, added), strict=True):
        close = torch.isclose(actual.cpu().double(), expected, rtol=_RELATIVE_ERROR[case.dtype], atol=1e-3)
        wrong += int((~close).sum())
    scope.tally.count(case, wrong)


def _uneven_cases(scope: Scope) -> list[Case]:
    return [case for case in scope.cases if case.dtype is torch.float32 and case.shape in ((7,), (3, 5))]
