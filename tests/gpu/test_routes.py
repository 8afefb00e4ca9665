"""Routes over symmetric memory, and registered memory with FlagCX's windows, on real GPUs: values, graphs, streams.

With one GPU both ranks share it, which torch must be told; each wait for the peer then takes the GPU's turns, so that
counts are small. Times mean nothing there, values everything.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sglang_fl.comm import CommunicatorFL
from sglang_fl.comm.backends.vendor.cuda.symmetric_group import SHARED_DEVICES
from sglang_fl.comm.monitor import EXIT_CODE
from sglang_fl.comm.registered import ALIGNMENT
from sglang_fl.comm.replays import watch_graphs
from sglang_fl.comm.sizes import registered_memory
from sglang_fl.testing.ranks import FailureKind, RankContext, RanksFailed, run_ranks
from tests.gpu.places import Places, places
from tests.rank_pool import RankPool

pytestmark = pytest.mark.gpu

PUSH, PULL, TWO_SHOT = "symm_push", "symm_pull", "symm_two_shot"
WAYS = (PUSH, PULL, "symm_one_shot", TWO_SHOT)
OWN_KERNELS = (PUSH, PULL)  # which sum float16, too
BUFFER = "1MiB"  # routes of up to so much, so that a few MiB are beyond them
LIMIT_S = 30.0
TASK_S = 120.0  # for a function in the pool, with the kernels that it compiles
START_AND_RUN_S = 240.0
DTYPES = (torch.bfloat16, torch.float32)
# Elements; whole vectors and not, one block of threads and many, up to the buffer in float32.
COUNTS = (1, 2, 3, 8, 255, 5120, 2**15 + 1, 2**18)
LARGER_COUNTS = (2**16, 2**19, 2**20, 3 * 2**20 + 4)  # symm_pull takes 1, 2, 4 packs a step, and several steps
SHIFTS = (0, 1, 8)
TURNS = 8


def environment(stand: Places, rank: int, folder: str, limit_s: float = LIMIT_S) -> dict[str, str | None]:
    """Of a rank on FlagCX, whose routes :func:`routed` adds; ``folder`` is for the dumps."""
    return {
        "SGLANG_FL_DIST_BACKEND": "flagcx",
        "FLAGCX_PATH": os.environ["FLAGCX_PATH"],
        "SGLANG_FL_COMM_MODE": "fastest",
        "SGLANG_FL_COMM_DUMP_DIR": folder,
        "SGLANG_FL_COMM_TIMEOUT_S": f"{limit_s}",
        SHARED_DEVICES: "1" if stand.is_shared else None,
        **stand.environment(rank),
    }


def routed(routes: str) -> dict[str, str]:
    """What a test has of its own."""
    return {"SGLANG_FL_COMM_ROUTES": routes}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Two ranks for all tests that leave them alive: each makes new groups, on symmetric memory that they share."""
    stand = places(2)
    with tempfile.TemporaryDirectory() as folder:
        made = RankPool(stand.world_size, lambda rank: environment(stand, rank, folder), TASK_S)
        yield made
        made.close()


def group_of(context: RankContext) -> CommunicatorFL:
    """All ranks."""
    torch.cuda.set_device(context.local_rank)
    ranks = list(range(context.world_size))
    watch_graphs(LIMIT_S)
    return CommunicatorFL(
        cpu_group=dist.new_group(ranks, backend="gloo"),
        device_group=dist.new_group(ranks, backend="nccl"),
        device=f"cuda:{context.local_rank}",
        ranks=ranks,
        name="tp:0",
    )


def data(rank: int, count: int, dtype: torch.dtype, turn: int = 0) -> torch.Tensor:
    """Whole numbers that depend on rank, place and turn; sums of two are exact in every dtype."""
    return ((torch.arange(count, device="cuda") * 7 + rank * 13 + turn * 3) % 100).to(dtype)


def total(count: int, dtype: torch.dtype, world_size: int, turn: int = 0) -> torch.Tensor:
    """The sum over the ranks."""
    return sum((data(rank, count, torch.float32, turn) for rank in range(world_size)), torch.tensor(0.0)).to(dtype)


def entered(group: CommunicatorFL, name: str) -> int:
    """Calls that one transport of the group has carried."""
    return sum(recorder.entered() for recorder in group.recorders() if recorder.name == f"tp:0 {name}")


# --- values ---


