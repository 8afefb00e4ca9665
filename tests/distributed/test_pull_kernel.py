"""The kernel of the route symm_pull, interpreted by Triton, between real processes over shared memory.

On a GPU the blocks are torch's symmetric memory and the kernel is compiled; what a call reads where, what it waits for
and when it writes is the same here. What the interpreter has no word for, flags in PTX, is looked at as text.
"""

from __future__ import annotations

import itertools
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sglang_fl.comm.backends.vendor.cuda.pull import (
    OPTIONS,
    PACK_BYTES,
    PACKS,
    ROW_BYTES,
    PullBackend,
    PullFlags,
    PullTransport,
    grid_of,
    packs_for,
    steps_of,
)
from sglang_fl.comm.backends.vendor.cuda.symmetric_group import SymmetricGroup
from sglang_fl.comm.types import GroupContext
from sglang_fl.testing.ranks import RankContext, run_ranks

PROGRAMS = 2
STEP_BYTES = PROGRAMS * PACK_BYTES  # of one pack a program
STAGING_BYTES = 2 * STEP_BYTES
REGISTERED_BYTES = 16 * STEP_BYTES
SEVERAL_STEPS = 9 * STEP_BYTES // 4  # elements: three steps of float32 with four packs each, two of two bytes
INTERPRETED = {"TRITON_INTERPRET": "1"}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
METHODS = ("all_reduce", "all_reduce_new")


class NoStreams:
    """The order of streams where there are none."""

    def take_turn(self) -> None:
        """Nothing to wait for."""


class Place:
    """A rank's transport, whose counters begin at ``number``, and its registered block, on files that all ranks map."""

    def __init__(self, context: RankContext, folder: Path, number: int = 0) -> None:
        ranks = list(range(context.world_size))
        group = dist.new_group(ranks, backend="gloo")
        described = GroupContext("tp:0", tuple(ranks), context.rank, torch.device("cpu"), group, group)

        shared = SymmetricGroup(described)

        def mapped(name: str, size: int) -> torch.Tensor:
            blocks = [torch.from_file(str(folder / f"{name}{rank}"), True, size, dtype=torch.uint8) for rank in ranks]
            self._blocks += blocks  # mapped as long as the transport is used
            own = blocks[context.rank]
            addresses = [block.data_ptr() for block in blocks]
            shared._handles[own.data_ptr()] = SimpleNamespace(rank=context.rank, buffer_ptrs=addresses)
            return own

        def block(_: GroupContext, size: int) -> torch.Tensor:
            return mapped("registered", size)

        self._blocks: list[torch.Tensor] = []
        stand_ins: dict[str, Any] = {"order": NoStreams(), "_block": block}
        for name, stand_in in stand_ins.items():
            setattr(shared, name, stand_in)
        flag_block = mapped("flags", PROGRAMS * ROW_BYTES)
        flag_block.view(torch.int32).fill_(number)
        rank, addresses = shared.addresses_of(flag_block)
        flags = PullFlags.at(flag_block, addresses, rank)
        flags.counters.fill_(number)
        self.registered = shared.registered(described, REGISTERED_BYTES)
        staging = mapped("staging", STAGING_BYTES)
        self.transport = PullTransport("symm_pull", described, shared, flags, staging, shared.distances_of(staging))
        dist.barrier()

    def tensor(self, count: int, dtype: torch.dtype, is_registered: bool, shift: int = 0) -> torch.Tensor:
        """``count`` elements between two of -1; what is registered begins ``shift`` elements after 256 bytes."""
        if is_registered:
            start = 256 // dtype.itemsize - 1 + shift
            whole = self.registered.view(dtype)[start : start + count + 2]
        else:
            whole = torch.empty(count + 2, dtype=dtype)
        whole.fill_(-1)
        return whole[1 : count + 1]


def data(rank: int, count: int, dtype: torch.dtype, turn: int) -> torch.Tensor:
    """Whole numbers that depend on everything."""
    return ((torch.arange(count) * 7 + rank * 13 + turn * 5) % 50).to(dtype)


def total(count: int, dtype: torch.dtype, turn: int, world_size: int) -> torch.Tensor:
    """The sum over the ranks."""
    return torch.stack([data(rank, count, torch.float32, turn) for rank in range(world_size)]).sum(0).to(dtype)


