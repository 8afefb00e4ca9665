"""Self-test of broadcasts, point to point, dictionaries, objects, the barrier and graph capture."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from sglang_fl.comm.tools import data
from sglang_fl.comm.tools.data import Layout
from sglang_fl.comm.tools.scope import Case, Scope

_LARGE_ELEMENTS = 300_007  # above what small-message paths take
_BARRIERS = 5
_REPLAYS = 3


def broadcast(scope: Scope) -> None:
    """From every root that the plan names, in place, the tensor's identity kept."""
    for case in scope.cases:
        for root in scope.roots:
            placed = scope.place(case, scope.random(case, scope.rank))
            result = scope.communicator.broadcast(placed.tensor, src=root)
            wrong = placed.wrong(scope.random(case, root)) + (result is not placed.tensor)
            scope.tally.count(f"{case} from {root}", wrong)


def broadcast_object_list(scope: Scope) -> None:
    """Objects that pickle, in place."""
    for root in scope.roots:
        objects = [{"rank": scope.rank, "text": "x" * 1000}, None, (scope.rank,)]
        result = scope.communicator.broadcast_object_list(objects, src=root)
        right = objects == [{"rank": root, "text": "x" * 1000}, None, (root,)]
        scope.tally.count(f"from {root}", not right or result is not objects)


def broadcast_tensor_dict(scope: Scope) -> None:
    """Tensors of every kind beside other values; the source gets its own back."""
    for root in scope.roots:
        sent = _dictionary(scope, root, "broadcast") if scope.rank == root else None
        result = scope.communicator.broadcast_tensor_dict(sent, src=root)
        _compare(scope, f"from {root}", result, _dictionary(scope, root, "broadcast"))


def send_and_recv(scope: Scope) -> None:
    """Around the ring: every rank sends first, by default to the next, and backwards; buffers are reused at once."""
    if scope.world_size == 1:
        return
    communicator, size = scope.communicator, scope.world_size
    for case in scope.cases:
        if case.device != communicator.device:
            continue  # recv allocates on the group's device
        for step in (1, size - 1):
            dst, src = (scope.rank + step) % size, (scope.rank - step) % size
            placed = scope.place(case, scope.random(case, scope.rank, part=step))
            communicator.send(placed.tensor, None if step == 1 else dst)
            placed.storage.view(torch.uint8).zero_()
            result = communicator.recv(torch.Size(case.shape), case.dtype, None if step == 1 else src)
            wrong = data.wrong_elements(result, scope.random(case, src, part=step))
            scope.tally.count(f"{case} from {src}", wrong + (result.device != communicator.device))


def send_and_recv_tensor_dict(scope: Scope) -> None:
    """Around the ring, every rank sends first; with and without waiting, whole and in shares of a group."""
    communicator, size = scope.communicator, scope.world_size
    for number, is_async in enumerate((False, True)):
        sent = _dictionary(scope, scope.rank, number)
        works = communicator.send_tensor_dict(sent, async_send=is_async)
        result = communicator.recv_tensor_dict()
        if size == 1:
            scope.tally.count("one rank", works is not sent or result is not None)
            continue
        for work in works:
            if work.work is not None:
                work.work.wait()
        scope.tally.count("works are returned exactly for async_send", bool(works) is not is_async)
        source = (scope.rank - 1) % size
        _compare(scope, f"from {source}, async_send={is_async}", result, _dictionary(scope, source, number))
    if size > 1:
        _in_shares(scope)


def _in_shares(scope: Scope) -> None:
    """Each rank sends its share, the group of the receivers gathers; here senders and receivers are one group."""
    communicator, size = scope.communicator, scope.world_size
    shape = (size, 6)
    case = Case(torch.bfloat16, shape, Layout.CONTIGUOUS, communicator.device)
    parts = [scope.random(case, rank) for rank in range(size)]
    mine = parts[scope.rank].to(communicator.device)
    communicator.send_tensor_dict({"hidden": mine}, all_gather_group=communicator)
    result = communicator.recv_tensor_dict(all_gather_group=communicator)
    # Row r came from rank r - 1, which sent its own share: row r - 1.
    expected = torch.stack([parts[(rank - 1) % size][(rank - 1) % size] for rank in range(size)])
    wrong = 1 if result is None else data.wrong_elements(result["hidden"], expected)
    scope.tally.count("in shares", wrong)


