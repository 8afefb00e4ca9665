"""Registered memory of a group: real windows of FlagCX's API on host memory, routes that only it takes, and misuse."""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from sglang_fl.comm.agreement import agree
from sglang_fl.comm.backends.flagcx.transport import FlagCXTransport
from sglang_fl.comm.backends.torch_dist import TorchBackend
from sglang_fl.comm.backends.vendor.cuda.push import slot_bytes_for
from sglang_fl.comm.backends.vendor.cuda.symmetric import staging_bytes_for
from sglang_fl.comm.communicator import CommunicatorFL, group_context
from sglang_fl.comm.discovery import discover_backends
from sglang_fl.comm.errors import AgreementError, CommError
from sglang_fl.comm.policy import communicator_policy
from sglang_fl.comm.registered import ALIGNMENT, BLOCK_BYTES, RegisteredMemory
from sglang_fl.comm.sizes import add_routes, registered_memory
from sglang_fl.comm.types import GroupContext, Transport
from sglang_fl.config import load_settings
from sglang_fl.selection import Kind, Policy
from sglang_fl.testing.ranks import RankContext, RanksFailed, run_ranks
from tests.distributed.counted import counted_group
from tests.distributed.groups import communicator_of_all

ROUTES = "all_reduce=torch:1KiB@registered|torch:4KiB@ordinary"


def environment(hostcx: Path, routes: str = ROUTES, **more: str) -> dict[str, str]:
    """Mode fastest on hostcx."""
    return {"FLAGCX_PATH": str(hostcx), "SGLANG_FL_COMM_MODE": "fastest", "SGLANG_FL_COMM_ROUTES": routes, **more}


def counted(context: RankContext) -> tuple[list[dict[str, int]], list[int]]:
    """What carried each kind of call, and the offsets of the registered tensors in their block."""
    communicator, clock = counted_group(context)
    memory = registered_memory(communicator)
    total = sum(range(1, context.world_size + 1))
    found, offsets = [], []
    for make in (torch.empty, memory.empty):
        for elements in (256, 257, 1024, 1025):
            clock.carried.clear()
            tensor = make(elements, dtype=torch.float32)
            if make == memory.empty:
                offsets.append(tensor.data_ptr() - memory.spans[0][0])
            tensor.fill_(context.rank + 1)
            assert torch.equal(communicator.all_reduce(tensor), torch.full((elements,), float(total)))
            carried: Counter[str] = Counter()
            for (_, _, backend), counts in clock.carried.items():
                carried[backend] += counts.calls
            found.append(dict(carried))
    communicator.destroy()
    return found, offsets


def test_registered_memory_takes_its_own_routes(hostcx: Path) -> None:
    """Given routes for registered memory up to 1 KiB and for ordinary memory up to 4 KiB, when tensors of both kinds
    and of sizes around the limits are summed, then each takes its route, values are right, and the tensors lie at the
    same offsets on both ranks."""
    results = run_ranks(counted, 2, env=environment(hostcx))
    ordinary = [{"torch": 1}] * 3 + [{"flagcx": 1}]
    registered = [{"torch": 1}] + [{"flagcx": 1}] * 3
    offsets = [0, 1024, 1024 + 1280, 1024 + 1280 + 4096]
    assert results == [(ordinary + registered, offsets)] * 2
    assert all(offset % ALIGNMENT == 0 for offset in offsets)


def blocks(context: RankContext) -> list[object]:
    """Number of blocks after tensors that fit and that do not, and whether parts of them are recognised."""
    communicator = communicator_of_all(context)
    memory = registered_memory(communicator)
    counts = [len(memory.spans)]
    first = memory.empty(2, 3, dtype=torch.bfloat16)
    counts.append(len(memory.spans))
    large = memory.empty(BLOCK_BYTES, dtype=torch.uint8)
    counts.append(len(memory.spans))
    told = [memory.holds(tensor.data_ptr()) for tensor in (first, large, large[5:], torch.empty(1))]
    zero = memory.empty(0, dtype=torch.float32)
    communicator.destroy()
    with pytest.raises(CommError, match="group tp:0 is destroyed; make a new one"):
        registered_memory(communicator)
    return [counts, told, tuple(first.shape), zero.numel(), memory.holds(first.data_ptr())]


