"""Self-test of the operations that collect; every byte of every dtype must arrive."""

from __future__ import annotations

import torch

from sglang_fl.comm.tools import data
from sglang_fl.comm.tools.data import Layout
from sglang_fl.comm.tools.scope import Case, Scope


def all_gather(scope: Scope) -> None:
    """Along every dimension."""
    for case in _with_dimensions(scope):
        parts = _parts(scope, case)
        placed = scope.place(case, parts[scope.rank])
        for dim in range(-len(case.shape), len(case.shape)):
            result = scope.communicator.all_gather(placed.tensor, dim=dim)
            expected = _concatenated(parts, dim)
            wrong = 1 if result is None else data.wrong_elements(result, expected)
            scope.tally.count(f"{case} dim {dim}", wrong + placed.wrong(parts[scope.rank]))


def all_gather_list(scope: Scope) -> None:
    """Into one tensor a rank."""
    for case in scope.cases:
        parts = _parts(scope, case)
        outputs = [scope.place_empty(case, case.shape) for _ in parts]
        placed = scope.place(case, parts[scope.rank])
        result = scope.communicator.all_gather(placed.tensor, output_tensor_list=[output.tensor for output in outputs])
        wrong = sum(output.wrong(part) for output, part in zip(outputs, parts, strict=True))
        scope.tally.count(case, wrong + (result is not None))


def all_gather_into_tensor(scope: Scope) -> None:
    """Out of place, and in place where the input is this rank's block of a contiguous output."""
    for case in scope.cases:
        parts = _parts(scope, case)
        expected = _stacked(parts)
        output = scope.place_empty(case, tuple(expected.shape))
        placed = scope.place(case, parts[scope.rank])
        scope.communicator.all_gather_into_tensor(output.tensor, placed.tensor)
        scope.tally.count(case, output.wrong(expected) + placed.wrong(parts[scope.rank]))
        if case.layout is Layout.CONTIGUOUS:
            output = scope.place_empty(case, tuple(expected.shape))
            own = output.tensor[scope.rank]
            own.copy_(parts[scope.rank].to(case.device))
            scope.communicator.all_gather_into_tensor(output.tensor, own)
            scope.tally.count(f"{case} in place", output.wrong(expected))


def cp_all_gather_into_tensor_async(scope: Scope) -> None:
    """On a stream of the caller's, which waits for the current one first; none on the CPU."""
    for case in scope.cases:
        parts = _parts(scope, case)
        expected = _stacked(parts)
        output = scope.place_empty(case, tuple(expected.shape))
        placed = scope.place(case, parts[scope.rank])
        stream = None
        if case.device.type != "cpu":
            module = torch.get_device_module(case.device)
            stream = module.Stream(case.device)
            stream.wait_stream(module.current_stream(case.device))
        scope.communicator.cp_all_gather_into_tensor_async(output.tensor, placed.tensor, stream)
        if stream is not None:
            stream.synchronize()
        scope.tally.count(case, output.wrong(expected))


def all_gatherv(scope: Scope) -> None:
    """One tensor and a list, with uneven sizes and without sizes; always a list of whole tensors."""
    rank = scope.rank
    for case in scope.cases:
        for rows in (scope.rows(), None):
            shapes = [((2 if rows is None else rows[r]), *case.shape) for r in range(scope.world_size)]
            parts = [scope.random(case, r, shape) for r, shape in enumerate(shapes)]
            others = [scope.random(case, r, shape, "second") for r, shape in enumerate(shapes)]
            expected = [_concatenated(parts, 0), _concatenated(others, 0)]
            placed = [scope.place(case, parts[rank]).tensor, scope.place(case, others[rank]).tensor]
            for given, wanted in ((placed[0], expected[:1]), (placed, expected)):
                result = scope.communicator.all_gatherv(given, rows)
                is_list = isinstance(result, list) and len(result) == len(wanted)
                wrong = sum(map(data.wrong_elements, result, wanted)) if is_list else 1
                scope.tally.count(f"{case} rows {rows}, {len(wanted)} tensor(s)", wrong)


def gather(scope: Scope) -> None:
    """To every root that the plan names; None elsewhere."""
    for case in _with_dimensions(scope):
        parts = _parts(scope, case)
        placed = scope.place(case, parts[scope.rank])
        for root in scope.roots:
            for dim in (0, -1):
                result = scope.communicator.gather(placed.tensor, dst=root, dim=dim)
                if scope.rank != root:
                    scope.tally.count(f"{case} to {root}: not None", result is not None)
                    continue
                wrong = 1 if result is None else data.wrong_elements(result, _concatenated(parts, dim))
                scope.tally.count(f"{case} to {root} dim {dim}", wrong)


def _with_dimensions(scope: Scope) -> list[Case]:
    return [case for case in scope.cases if case.shape]


def _parts(scope: Scope, case: Case) -> list[torch.Tensor]:
    return [scope.random(case, rank) for rank in range(scope.world_size)]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """(*shape, item size) as uint8: torch cannot concatenate every dtype."""
    return tensor.contiguous().unsqueeze(-1).view(torch.uint8)


def _concatenated(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    dim %= parts[0].dim()
    return torch.cat([_as_bytes(part) for part in parts], dim).view(parts[0].dtype).squeeze(-1)


def _stacked(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([_as_bytes(part) for part in parts]).view(parts[0].dtype).squeeze(-1)
