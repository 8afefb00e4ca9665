"""A tenth of the randomised test in every run, what it covers, and that a planted fault does not get past it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sglang_fl.comm.backends.torch_dist import TorchTransport
from sglang_fl.comm.communicator import CommunicatorFL
from sglang_fl.comm.transfers import Transfers
from sglang_fl.testing.ranks import RanksFailed
from tests.distributed.random_calls import BACKENDS, FULL_CALLS, WORLD_SIZES, least, run
from tests.distributed.random_data import MAXIMUM_BYTES, MIB, Data, draw_bytes
from tests.distributed.random_operations import OPERATIONS

CALLS = FULL_CALLS // 10
SEED = 4
# What of CommunicatorFL's public methods is no operation of the table: its making, reports, and what tensor
# dictionaries are made of.
NO_OPERATIONS = frozenset(
    {
        "broadcast_objects",
        "dump",
        "from_agreed",
        "recorders",
        "exceptions",
        "status",
        "isend",
        "isend_object_part",
        "recv_into",
        "recv_object_part",
        "send_held",
        "send_object_part",
    }
)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", BACKENDS)
def test_random_calls(name: str, world_size: int, hostcx: Path) -> None:
    """Given calls drawn from a seed, groups in other orders among them, when the ranks make them one after the other,
    then every result is what the seed says; the whole test is python -m tests.distributed.random_calls."""
    drawn = run(SEED, world_size, name, CALLS)
    assert sum(drawn.values()) == CALLS
    assert min(drawn[operation.name] for operation in OPERATIONS) >= least(CALLS)


def test_every_operation_is_drawn_often_enough_in_a_full_run() -> None:
    """Given the draws of a full run, when they are counted, then each operation comes 200 times or more."""
    names = [random.Random(SEED * 1_000_003 + number).choice(OPERATIONS).name for number in range(FULL_CALLS)]
    assert min(names.count(operation.name) for operation in OPERATIONS) >= 200


def test_every_method_is_covered() -> None:
    """Given CommunicatorFL's public methods, when compared with the operations, then none is missing."""
    public = {name for name, value in vars_of(CommunicatorFL).items() if callable(value) and not name.startswith("_")}
    covered = {method for operation in OPERATIONS for method in operation.methods}
    assert public - NO_OPERATIONS == covered
    assert public >= NO_OPERATIONS


def vars_of(kind: type) -> dict[str, object]:
    """Attributes of a class and its bases by name."""
    return {name: getattr(kind, name) for name in dir(kind)}


def test_sizes_are_drawn_as_they_should_be() -> None:
    """Given many draws, when their sizes are counted, then 5 % are zero, 2 % over 1 MiB, and the rest log-uniform."""
    rng = random.Random(1)
    sizes = [draw_bytes(rng) for _ in range(100_000)]
    assert 4_500 < sum(size == 0 for size in sizes) < 5_500
    assert 1_700 < sum(size > MIB for size in sizes) < 2_300
    assert max(sizes) <= MAXIMUM_BYTES
    middle = [sum(low <= size < 32 * low for size in sizes) for low in (32, 1024, 32 * 1024)]
    assert max(middle) < 1.1 * min(middle)


def test_a_call_depends_on_its_seed_and_number_alone(hostcx: Path) -> None:
    """Given a run, when a part of it is repeated alone, then the same operations are drawn, and are right."""
    alone = run(SEED, 2, "flagcx", 20, first=30)
    expected = [random.Random(SEED * 1_000_003 + number).choice(OPERATIONS).name for number in range(30, 50)]
    assert sorted(alone.elements()) == sorted(expected)


def test_data_differs_between_ranks_and_calls() -> None:
    """Given pools of a seed, when ranks and calls take their data, then no two have the same."""
    data = Data.of_seed(SEED)
    taken = {bytes(data.bits((64,), torch.uint8, key).numpy()) for key in range(1000)}
    assert len(taken) == 1000


def _leaves_out_bfloat16(self: TorchTransport, tensor: torch.Tensor) -> None:
    if tensor.dtype is torch.bfloat16 and self._ranks[-1] == dist.get_rank():
        tensor = tensor.clone()  # this rank's own result is lost
    dist.all_reduce(tensor, group=self._group)


def _ignores_the_order_of_ranks(self: TorchTransport, output: torch.Tensor, tensor: torch.Tensor) -> None:
    dist.all_gather_into_tensor(output, tensor, group=self._group)


def _keeps_no_copy(self: Transfers, tensor: torch.Tensor, dst: int) -> None:
    self._sends.start(tensor.numel() * tensor.element_size(), self.ranks[dst], lambda: self.isend(tensor, dst))


def _drops_the_tail(self: TorchTransport, tensor: torch.Tensor, src: int) -> None:
    whole = tensor.view(-1)
    part = whole[: len(whole) - 1] if len(whole) > 100_000 else whole
    dist.broadcast(part, self._ranks[src], group=self._group)


@pytest.mark.parametrize(
    ("owner", "method", "fault", "operation"),
    [
        (TorchTransport, "all_reduce", _leaves_out_bfloat16, "all_reduce|graph_capture|destroy"),
        (TorchTransport, "all_gather", _ignores_the_order_of_ranks, "all_gather"),
        (TorchTransport, "broadcast", _drops_the_tail, "broadcast|all_gatherv"),
        (Transfers, "send_held", _keeps_no_copy, "send"),
    ],
)
def test_a_planted_fault_is_found(
    owner: type, method: str, fault: Callable[..., None], operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a fault in one operation, for one dtype, order of ranks or size alone, when the randomised test runs, then
    it fails, and names seed, call and operation."""
    monkeypatch.setattr(owner, method, fault)
    with pytest.raises(RanksFailed, match=rf"its last note: seed {SEED}, call \d+: \w*({operation})"):
        run(SEED, 2, "torch", CALLS)