def space_of(group: CommunicatorFL, size: int, is_registered: bool) -> torch.Tensor:
    """``size`` bytes."""
    if is_registered:
        return registered_memory(group).empty(size, dtype=torch.uint8)
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def sums(context: RankContext, way: str, is_registered: bool) -> list[str]:
    """What was wrong, and what did not go the way that it should."""
    group = group_of(context)
    space = space_of(group, 4 * (COUNTS[-1] + 2 * SHIFTS[-1]), is_registered)
    size, rank, wrong = context.world_size, context.rank, []
    if any("left out" in words for words in group.routes):
        return list(group.routes)
    for dtype in (*DTYPES, *([torch.float16] * (way in OWN_KERNELS))):
        for count in COUNTS:
            for shift in SHIFTS:
                for method in ("all_reduce", "all_reduce_in_place", "all_reduce_new"):
                    before = entered(group, way)
                    whole = space.view(dtype)[: count + 2 * shift].fill_(-1)
                    tensor = whole[shift : shift + count]
                    tensor.copy_(data(rank, count, dtype))
                    result = getattr(group, method)(tensor)
                    case = f"{method} of {count} {dtype} at {shift}"
                    if not torch.equal(result, total(count, dtype, size)):
                        wrong.append(f"{case}: {result[:4].tolist()}")
                    if method == "all_reduce_new" and not torch.equal(tensor, data(rank, count, dtype)):
                        wrong.append(f"{case}: its argument changed")
                    if not all(bool((edge == -1).all()) for edge in (whole[:shift], whole[shift + count :])):
                        wrong.append(f"{case}: a neighbour changed")
                    if entered(group, way) != before + 1:
                        wrong.append(f"{case}: another transport carried it")
    elsewhere = [(torch.int64, 512), (torch.bfloat16, 2**20)] + [(torch.float16, 512)] * (way not in OWN_KERNELS)
    for dtype, count in elsewhere:
        before = entered(group, way)
        result = group.all_reduce(data(rank, count, dtype))
        if not torch.equal(result, total(count, dtype, size)):
            wrong.append(f"{count} {dtype}: {result[:4].tolist()}")
        if entered(group, way) != before:
            wrong.append(f"{count} {dtype}: {way} carried what is not its own")
    dist.barrier()
    group.destroy()
    return wrong


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_registered", [False, True], ids=["ordinary", "registered"])
def test_sums(two_places: Places, pool: RankPool, way: str, is_registered: bool) -> None:
    """Given tensors of its dtypes, any length and offset, when they are summed, then values are exact, neighbours
    and arguments stay, and the route carries them; other dtypes and longer ones go to the group's backend."""
    assert pool.run(sums, way, is_registered, env=routed(f"all_reduce={way}:{BUFFER}")) == [[], []]


def registered(context: RankContext, beyond: str) -> list[str]:
    """As :func:`sums`, of registered memory; and what the memory has to say of FlagCX's windows."""
    group = group_of(context)
    memory = registered_memory(group)
    size, rank, wrong = context.world_size, context.rank, []
    small = memory.empty(4, 128, dtype=torch.bfloat16)
    large = memory.empty(3 * 2**20 + 4, dtype=torch.float32)
    if small.data_ptr() % ALIGNMENT or large.data_ptr() % ALIGNMENT or len(memory.spans) != 1:
        wrong.append(f"not aligned or not in one block: {memory.spans}")
    wanted = {beyond: 0, "flagcx": 0}
    for turn in range(TURNS):
        for tensor, way in ((small, "flagcx"), *((large[:count], beyond) for count in LARGER_COUNTS)):
            tensor.copy_(data(rank, tensor.numel(), tensor.dtype, turn).view(tensor.shape))
            before = entered(group, way)
            result = group.all_reduce(tensor)
            expected = total(tensor.numel(), tensor.dtype, size, turn).view(tensor.shape)
            if not torch.equal(result, expected) or result is not tensor:
                wrong.append(f"{way}, turn {turn}: {result.flatten()[:4].tolist()}")
            wanted[way] += entered(group, way) - before
    if wanted != {beyond: len(LARGER_COUNTS) * TURNS, "flagcx": TURNS}:
        wrong.append(f"carried: {wanted}")
    dist.barrier()
    group.destroy()
    # Ranks that share a GPU are hosts of their own to NCCL, which has symmetric windows within a host.
    return [*wrong, *(memory.notes if torch.cuda.device_count() >= size else ())]


@pytest.mark.parametrize("beyond", [TWO_SHOT, PULL])
def test_sums_of_registered_memory(two_places: Places, pool: RankPool, beyond: str) -> None:
    """Given tensors of registered memory, when they are summed with new data, then values are exact and in place, by
    FlagCX up to its limit and by another route, in several steps too, beyond; FlagCX has the block as a window (else
    the note is shown)."""
    routes = f"all_reduce=flagcx:128KiB@registered|{beyond}@registered"
    assert pool.run(registered, beyond, env=routed(routes)) == [[], []]


def windows_alone(context: RankContext) -> list[str]:
    """Memory of FlagCX's own, summed by it, eagerly and in a graph."""
    group = group_of(context)
    tensor = registered_memory(group).empty(2**16, dtype=torch.bfloat16)
    wrong = []
    for turn in range(TURNS):
        tensor.copy_(data(context.rank, tensor.numel(), tensor.dtype, turn))
        if not torch.equal(group.all_reduce(tensor), total(tensor.numel(), tensor.dtype, context.world_size, turn)):
            wrong.append(f"turn {turn}: {tensor[:4].tolist()}")
    dist.barrier()
    group.destroy()
    return wrong


def test_memory_of_flagcx_alone(two_places: Places, pool: RankPool) -> None:
    """Given a route that registered memory takes on FlagCX alone, then the memory is FlagCX's, and values are exact."""
    assert pool.run(windows_alone, env=routed("all_reduce=flagcx@registered")) == [[], []]


