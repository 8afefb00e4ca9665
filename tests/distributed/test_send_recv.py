"""send and recv: a tensor from one rank of the group to another, which neither side has to wait for."""

from __future__ import annotations

import time

import pytest
import torch

from sglang_fl.comm.communicator import CommunicatorFL
from sglang_fl.testing.ranks import RankContext, run_ranks
from tests.distributed.groups import over_groups, over_world, world
from tests.distributed.matrix import DTYPES, Case, cases, few_cases, place, same

MIB = 2**20


def _check(communicator: CommunicatorFL, case: Case) -> None:
    mine, size = communicator.rank_in_group, communicator.world_size
    for distance in range(1, size):
        following, previous = (mine + distance) % size, (mine - distance) % size
        tensor = place(case.bits(mine), case.layout)

        communicator.send(tensor, dst=following)
        tensor.zero_()  # what was sent is what the tensor held
        received = communicator.recv(size=torch.Size(case.shape), dtype=case.dtype, src=previous)

        same(received, case.bits(previous), f"send and recv {case}")


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_send_first(world_size: int, backend: dict[str, str]) -> None:
    """Cases 2, 7 and 11. Given any dtype, shape and layout, when all ranks send, then change what they sent, then
    receive, then each has what the other had sent, bit for bit."""
    run_ranks(over_world, world_size, _check, cases(DTYPES), env=backend)


def test_in_several_groups(backend: dict[str, str]) -> None:
    """Case 5. Given groups in any order that are used in turn, when their ranks send, then src and dst are ranks of
    the group."""
    run_ranks(over_groups, 4, _check, few_cases(DTYPES), env=backend)


LENGTHS = [3, 70_000, 0, 1, 2_000_000, 5]


def _in_order(context: RankContext) -> None:
    communicator = world(context)
    if context.rank == 0:
        for number, length in enumerate(LENGTHS):
            communicator.send(torch.full((length,), number), dst=1)
        communicator.destroy()
        return
    for number, length in enumerate(LENGTHS):
        same(communicator.recv(torch.Size([length]), torch.int64, 0), torch.full((length,), number), number)


def test_sends_arrive_in_order(backend: dict[str, str]) -> None:
    """Given sends of different sizes one after the other from a rank that then destroys its communicator and ends,
    when received, then all are there in the order they were sent."""
    run_ranks(_in_order, 2, env=backend)


def _destroys_at_once(context: RankContext) -> None:
    communicator, store = world(context), context.store("sent")
    if context.rank == 0:
        communicator.send(torch.arange(4 * MIB), dst=1)
        store.set("sent", "1")
        communicator.destroy()
        return
    store.wait(["sent"])
    time.sleep(0.5)  # the sender is now destroying, or has ended if it does not wait
    same(communicator.recv(torch.Size([4 * MIB]), torch.int64, 0), torch.arange(4 * MIB), "sent before destroy")


def test_destroy_waits_for_what_was_sent(backend: dict[str, str]) -> None:
    """Given a send that nobody has received yet, when its rank destroys the communicator and ends, then the receiver
    still gets it."""
    run_ranks(_destroys_at_once, 2, env=backend)


def _both_send_64_mib(context: RankContext) -> None:
    communicator, other = world(context), 1 - context.rank
    tensor = torch.full((16 * MIB,), float(context.rank + 1))
    communicator.send(tensor, dst=other)
    del tensor
    torch.full((16 * MIB,), -1.0)  # takes the memory that was let go
    received = communicator.recv(torch.Size([16 * MIB]), torch.float32, src=other)
    assert bool((received == other + 1).all())
    communicator.destroy()


def test_both_send_64_mib_first(backend: dict[str, str]) -> None:
    """Cases 1 and 2. Given 64 MiB each way, when both ranks send first and let go of what they sent, then both
    finish with the right bytes."""
    run_ranks(_both_send_64_mib, 2, env=backend)


def _default_peers(context: RankContext) -> None:
    communicator = world(context)
    communicator.send(torch.tensor([context.rank]))
    received = communicator.recv(torch.Size([1]), torch.int64)
    assert received.item() == (context.rank - 1) % context.world_size
    communicator.destroy()
    communicator.destroy()  # before its groups go: the next rank may not have received yet


def test_default_peers_are_the_neighbours(backend: dict[str, str]) -> None:
    """Given neither src nor dst, when all ranks send and receive, then it goes to the next from the previous rank."""
    run_ranks(_default_peers, 3, env=backend)


def _beside_collectives(context: RankContext) -> None:
    communicator, other = world(context), 1 - context.rank
    communicator.send(torch.full((4 * MIB,), context.rank, dtype=torch.uint8), dst=other)
    for step in range(20):
        assert communicator.all_reduce(torch.tensor([step])).item() == 2 * step
    received = communicator.recv(torch.Size([4 * MIB]), torch.uint8, src=other)
    assert bool((received == other).all())
    communicator.destroy()


def test_collectives_between_send_and_recv(backend: dict[str, str]) -> None:
    """Given a send under way each way, when the ranks call collectives before they receive, then all are right."""
    run_ranks(_beside_collectives, 2, env=backend)


def _wrong(context: RankContext) -> None:
    communicator = world(context)
    with pytest.raises(ValueError, match=rf"send, group .*: dst={context.rank} is this rank itself"):
        communicator.send(torch.zeros(1), dst=context.rank)
    with pytest.raises(ValueError, match=r"recv, group .*: src=2 is not a rank within the group \(0 to 1\)"):
        communicator.recv(torch.Size([1]), torch.float32, src=2)


def test_wrong_peers_are_named(backend: dict[str, str]) -> None:
    """Given a peer outside the group or this rank itself, when sent to, then a ValueError says so."""
    run_ranks(_wrong, 2, env=backend)