def neighbours(tensor: torch.Tensor) -> list[float]:
    """The elements before and after, which :meth:`Place.tensor` made -1."""
    wide = tensor.as_strided((tensor.numel() + 2,), (1,), tensor.storage_offset() - 1)
    return [wide[0].item(), wide[-1].item()]


def sums(context: RankContext, folder: Path, number: int) -> list[str]:
    """What was wrong in calls of every kind, of ranks that take their time in turns."""
    place = Place(context, folder, number)
    delays = random.Random(context.rank)
    cases = [
        (dtype, count, is_registered, method)
        for dtype in DTYPES
        for count in (1, 17, 4096, 9000, 3 * STEP_BYTES // 4, SEVERAL_STEPS, 0)
        for is_registered in (False, True)
        for method in METHODS
    ]
    random.Random(0).shuffle(cases)  # calls of different sizes one after the other
    wrong = []
    for turn, (dtype, count, is_registered, method) in enumerate(cases):
        case = f"turn {turn}, {method} of {count} {dtype}, {'registered' if is_registered else 'ordinary'}"
        tensor = place.tensor(count, dtype, is_registered, shift=turn % 2)
        tensor.copy_(data(context.rank, count, dtype, turn))
        time.sleep(delays.choice((0, 0, 0.01)))
        found = getattr(place.transport, method)(tensor)
        result = tensor if found is None else found
        if not torch.equal(result, total(count, dtype, turn, context.world_size)):
            wrong.append(f"{case}: {result[:4].tolist()}")
        if method == "all_reduce_new" and not torch.equal(tensor, data(context.rank, count, dtype, turn)):
            wrong.append(f"{case}: the argument changed")
        if neighbours(tensor) != [-1, -1]:
            wrong.append(f"{case}: a neighbour changed")
    dist.barrier()
    return wrong


@pytest.mark.parametrize(("world_size", "number"), [(3, 0), (2, 2**31 - 100)], ids=["from-0", "beyond-2**31"])
def test_sums(world_size: int, number: int, tmp_path: Path) -> None:
    """Given tensors of each dtype, ordinary and registered, of one element, of every number of packs, and of several
    steps and buffers, in calls of changing sizes, when ranks that are late in turns sum them, then every value is
    right, also where the numbers of the flags run over."""
    results = run_ranks(sums, world_size, tmp_path, number, env=INTERPRETED, start_method="spawn", timeout_s=150)
    assert results == [[]] * world_size


def slow(wait: Callable[..., None]) -> Callable[..., None]:
    """``wait``, and some time more, in which peers that do not wait would go on."""

    def and_sleep(*arguments: Any) -> None:
        wait(*arguments)
        time.sleep(0.05)

    return and_sleep


def behind(context: RankContext, folder: Path) -> list[str]:
    """The last rank is late within every call: after the others' flags have come, before it reads their tensors."""
    from sglang_fl.comm.backends.vendor.cuda import pull_kernel

    place = Place(context, folder)
    if context.rank == context.world_size - 1:
        pull_kernel.wait = slow(pull_kernel.wait)
    wrong = []
    for is_registered, method in itertools.product((False, True), METHODS):
        count = SEVERAL_STEPS if is_registered else 3 * STEP_BYTES // 4
        tensor = place.tensor(count, torch.float32, is_registered)
        for turn in range(4):
            tensor.copy_(data(context.rank, count, torch.float32, turn))
            found = getattr(place.transport, method)(tensor)
            result = tensor if found is None else found
            if not torch.equal(result, total(count, torch.float32, turn, context.world_size)):
                wrong.append(f"turn {turn}, {method}, {'registered' if is_registered else 'ordinary'}")
    dist.barrier()
    return wrong


def test_nothing_is_overwritten_before_all_have_read_it(tmp_path: Path) -> None:
    """Given a rank that reads late, when the others write to their tensors, in a call or after it, or copy the next
    call's into the buffer, then its sums are of what it was to read."""
    assert run_ranks(behind, 2, tmp_path, env=INTERPRETED, start_method="spawn", timeout_s=90) == [[], []]


def ptx_of(dtype: str, world: int, packs: int, is_aligned: bool) -> str:
    """Of the kernel, compiled for a H200."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sglang_fl.comm.backends.vendor.cuda.pull_kernel import pull_kernel

    names: list[str] = pull_kernel.arg_names
    types = {"source_ptr": dtype, "target_ptr": dtype, "flags_ptr": "*i32", "counters_ptr": "*i32", "count": "i32"}
    types |= {"distances_ptr": "*i64", "flag_distances_ptr": "*i64"}
    signature = {name: types.get(name, "constexpr") for name in names}
    may_be_odd = ("source_ptr", "target_ptr", "count")
    multiples = {
        (names.index(name),): [["tt.divisibility", 16]] for name in types if is_aligned or name not in may_be_odd
    }
    block = packs * PACK_BYTES // (4 if dtype == "*fp32" else 2)
    constants = {"rank": world - 1, "world": world, "block": block}
    source = ASTSource(pull_kernel, signature, constants, multiples)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=OPTIONS)
    return str(compiled.asm["ptx"])


TELL = "st.relaxed.sys.global.u32"
WAIT = "ld.relaxed.sys.global.u32"
READ = "ld.global.cg.v4.b32"
WRITE = "st.global.v4.b32"
ARRIVED, BARRIER = "fence.acq_rel.gpu", "bar.sync"


@pytest.mark.parametrize("dtype", ["*bf16", "*fp16", "*fp32"])
@pytest.mark.parametrize("packs", PACKS)
def test_order_in_ptx(dtype: str, packs: int) -> None:
    """Given the kernel for two ranks, compiled for a H200, then it tells, waits, reads 16 bytes a thread and pack, all
    before it looks at the first, lets the loads of all threads arrive, tells, and waits again before it writes."""
    steps = re.findall(
        "|".join(map(re.escape, (TELL, WAIT, READ, WRITE, ARRIVED, BARRIER))), ptx_of(dtype, 2, packs, True)
    )
    begin, end = [TELL, WAIT, BARRIER], [BARRIER, TELL, WAIT, BARRIER]
    assert steps == [*begin, *[READ] * 2 * packs, *[ARRIVED] * packs, *end, *[WRITE] * packs]


@pytest.mark.parametrize(("world_size", "packs"), [(3, (1, 2, 4)), (4, (1, 2, 4)), (8, (1, 2)), (16, (1,)), (32, (1,))])
def test_other_kernels_compile(world_size: int, packs: tuple[int, ...]) -> None:
    """Given more ranks, and tensors that are aligned or not, then the kernel compiles for as many packs as there are
    registers for, and tells and waits for all ranks at once."""
    assert packs_for(world_size) == packs
    for is_aligned in (True, False):
        text = ptx_of("*bf16", world_size, packs[-1], is_aligned)
        assert (text.count(TELL), text.count(WAIT)) == (2, 2)


@pytest.mark.parametrize(
    ("size", "programs", "packs"),
    [
        (2, 1, 1),
        (PACK_BYTES, 1, 1),
        (PACK_BYTES + 2, 2, 1),
        (132 * PACK_BYTES, 132, 1),
        (132 * PACK_BYTES + 2, 67, 2),
        (2**21, 128, 2),
        (2**22, 128, 4),
        (528 * PACK_BYTES, 132, 4),
        (2**30, 132, 4),
    ],
)
def test_grid(size: int, programs: int, packs: int) -> None:
    """Given 132 programs, then a call has as few packs a program as it has room for in one step, and as few programs
    as these packs need; a larger one has all programs and the most packs."""
    assert grid_of(size, 132, steps_of(132, packs_for(2))) == (programs, packs)


def test_flags_of_a_program() -> None:
    """Given the length of a row of flags, then the kernel and its host agree on it."""
    from sglang_fl.comm.backends.vendor.cuda.flags import ROW

    assert ROW.value * 4 == ROW_BYTES


def test_not_on_a_cpu() -> None:
    """Given a group on the CPU, then the backend is not available there."""
    group: Any = None
    context = GroupContext("tp:0", (0, 1), 0, torch.device("cpu"), group, group)
    assert PullBackend("symm_pull").probe(context).reason == "the group's tensors are on cpu, not on cuda"