def test_blocks(hostcx: Path) -> None:
    """Given registered memory, then the first tensor makes a block, one that does not fit makes another, parts of
    tensors are recognised, ordinary memory is not, and none is once the group has ended."""
    wanted = [[0, 1, 2], [True, True, True, False], (2, 3), 0, False]
    assert run_ranks(blocks, 2, env=environment(hostcx)) == [wanted, wanted]


def unlike(context: RankContext) -> str:
    """Ranks that ask for different tensors."""
    memory = registered_memory(communicator_of_all(context))
    memory.empty(4, dtype=torch.float32)
    with pytest.raises(AgreementError) as raised:
        memory.empty(4 + context.rank, dtype=torch.float32)
    return str(raised.value)


def test_ranks_that_take_unlike_tensors(hostcx: Path) -> None:
    """Given ranks that ask for different shapes, then both raise the same error, which names shapes and ranks."""
    texts = run_ranks(unlike, 2, env=environment(hostcx))
    assert texts[0] == texts[1]
    assert "global rank 0 asks for torch.float32[4] after 1 block(s) and 256 bytes" in texts[0]
    assert "global rank 1 for torch.float32[5] after" in texts[0]


def late(context: RankContext) -> tuple[str, str, bool]:
    """The errors of a call that rank 1 came to once rank 0 had given up, and of the next; and what was taken before."""
    communicator, store = communicator_of_all(context), context.store("late")
    transport = communicator.agreed.transport
    assert transport is not None and transport.registrar is not None
    limit_s = 0.5 if context.rank == 0 else 600.0
    # The first call has all the time that it wants; it is another memory's, but the group's as well.
    tensor = registered_memory(communicator).empty(4, dtype=torch.float32).fill_(context.rank + 1)
    memory = RegisteredMemory(replace(communicator.context, timeout_s=limit_s), [transport.registrar])
    if context.rank == 1:
        store.get("given up")
    with pytest.raises(AgreementError) as raised:
        memory.empty(3, dtype=torch.float32)
    if context.rank == 0:
        store.set("given up", "1")
    with pytest.raises(CommError, match="group tp:0: its registered memory is closed") as again:
        memory.empty(3, dtype=torch.float32)
    return str(raised.value), str(again.value), torch.equal(communicator.all_reduce(tensor), torch.full((4,), 3.0))


def test_a_rank_that_comes_late_gets_no_tensor(hostcx: Path) -> None:
    """Given rank 0 that has given up waiting for rank 1, when rank 1 asks for the tensor, then it gets an error that
    says so, and neither hands out any more, so that they cannot be one tensor apart; what there is can be summed."""
    texts = run_ranks(late, 2, env={"FLAGCX_PATH": str(hostcx)})
    wanted = (
        "global rank(s) [1] did not reach 'take registered memory' within 0.5 s",
        "it came to 'take registered memory' after global rank 0 had given up waiting for [1]",
    )
    for (text, again, is_right), words in zip(texts, wanted, strict=True):
        assert words in text and text in again and again.endswith("Make a new group.") and is_right


def destroyed(context: RankContext) -> list[str]:
    """The errors of a destroyed group's memory, while the other rank's is not destroyed and does not come along."""
    communicator, store = communicator_of_all(context), context.store("destroyed")
    memory = registered_memory(communicator)
    tensor = memory.empty(4, dtype=torch.float32).fill_(5.0)
    texts = []
    if context.rank == 0:
        communicator.destroy()
        for ask in (lambda: memory.empty(3, dtype=torch.float32), lambda: registered_memory(communicator)):
            with pytest.raises(CommError) as raised:
                ask()
            texts.append(str(raised.value))
        assert tensor.tolist() == [5.0] * 4
        store.set("destroyed", "1")
    store.get("destroyed")
    return texts


@pytest.mark.parametrize("mode", ["all", "fastest"])
def test_a_destroyed_group_hands_out_nothing(hostcx: Path, mode: str) -> None:
    """Given registered memory in either mode, when its group is destroyed on a rank, then there it hands out nothing
    more, at once and with the words of every other call; a tensor that was handed out can still be read."""
    env = environment(hostcx) if mode == "fastest" else {"FLAGCX_PATH": str(hostcx)}
    assert run_ranks(destroyed, 2, env=env) == [["group tp:0 is destroyed; make a new one"] * 2, []]


