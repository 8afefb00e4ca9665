"""broadcast_tensor_dict, send_tensor_dict and recv_tensor_dict: the dictionaries that pipeline stages hand on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_fl.comm.communicator import CommunicatorFL
from sglang_fl.testing.ranks import RankContext, run_ranks
from tests.distributed.groups import group_of, over_groups, world
from tests.distributed.matrix import DTYPES, Case, Layout, few_cases, place, same

MIB = 2**20


def _content(rank: int, salt: int = 0) -> dict[str, Any]:
    """Tensors of every dtype and layout, empty ones, and other values, different on every rank."""
    content: dict[str, Any] = {"rank": rank, "none": None, "nested": {"a": [salt, "é"]}}
    layouts = list(Layout)
    for number, dtype in enumerate(DTYPES):
        case = Case(dtype, (4, 6), layouts[number % len(layouts)], salt * 32 + number)
        content[str(dtype)] = place(case.bits(rank), case.layout)
    content["empty"] = torch.empty(0, 3, dtype=torch.bfloat16)
    content["scalar"] = torch.tensor(rank + 0.5)
    content["last"] = "end"
    return content


def _equal(actual: dict[str, Any] | None, expected: dict[str, Any]) -> None:
    assert actual is not None and list(actual) == list(expected)  # keys come in the sender's order
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            same(actual[key], value, key)
        else:
            assert actual[key] == value, key


def _broadcast(communicator: CommunicatorFL, case: Case) -> None:
    for src in range(communicator.world_size):
        given = _content(communicator.ranks[src], case.salt) if communicator.rank_in_group == src else None

        received = communicator.broadcast_tensor_dict(tensor_dict=given, src=src)

        _equal(received, _content(communicator.ranks[src], case.salt))
        assert given is None or received is given


def test_broadcast(backend: dict[str, str]) -> None:
    """Cases 5 and 11. Given a dictionary on one rank of groups in any order, when it is broadcast, then all ranks
    have its keys in order, its tensors bit for bit in every dtype, its other values; the source has its own."""
    run_ranks(over_groups, 4, _broadcast, few_cases([torch.float32]), env=backend)


def _pass_on(communicator: CommunicatorFL, case: Case) -> None:
    mine, size = communicator.rank_in_group, communicator.world_size
    for async_send in (False, True):
        for distance in range(1, size):
            dst, src = (mine + distance) % size, (mine - distance) % size
            given = _content(communicator.ranks[mine], case.salt)

            works = communicator.send_tensor_dict(tensor_dict=given, dst=dst, async_send=async_send)
            if not async_send:
                assert works == []
                for value in given.values():
                    if isinstance(value, torch.Tensor):
                        value.zero_()  # a blocking send's tensors are free again
            _equal(communicator.recv_tensor_dict(src=src), _content(communicator.ranks[src], case.salt))
            for work in works:
                work.work.wait()


def test_all_ranks_send_first(backend: dict[str, str]) -> None:
    """Cases 1, 5 and 11. Given groups in any order, when all ranks send a dictionary and then receive one, blocking
    or not, then each has what was sent before it was changed, and only async_send returns works."""
    run_ranks(over_groups, 4, _pass_on, few_cases([torch.float32]), env=backend)


def _large(rank: int) -> dict[str, Any]:
    wide = torch.full((4, 2 * MIB), float(rank))
    wide[:, 1::2] = 9.0
    return {"h": torch.full((16 * MIB,), float(rank)), "slice": wide[:, ::2], "n": rank}


def _both_send_large(context: RankContext, async_send: bool) -> None:
    communicator, other = world(context), 1 - context.rank
    sent = _large(context.rank)
    works = communicator.send_tensor_dict(sent, async_send=async_send)
    assert bool(works) == async_send
    if async_send:
        assert all(hasattr(work, "work") and hasattr(work, "payload") for work in works)
    sent.clear()
    torch.full((16 * MIB,), -1.0)  # takes the memory that was let go
    torch.full((4, MIB), -1.0)
    _equal(communicator.recv_tensor_dict(), _large(other))
    for work in works:
        work.work.wait()
    communicator.destroy()


@pytest.mark.parametrize("async_send", [False, True])
def test_both_send_64_mib_first(async_send: bool, backend: dict[str, str]) -> None:
    """Cases 1 and 2. Given 64 MiB and a slice that has to be made contiguous each way, when both ranks send first
    and let go of what they sent, then both finish with the old bytes."""
    run_ranks(_both_send_large, 2, async_send, env=backend)


def _shares(context: RankContext) -> None:
    stages = [group_of(ranks, context) for ranks in ([0, 1], [3, 2])]  # the second one in another order
    pipes = [group_of(ranks, context) for ranks in ([0, 3], [1, 2])]
    (stage,) = (group for group in stages if group is not None)
    (pipe,) = (group for group in pipes if group is not None)
    for salt, async_send in enumerate((False, True)):
        content = {**_content(7, salt), "odd": torch.arange(5.0), "even": torch.arange(12.0).view(3, 4).t()}
        if pipe.rank_in_group == 0:
            works = pipe.send_tensor_dict(content, dst=1, all_gather_group=stage, async_send=async_send)
            for work in works:
                work.work.wait()
        else:
            _equal(pipe.recv_tensor_dict(src=0, all_gather_group=stage), content)
    pipe.destroy()
    stage.destroy()


def test_shares_of_an_all_gather_group(backend: dict[str, str]) -> None:
    """Given two stages of two ranks with the same dictionary, when each rank sends with all_gather_group, then the
    receivers have the whole tensors, those that cannot be divided among them."""
    run_ranks(_shares, 4, env=backend)


def _wrong(context: RankContext) -> None:
    communicator = world(context)
    with pytest.raises(ValueError, match=rf"send_tensor_dict, group .*: dst={context.rank} is this rank itself"):
        communicator.send_tensor_dict({"a": 1}, dst=context.rank)
    with pytest.raises(ValueError, match=r"recv_tensor_dict, group .*: src=5 is not a rank"):
        communicator.recv_tensor_dict(src=5)
    with pytest.raises(TypeError, match="a dictionary is needed, got list"):
        communicator.send_tensor_dict([1])  # type: ignore[arg-type]


def test_wrong_arguments_are_named(backend: dict[str, str]) -> None:
    """Given a peer outside the group or something else than a dictionary, when sent, then the error says so."""
    run_ranks(_wrong, 2, env=backend)


def _alone(context: RankContext) -> None:
    communicator = world(context)
    content = {"a": torch.ones(2), "b": 1}
    assert communicator.broadcast_tensor_dict(content) is content
    assert communicator.send_tensor_dict(content) is content
    assert communicator.recv_tensor_dict() is None


def test_a_group_of_one(backend: dict[str, str]) -> None:
    """Given a group of one rank, when dictionaries are handed on, then SGLang's own answers come back."""
    run_ranks(_alone, 1, env=backend)