# --- graphs and streams ---


def captured(context: RankContext, is_registered: bool) -> list[str]:
    """Three sums and an addition between them in a graph, replayed with new data."""
    group = group_of(context)
    size, count = context.world_size, 3 * 5120
    if is_registered:
        tensor = registered_memory(group).empty(count, dtype=torch.float32)
    else:
        tensor = torch.empty(count, dtype=torch.float32, device="cuda")
    tensor.zero_()
    group.all_reduce(tensor)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once = group.all_reduce(tensor)
        twice = group.all_reduce(once.add_(1) if not is_registered else tensor.copy_(once).add_(1))
    wrong = []
    for turn in range(TURNS):
        tensor.copy_(data(context.rank, count, torch.float32, turn))
        graph.replay()
        expected = (total(count, torch.float32, size, turn) + 1) * size
        if not torch.equal(twice, expected):
            wrong.append(f"turn {turn}: {twice[:4].tolist()}, not {expected[:4].tolist()}")
    dist.barrier()
    group.destroy()
    return wrong


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_registered", [False, True], ids=["ordinary", "registered"])
def test_graphs(two_places: Places, pool: RankPool, way: str, is_registered: bool) -> None:
    """Given a graph with two sums, each of what the one before gave, when it is replayed with new data, then values
    are exact."""
    assert pool.run(captured, is_registered, env=routed(f"all_reduce={way}")) == [[], []]


def on_two_streams(context: RankContext) -> list[str]:
    """Sums that alternate between two streams without any other order between them, through one buffer."""
    group = group_of(context)
    count = 2**18
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    tensors = [torch.empty(count, dtype=torch.bfloat16, device="cuda") for _ in range(2 * TURNS)]
    for turn, tensor in enumerate(tensors):
        tensor.copy_(data(context.rank, count, tensor.dtype, turn))
    torch.cuda.synchronize()
    for turn, tensor in enumerate(tensors):
        with torch.cuda.stream(streams[turn % 2]):
            group.all_reduce_in_place(tensor)
    torch.cuda.synchronize()
    wrong = [
        f"turn {turn}: {tensor[:4].tolist()}"
        for turn, tensor in enumerate(tensors)
        if not torch.equal(tensor, total(count, tensor.dtype, context.world_size, turn))
    ]
    dist.barrier()
    group.destroy()
    return wrong


@pytest.mark.parametrize("way", WAYS)
def test_two_streams_share_the_buffer(two_places: Places, pool: RankPool, way: str) -> None:
    """Given calls on two streams in turns, when nothing else orders them, then each sum is exact."""
    assert pool.run(on_two_streams, env=routed(f"all_reduce={way}:{BUFFER}")) == [[], []]


# --- what goes wrong ---


def routes_in_words(context: RankContext) -> tuple[str, ...]:
    """Of a group."""
    group = group_of(context)
    dist.barrier()
    group.destroy()
    return group.routes


def test_ranks_on_one_gpu_are_refused(two_places: Places, pool: RankPool) -> None:
    """Given ranks on one GPU and torch not told to take them, then all leave the route out with the same reason; with
    a GPU each, the route is there."""
    told = {**routed("all_reduce=symm_two_shot"), SHARED_DEVICES: None}
    for words in pool.run(routes_in_words, env=told):
        if two_places.is_shared:
            assert "global ranks 0 and 1 are on the same GPU; for a trial set" in words[1]
        else:
            assert words == ("all_reduce by size: symm_two_shot|else flagcx",)


def lose_a_peer(context: RankContext) -> float:
    """Rank 1 is killed after the first call; rank 0 makes another one and must never see a value."""
    group = group_of(context)
    tensor = torch.ones(5120, device="cuda")
    group.all_reduce(tensor)
    assert tensor[-1].item() == 2.0
    dist.barrier()
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    group.all_reduce(tensor)
    return float(tensor[-1].item())


@pytest.mark.parametrize("way", WAYS)
def test_a_call_without_its_peer_ends_the_process(
    two_places: Places, tmp_path: Path, way: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Given rank 1 killed, when rank 0 sums, then it ends with code 71, names the call and rank 1, and never returns
    a value: the kernel would wait for ever."""

    def of(rank: int) -> dict[str, str | None]:
        return {**environment(two_places, rank, str(tmp_path), limit_s=5.0), **routed(f"all_reduce={way}")}

    with pytest.raises(RanksFailed) as raised:
        run_ranks(lose_a_peer, 2, env=of, start_method="spawn", timeout_s=START_AND_RUN_S)
    ended = next(failure for failure in raised.value.failures if failure.rank == 0)
    assert ended.kind is FailureKind.EXITED and f"exited with code {EXIT_CODE} " in ended.text, ended.text
    assert raised.value.results[0] is None
    said = capfd.readouterr().err
    assert re.search(rf"tp:0 {way}.*all_reduce.*global rank 1 \(process \d+ on \S+\) (was killed|has ended)", said), (
        said
    )