# What a rank gives, and words of the error.
REFUSED: tuple[tuple[tuple[Any, ...], Any, str], ...] = (
    ((-4,), torch.float32, "gave -4 as size 0 of the shape; allowed are whole numbers from 0 to 2**63 - 1"),
    ((-3, -4), torch.float32, "gave -3 as size 0"),
    ((4, 2.5), torch.float32, "gave 2.5 as size 1"),
    ((4, 2.0), torch.float32, "gave 2.0 as size 1"),
    ((True,), torch.float32, "gave True as size 0"),
    ((4, None), torch.float32, "gave None as size 1"),
    ((["4"],), torch.float32, "gave ['4'] as size 0"),
    (((2, 2),), torch.float32, "gave (2, 2) as size 0"),
    ((0, 2**63), torch.float32, "gave 9223372036854775808 as size 1"),
    ((-(10**5000),), torch.float32, "gave an integer of 16610 bits as size 0"),
    ((2**40, 2**40), torch.float32, "gave the shape [1099511627776, 1099511627776] of torch.float32; allowed are"),
    ((4,), "float32", "gave dtype='float32'; allowed is a dtype of torch"),
)


def refused(context: RankContext) -> list[list[str]]:
    """The errors where one rank's arguments are none, and where all ranks' are; what is taken later lies alike."""
    memory = registered_memory(communicator_of_all(context))
    taken = [memory.empty(4, dtype=torch.float32).fill_(0.0)]
    texts = []
    for shape, dtype, _ in REFUSED:
        given = [((4,), torch.float32) if context.rank == 0 else (shape, dtype), (shape, dtype)]
        texts.append([])
        for arguments, kind in given:
            with pytest.raises(CommError) as raised:
                memory.empty(*arguments, dtype=kind)
            texts[-1].append(str(raised.value))
        taken.append(memory.empty(np.int64(2), torch.tensor(2), dtype=torch.float32).fill_(float(len(taken))))
    assert [set(tensor.flatten().tolist()) for tensor in taken] == [{float(number)} for number in range(len(taken))]
    offsets = [tensor.data_ptr() - memory.spans[0][0] for tensor in taken]
    assert offsets == [number * ALIGNMENT for number in range(len(taken))]
    assert len(memory.spans) == 1
    return texts


def test_arguments_that_are_none_are_refused_on_all_ranks(hostcx: Path) -> None:
    """Given shapes with sizes that are negative, no integers or too large, or another thing than a dtype, when one rank
    or all give them, then all raise the same error at once, and the tensors that are taken later neither overlap nor
    lie elsewhere; integers of NumPy and torch are sizes."""
    first, second = run_ranks(refused, 2, env=environment(hostcx))
    assert first == second
    for (one, every), (_, _, words) in zip(first, REFUSED, strict=True):
        assert one.startswith(f"group tp:0: registered memory cannot be taken: global rank 1 {words}")
        assert every == one.replace("global rank 1", "global rank 0")


def without(context: RankContext) -> str:
    """A group whose routes make no registered memory."""
    communicator = communicator_of_all(context)
    with pytest.raises(CommError) as raised:
        registered_memory(communicator)
    communicator.destroy()
    return str(raised.value)


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        ("all", "group tp:0: torch makes no registered memory. Choose FlagCX with SGLANG_FL_DIST_BACKEND=flagcx"),
        (
            "fastest",
            "group tp:0: none of its routes makes registered memory; route symm_two_shot left out: all ranks: the "
            "group's tensors are on cpu, not on cuda. Give it one that does",
        ),
    ],
)
def test_a_group_without_registered_memory(mode: str, wanted: str) -> None:
    """Given mode all, or routes none of which makes registered memory, then asking for some is the same error on all
    ranks, which says what was left out and what to set."""
    routes = "all_reduce=torch:1KiB@ordinary|symm_two_shot@registered"
    variables = {"SGLANG_FL_DIST_BACKEND": "torch", "SGLANG_FL_COMM_MODE": mode, "SGLANG_FL_COMM_ROUTES": routes}
    texts = run_ranks(without, 2, env=variables)
    assert texts[0] == texts[1] and texts[0].startswith(wanted)


