"""What the benchmark times: for each operation its buffers, call, expected result and factor of the bus bandwidth.

Factors as in PERFORMANCE.md of NVIDIA's nccl-tests: what one rank must move at least, over the size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang_fl.comm.communicator import CommunicatorFL
from sglang_fl.comm.tools import data

ROOT = 0
_MODULUS = 251  # prime, so that no block of a power of two looks like another
_SMALL_MODULI = {torch.bfloat16: 256, torch.float16: 2048, torch.int8: 127, torch.uint8: 255}


@dataclass(frozen=True)
class Setup:
    """One size: ``count`` elements of ``dtype``, of each rank's share where the operation has shares."""

    communicator: CommunicatorFL
    count: int
    dtype: torch.dtype

    @property
    def rank(self) -> int:
        """This rank."""
        return self.communicator.rank_in_group

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return self.communicator.world_size

    def empty(self, count: int) -> torch.Tensor:
        """Zeros on the group's device."""
        return torch.zeros(count, dtype=self.dtype, device=self.communicator.device)

    def values(self, rank: int, count: int, modulus: int = _MODULUS) -> torch.Tensor:
        """``rank``'s data, whole numbers below ``modulus``, on the group's device."""
        places = torch.arange(count, device=self.communicator.device)
        return (places * 5 + (places >> 8) + rank * 3) % modulus

    def summands(self, count: int) -> list[torch.Tensor]:
        """int64; every rank's contribution to a sum that is exact in ``dtype``."""
        limit = _SMALL_MODULI.get(self.dtype, _MODULUS * self.world_size)
        modulus = max(2, limit // self.world_size)
        return [self.values(rank, count, modulus) for rank in range(self.world_size)]


@dataclass(frozen=True)
class Prepared:
    """Buffers and call of one operation.

    Attributes:
        call: does it once; all ranks must call it.
        fill: puts this rank's data into the buffers.
        wrong: elements that are wrong on this rank after ``fill`` and one ``call``.
    """

    call: Callable[[], object]
    fill: Callable[[], None]
    wrong: Callable[[], int]


@dataclass(frozen=True)
class Operation:
    """One line's worth of the benchmark.

    Attributes:
        name: as on the command line.
        factor: world size to bus bandwidth over algorithm bandwidth.
        has_shares: the size is that of all ranks' shares together.
        redop, root: for the table.
        prepare: buffers out of place (False) and in place (True); None where there is no such form.
        can_be_captured: it only enqueues, and so may lie in a CUDA graph.
    """

    name: str
    factor: Callable[[int], float]
    has_shares: bool
    redop: str
    root: str
    prepare: Callable[[Setup, bool], Prepared | None]
    can_be_captured: bool = True

    def count(self, size_bytes: int, itemsize: int, world_size: int) -> int:
        """Elements, of each rank's share where there are shares; at least one."""
        return max(1, size_bytes // (itemsize * (world_size if self.has_shares else 1)))

    def size_bytes(self, count: int, itemsize: int, world_size: int) -> int:
        """The size that the bandwidths are computed from."""
        return count * itemsize * (world_size if self.has_shares else 1)


def _all_reduce(setup: Setup, in_place: bool) -> Prepared:
    source, target = setup.empty(setup.count), setup.empty(setup.count)
    all_reduce = setup.communicator.all_reduce

    def out_of_place() -> None:
        target.copy_(source)
        all_reduce(target)

    parts = setup.summands(setup.count)
    expected = _sum(parts, setup.dtype)
    return Prepared(
        (lambda: all_reduce(target)) if in_place else out_of_place,
        lambda: _copy(target if in_place else source, parts[setup.rank]),
        lambda: data.wrong_elements(target, expected),
    )


def _all_gather(setup: Setup, in_place: bool) -> Prepared:
    output = setup.empty(setup.count * setup.world_size)
    own = output.view(setup.world_size, -1)[setup.rank] if in_place else setup.empty(setup.count)
    expected = torch.cat([setup.values(rank, setup.count) for rank in range(setup.world_size)]).to(setup.dtype)

    def fill() -> None:
        output.zero_()
        _copy(own, setup.values(setup.rank, setup.count))

    return Prepared(
        lambda: setup.communicator.all_gather_into_tensor(output, own),
        fill,
        lambda: data.wrong_elements(output, expected),
    )


def _reduce_scatter(setup: Setup, in_place: bool) -> Prepared:
    total = setup.count * setup.world_size
    source = setup.empty(total)
    own = source.view(setup.world_size, -1)[setup.rank] if in_place else setup.empty(setup.count)
    parts = setup.summands(total)
    expected = _sum(parts, setup.dtype).view(setup.world_size, -1)[setup.rank]
    return Prepared(
        lambda: setup.communicator.reduce_scatter_tensor(own, source),
        lambda: _copy(source, parts[setup.rank]),
        lambda: data.wrong_elements(own, expected),
    )


def _broadcast(setup: Setup, in_place: bool) -> Prepared:
    source, target = setup.empty(setup.count), setup.empty(setup.count)
    expected = setup.values(ROOT, setup.count).to(setup.dtype)

    def out_of_place() -> None:
        if setup.rank == ROOT:
            target.copy_(source)
        setup.communicator.broadcast(target, ROOT)

    return Prepared(
        (lambda: setup.communicator.broadcast(target, ROOT)) if in_place else out_of_place,
        lambda: _copy(target if in_place else source, setup.values(setup.rank, setup.count)),
        lambda: data.wrong_elements(target, expected),
    )


def _gather(setup: Setup, in_place: bool) -> Prepared | None:
    if in_place:
        return None
    own = setup.values(setup.rank, setup.count).to(setup.dtype)
    expected = torch.cat([setup.values(rank, setup.count) for rank in range(setup.world_size)]).to(setup.dtype)
    results: list[torch.Tensor | None] = [None]

    def call() -> None:
        results[0] = setup.communicator.gather(own, ROOT, 0)

    def wrong() -> int:
        result = results[0]
        if setup.rank != ROOT:
            return int(result is not None and setup.world_size > 1)
        return expected.numel() if result is None else data.wrong_elements(result, expected)

    return Prepared(call, lambda: None, wrong)


def _send_recv(setup: Setup, in_place: bool) -> Prepared | None:
    if in_place or setup.world_size == 1:
        return None
    own = setup.values(setup.rank, setup.count).to(setup.dtype)
    source = (setup.rank - 1) % setup.world_size
    results = [own]

    def call() -> None:
        setup.communicator.send(own)
        results[0] = setup.communicator.recv(own.size(), own.dtype)

    expected = setup.values(source, setup.count).to(setup.dtype)
    return Prepared(call, lambda: None, lambda: data.wrong_elements(results[0], expected))


def _uneven(setup: Setup) -> list[int]:
    """Half of the ranks' shares are smaller by half, the rest larger; together they are ``count`` a rank."""
    less = setup.count // 2
    sizes = [setup.count - less if rank % 2 else setup.count + less for rank in range(setup.world_size)]
    sizes[-1] += setup.count * setup.world_size - sum(sizes)
    return sizes


def _all_gatherv(setup: Setup, in_place: bool) -> Prepared | None:
    if in_place:
        return None
    sizes = _uneven(setup)
    own = setup.values(setup.rank, sizes[setup.rank]).to(setup.dtype)
    expected = torch.cat([setup.values(rank, size) for rank, size in enumerate(sizes)]).to(setup.dtype)
    results = [own]

    def call() -> None:
        results[0] = setup.communicator.all_gatherv(own, sizes)[0]

    return Prepared(call, lambda: None, lambda: data.wrong_elements(results[0], expected))


def _reduce_scatterv(setup: Setup, in_place: bool) -> Prepared | None:
    if in_place:
        return None
    sizes = _uneven(setup)
    parts = setup.summands(sum(sizes))
    source = parts[setup.rank].to(setup.dtype)
    expected = data.row_blocks(_sum(parts, setup.dtype), sizes)[setup.rank]
    results = [source]

    def call() -> None:
        results[0] = setup.communicator.reduce_scatterv(source, sizes=sizes)

    return Prepared(call, lambda: None, lambda: data.wrong_elements(results[0], expected))


def _sum(parts: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total.to(dtype)


def _copy(target: torch.Tensor, values: torch.Tensor) -> None:
    target.copy_(values.to(target.dtype))


def _once(world_size: int) -> float:
    return 1.0


def _shares(world_size: int) -> float:
    return (world_size - 1) / world_size


def _twice(world_size: int) -> float:
    return 2 * (world_size - 1) / world_size


_TABLE = (
    Operation("all_reduce", _twice, False, "sum", "-1", _all_reduce),
    Operation("all_gather", _shares, True, "none", "-1", _all_gather),
    Operation("reduce_scatter", _shares, True, "sum", "-1", _reduce_scatter),
    Operation("broadcast", _once, False, "none", str(ROOT), _broadcast),
    Operation("gather", _shares, True, "none", str(ROOT), _gather),
    Operation("send_recv", _once, False, "none", "-1", _send_recv, can_be_captured=False),
    Operation("all_gatherv", _shares, True, "none", "-1", _all_gatherv),
    Operation("reduce_scatterv", _shares, True, "sum", "-1", _reduce_scatterv),
)
OPERATIONS: dict[str, Operation] = {operation.name: operation for operation in _TABLE}