def barrier(scope: Scope) -> None:
    """Nobody leaves before all have come: arrivals are counted in the store of the launch."""
    store = dist.distributed_c10d._get_default_store()
    for number in range(_BARRIERS):
        key = f"sglang_fl/selftest/{scope.communicator.backend}/{number}"
        store.add(key, 1)
        scope.communicator.barrier()
        scope.tally.count(f"barrier {number}", store.add(key, 0) != scope.world_size)


def graph_capture(scope: Scope) -> None:
    """On a GPU: collectives captured once and replayed with new data each time."""
    communicator = scope.communicator
    device = communicator.device
    if not hasattr(torch.get_device_module(device), "CUDAGraph"):
        with communicator.graph_capture():
            scope.tally.count("entered and left; this device has no graphs", False)
        return
    cases = [Case(dtype, (48,), Layout.CONTIGUOUS, device) for dtype in (torch.float32, torch.bfloat16)]
    for case in cases:
        _captured(scope, case)


def _captured(scope: Scope, case: Case) -> None:
    communicator, device, rank, size = scope.communicator, case.device, scope.rank, scope.world_size
    reduced, moved = (torch.zeros(case.shape, dtype=case.dtype, device=device) for _ in range(2))
    gathered = torch.zeros((size, *case.shape), dtype=case.dtype, device=device)
    scattered = torch.zeros(case.shape, dtype=case.dtype, device=device)
    blocks = torch.zeros((size, *case.shape), dtype=case.dtype, device=device)

    def calls() -> None:
        communicator.all_reduce(reduced)
        communicator.all_gather_into_tensor(gathered, moved)
        communicator.reduce_scatter_tensor(scattered, blocks)

    calls()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with communicator.graph_capture(), torch.cuda.graph(graph):
        calls()
    for number in range(_REPLAYS):
        shape = (size, *case.shape)
        wanted = [data.random_bytes(case.shape, case.dtype, data.seed_of(scope.seed, number, r)) for r in range(size)]
        moved.copy_(wanted[rank])
        reduced.copy_(scope.summand(case, rank))
        blocks.copy_(scope.summand(case, rank, shape))
        graph.replay()
        torch.cuda.synchronize(device)
        wrong = data.wrong_elements(reduced, scope.total(case))
        wrong += data.wrong_elements(gathered, torch.stack(wanted))
        wrong += data.wrong_elements(scattered, scope.total(case, shape)[rank])
        scope.tally.count(f"{case} replay {number}", wrong)


def _dictionary(scope: Scope, rank: int, part: object) -> dict[str, Any]:
    """Rank ``rank``'s dictionary, with tensors on the group's device, one on the CPU, one empty, one with strides."""
    device = scope.communicator.device
    cpu = torch.device("cpu")

    def tensor(
        dtype: torch.dtype, shape: tuple[int, ...], layout: Layout = Layout.CONTIGUOUS, where: torch.device = device
    ) -> torch.Tensor:
        case = Case(dtype, shape, layout, where)
        return scope.place(case, scope.random(case, rank, part=part)).tensor

    return {
        "hidden_states": tensor(torch.bfloat16, (5, 8)),
        "residual": tensor(torch.float32, (6, 4), Layout.TRANSPOSED),
        "mask": tensor(torch.bool, (9,), Layout.OFFSET),
        "scales": tensor(torch.float8_e4m3fn, (3, 4), Layout.STRIDED),
        "empty": tensor(torch.float16, (0, 4)),
        "large": tensor(torch.float32, (_LARGE_ELEMENTS,)),
        "on_cpu": tensor(torch.int64, (3,), where=cpu),
        "step": rank,
        "names": ["a", None, rank],
    }


def _compare(scope: Scope, what: str, result: dict[str, Any] | None, expected: dict[str, Any]) -> None:
    if result is None or list(result) != list(expected):
        scope.tally.count(f"{what}: keys", True)
        return
    for key, wanted in expected.items():
        found = result[key]
        if not isinstance(wanted, torch.Tensor):
            scope.tally.count(f"{what}: {key}", found != wanted)
            continue
        is_there = isinstance(found, torch.Tensor) and found.device == wanted.device
        wrong = data.wrong_elements(found, wanted) if is_there else wanted.numel()
        scope.tally.count(f"{what}: {key}", wrong)