def in_mode_all(context: RankContext) -> list[bool]:
    """Whether a second question finds the same memory, and a sum of it is right."""
    communicator = communicator_of_all(context)
    memory = registered_memory(communicator)
    tensor = memory.empty(1000, dtype=torch.bfloat16).fill_(context.rank + 1)
    result = communicator.all_reduce(tensor)
    found = [registered_memory(communicator) is memory, memory.holds(tensor.data_ptr())]
    found += [result is tensor, torch.equal(tensor, torch.full((1000,), 3.0, dtype=torch.bfloat16))]
    communicator.destroy()
    return found


def test_memory_of_the_backend_in_mode_all(hostcx: Path) -> None:
    """Given mode all on FlagCX, then the group has registered memory of its library's, and sums it in place."""
    assert run_ranks(in_mode_all, 2, env={"FLAGCX_PATH": str(hostcx)}) == [[True] * 4] * 2


def windows(context: RankContext) -> list[object]:
    """FlagCX's windows: calls that the library has seen, what it says of blocks, and the error where ranks differ."""
    communicator = communicator_of_all(context)
    transport = communicator.agreed.transport
    assert isinstance(transport, FlagCXTransport)
    library = ctypes.CDLL(transport.communicator.library.path)
    library.hostcxCallCountOf.restype = ctypes.c_uint64

    def calls() -> int:
        return int(library.hostcxCallCountOf(b"flagcxCommWindowRegister"))

    found: list[object] = [calls()]
    registered_memory(communicator).empty(8, dtype=torch.float32)
    found.append(calls())
    block = torch.zeros(4096, dtype=torch.uint8)
    found += [transport.registrar.adopt(block.data_ptr(), 4096), calls()]
    found.append("0 bytes" in transport.registrar.adopt(block.data_ptr(), 0))
    with pytest.raises(CommError) as raised:
        transport.registrar.adopt(block.data_ptr(), 0 if context.rank else 4096)
    communicator.destroy()
    return [*found, str(raised.value)]


def test_blocks_are_windows_of_flagcx(hostcx: Path) -> None:
    """Given registered memory of FlagCX's, then its block becomes a window, one of another's does as well, one that
    the library refuses everywhere is told with the reason, and one that it refuses on a rank is an error on all."""
    for *found, text in run_ranks(windows, 2, env={"FLAGCX_PATH": str(hostcx)}):
        assert found == [0, 1, "", 2, True]
        assert text.startswith("flagcx: global rank 1 has no registered memory: ")


def strictly(context: RankContext) -> tuple[tuple[str, ...], str]:
    """The routes of a group that can be made, and the error of its registered memory."""
    communicator = communicator_of_all(context)
    with pytest.raises(AgreementError) as raised:
        registered_memory(communicator)
    communicator.destroy()
    return communicator.routes, str(raised.value)


def test_routes_for_registered_memory_alone_are_made_when_it_is_wanted(hostcx: Path) -> None:
    """Given strict mode and a route that only registered memory would take and that cannot be used, then the group is
    made, and the memory is an error that names the reason; for any memory, the group is."""
    routes = "all_reduce=symm_two_shot@registered"
    for words, text in run_ranks(strictly, 2, env=environment(hostcx, routes, SGLANG_FL_STRICT="1")):
        assert words == ("all_reduce by size: symm_two_shot@registered|else flagcx",)
        assert "route symm_two_shot left out: all ranks: the group's tensors are on cpu" in text
    with pytest.raises(RanksFailed, match="Strict mode allows no route"):
        run_ranks(strictly, 2, env=environment(hostcx, "all_reduce=symm_two_shot", SGLANG_FL_STRICT="1"))


def test_an_unknown_name_is_told_at_once(hostcx: Path) -> None:
    """Given a misspelled backend in a route for registered memory alone, then the group cannot be made."""
    with pytest.raises(RanksFailed, match=r"comm\.routes names 'symm_to_shot', which no rank has; .* Did you mean"):
        run_ranks(strictly, 2, env=environment(hostcx, "all_reduce=symm_to_shot@registered"))


def later(context: RankContext) -> tuple[list[str], tuple[str, ...]]:
    """The recorders before and after the memory is wanted, and the words of the group's routes."""
    communicator = communicator_of_all(context)
    before = len(communicator.recorders())
    tensor = registered_memory(communicator).empty(64, dtype=torch.float32).fill_(context.rank + 1)
    communicator.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((64,), 3.0))
    names = [recorder.name for recorder in communicator.recorders() if recorder.entered()]
    assert len(communicator.recorders()) == before + 1
    communicator.destroy()
    return names, communicator.routes


def test_a_transport_that_comes_later_carries_and_is_recorded(hostcx: Path) -> None:
    """Given a route that only registered memory takes, then its transport is made with the memory, carries its calls,
    and its recorder is one of the group's."""
    for names, words in run_ranks(later, 2, env=environment(hostcx, "all_reduce=torch@registered")):
        assert words == ("all_reduce by size: torch@registered|else flagcx",)
        assert "tp:0 torch" in names


class Noting(TorchBackend):
    """A backend that keeps the context of its creation."""

    context: GroupContext | None = None

    def create(self, context: GroupContext) -> Transport:
        self.context = context
        return super().create(context)


def sizes(context: RankContext) -> tuple[int, int]:
    """What a slot of symm_push and the buffer of two shots get where the group's only route is theirs."""
    noting = Noting("noting", Kind.VENDOR, vendor="acme")
    settings = load_settings(platform="cpu")
    group = dist.new_group(list(range(context.world_size)), backend="gloo")
    described = group_context(group, group, "cpu", range(context.world_size), "tp:0", settings, 20.0)
    backends, policy = {**discover_backends().backends, "noting": noting}, communicator_policy(settings)
    agreed, words = add_routes(described, agree(described, backends, policy), settings.comm.routes, backends, policy)
    communicator = CommunicatorFL.from_agreed(described, agreed, routes=words)
    registered_memory(communicator)
    assert noting.context is not None
    found = slot_bytes_for(noting.context), staging_bytes_for(noting.context)
    communicator.destroy()
    return found


@pytest.mark.parametrize(
    ("routes", "slot", "staging"),
    [
        ("noting:1MiB@graph@registered", 2**20, 2**20),
        ("noting:128KiB@registered", 2**17, 2**17),
        ("noting@registered", 2**20, 2**22),
        ("noting:32KiB@ordinary", 2**16, 2**16),
        ("noting:16MiB@ordinary", 2**20, 2**24),
        ("noting:16MiB@graph@ordinary|noting@registered", 2**20, 2**24),
        ("noting:512KiB@ordinary|noting:2MiB@registered", 2**20, 2**21),
        ("noting", 2**20, 2**26),
    ],
)
def test_buffers_are_as_large_as_calls(hostcx: Path, routes: str, slot: int, staging: int) -> None:
    """Given routes with limits for registered memory, ordinary or both, then a slot, which all that is pushed goes
    through, has room for the largest call up to 1 MiB; and the buffer of two shots for one of ordinary memory up to
    64 MiB, or for a piece of registered memory, which goes through it where it must stay as it is, up to 4 MiB."""
    assert run_ranks(sizes, 2, env=environment(hostcx, f"all_reduce={routes}")) == [(slot, staging)] * 2


class RouteOnly(TorchBackend):
    """A vendor's backend that is no group's."""

    is_route_only = True


def chosen(context: RankContext, token: str) -> str:
    """What a group takes where the order has ``token`` and then the reference."""
    settings = load_settings(platform="cpu")
    group = dist.new_group(list(range(context.world_size)), backend="gloo")
    described = group_context(group, group, "cpu", range(context.world_size), "tp:0", settings, 20.0)
    backends = {
        "quick": RouteOnly("quick", Kind.VENDOR, vendor="acme"),
        "torch": TorchBackend("torch", Kind.REFERENCE),
    }
    policy = replace(
        communicator_policy(settings), per_item=Policy(per_item={"communicator": (token, "reference")}).per_item
    )
    return agree(described, backends, policy).backend.name


@pytest.mark.parametrize(("token", "wanted"), [("vendor", "torch"), ("vendor:acme", "torch"), ("quick", "quick")])
def test_a_kind_does_not_stand_for_a_backend_of_routes(token: str, wanted: str) -> None:
    """Given a vendor's backend that is for routes alone, then an order that names the kind or the vendor passes it by,
    and one that names it takes it."""
    assert run_ranks(chosen, 2, token) == [wanted, wanted]
