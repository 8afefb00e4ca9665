"""CommunicatorFL over torch.distributed in real processes: every operation, with data that depends on the rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sglang_fl.comm.communicator import CommunicatorFL
from sglang_fl.comm.errors import AgreementError
from sglang_fl.testing.ranks import RankContext, run_ranks

SHAPES = [(), (1,), (7,), (4, 3), (2, 3, 5), (0, 4)]
MOVABLE = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.int16, torch.float8_e4m3fn, torch.float8_e5m2]
REDUCIBLE = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int64]


def world(context: RankContext, ranks: list[int] | None = None) -> CommunicatorFL:
    """A communicator of ``ranks`` (all if left out); every rank of the launch must call it."""
    ranks = ranks or list(range(context.world_size))
    group = dist.new_group(ranks, backend="gloo")
    device_group = dist.new_group(ranks, backend="gloo")
    return communicator_of(group, device_group, ranks)


def values(shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Small whole numbers, exact in every dtype and different on every rank."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 3 + rank * 5 + 1) % 7).reshape(shape).to(dtype)


def same(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Shape, dtype and every value are equal."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, (what, actual.shape, expected.shape)
    assert torch.equal(actual.double(), expected.double()), (what, actual, expected)


def layouts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The same values contiguous, and with strides: every second column of a wider tensor, and transposed."""
    found = [tensor]
    if tensor.dim() >= 1:
        wide = torch.zeros((*tensor.shape[:-1], tensor.shape[-1] * 2), dtype=tensor.dtype)
        wide[..., ::2] = tensor
        found.append(wide[..., ::2])
    if tensor.dim() == 2:
        found.append(tensor.t().contiguous().t())
    return found


def each_case(dtypes: list[torch.dtype], check: Callable[[tuple[int, ...], torch.dtype], None]) -> None:
    """Call ``check`` for every shape and dtype."""
    for dtype in dtypes:
        for shape in SHAPES:
            check(shape, dtype)


def _all_reduce(context: RankContext) -> None:
    communicator = world(context)

    def check(shape: tuple[int, ...], dtype: torch.dtype) -> None:
        expected = sum(
            (values(shape, dtype, r).double() for r in range(context.world_size)), torch.zeros(shape).double()
        )
        for tensor in layouts(values(shape, dtype, context.rank)):
            result = communicator.all_reduce(tensor)
            assert result is tensor
            same(result, expected.to(dtype), f"all_reduce {shape} {dtype} {tensor.stride()}")

    each_case(REDUCIBLE, check)


def _all_gather(context: RankContext) -> None:
    communicator = world(context)

    def check(shape: tuple[int, ...], dtype: torch.dtype) -> None:
        parts = [values(shape, dtype, r) for r in range(context.world_size)]
        for tensor in layouts(parts[context.rank]):
            outputs = [torch.empty_like(part) for part in parts]
            assert communicator.all_gather(tensor, output_tensor_list=outputs) is None
            for output, part in zip(outputs, parts, strict=True):
                same(output, part, f"all_gather list {shape} {dtype}")
            flat = torch.empty(context.world_size * tensor.numel(), dtype=dtype)
            communicator.all_gather_into_tensor(flat, tensor)
            same(flat, torch.cat([part.reshape(-1) for part in parts]), f"all_gather_into_tensor {shape} {dtype}")
            for dim in range(-len(shape), len(shape)):
                gathered = communicator.all_gather(input_=tensor, dim=dim)
                assert gathered is not None
                same(gathered, torch.cat(parts, dim), f"all_gather {shape} {dtype} dim {dim}")

    each_case(MOVABLE, check)


def _broadcast_and_gather(context: RankContext) -> None:
    communicator = world(context)
    for root in range(context.world_size):

        def check(shape: tuple[int, ...], dtype: torch.dtype, root: int = root) -> None:
            parts = [values(shape, dtype, r) for r in range(context.world_size)]
            for tensor in layouts(parts[context.rank].clone()):
                gathered = communicator.gather(tensor, dst=root, dim=0) if shape else None
                if shape and context.rank == root:
                    same(gathered, torch.cat(parts, 0), f"gather {shape} {dtype}")  # type: ignore[arg-type]
                else:
                    assert gathered is None
                assert communicator.broadcast(tensor, src=root) is tensor
                same(tensor, parts[root], f"broadcast {shape} {dtype} from {root}")

        each_case(MOVABLE, check)


def _reduce_scatter(context: RankContext) -> None:
    communicator, size = world(context), context.world_size

    def check(shape: tuple[int, ...], dtype: torch.dtype) -> None:
        inputs = [[values(shape, dtype, r + 2 * part) for part in range(size)] for r in range(size)]
        expected = sum(row[context.rank].double() for row in inputs)
        mine = inputs[context.rank]
        output = torch.empty(shape, dtype=dtype)
        assert communicator.reduce_scatter(output, mine) is output
        same(output, expected.to(dtype), f"reduce_scatter {shape} {dtype}")  # type: ignore[union-attr]
        for tensor in layouts(torch.stack(mine)):
            output = torch.empty(shape, dtype=dtype)
            communicator.reduce_scatter_tensor(output, tensor)
            same(output, expected.to(dtype), f"reduce_scatter_tensor {shape} {dtype}")  # type: ignore[union-attr]

    each_case(REDUCIBLE, check)


def _uneven(context: RankContext) -> None:
    communicator, size = world(context), context.world_size
    for sizes in ([2, 0, 3, 1][:size], [2] * size):
        for tail in ((), (3,), (2, 2)):
            parts = [values((rows, *tail), torch.float32, r) for r, rows in enumerate(sizes)]
            gathered = communicator.all_gatherv(parts[context.rank], sizes)
            assert isinstance(gathered, list) and len(gathered) == 1
            same(gathered[0], torch.cat(parts), f"all_gatherv {sizes} {tail}")
            both = communicator.all_gatherv([parts[context.rank], parts[context.rank] + 1], sizes=sizes)
            same(both[1], torch.cat(parts) + 1, f"all_gatherv of a list {sizes} {tail}")
            inputs = [values((sum(sizes), *tail), torch.float32, r) for r in range(size)]
            start = sum(sizes[: context.rank])
            expected = torch.stack(inputs).sum(0)[start : start + sizes[context.rank]]
            kept = inputs[context.rank].clone()
            same(communicator.reduce_scatterv(inputs[context.rank], sizes=sizes), expected, f"reduce_scatterv {sizes}")
            same(inputs[context.rank], kept, "reduce_scatterv keeps its input")
    for bad in ([1] * (size + 1), [5] * size):
        with pytest.raises(ValueError, match="sizes="):
            communicator.reduce_scatterv(torch.zeros(size, 2), sizes=bad)


def _point_to_point(context: RankContext) -> None:
    communicator = world(context)
    following, previous = (context.rank + 1) % context.world_size, (context.rank - 1) % context.world_size
    for dtype in MOVABLE:
        for shape in SHAPES:
            tensor = values(shape, dtype, context.rank)
            communicator.send(tensor)
            tensor.zero_()  # the send must have kept what it was given
            same(communicator.recv(torch.Size(shape), dtype), values(shape, dtype, previous), f"send {shape} {dtype}")
    communicator.send(values((3,), torch.float32, context.rank), dst=previous)
    same(communicator.recv(torch.Size([3]), torch.float32, following), values((3,), torch.float32, following), "back")


def _tensor_dict(context: RankContext, async_send: bool) -> None:
    communicator = world(context)
    previous = (context.rank - 1) % context.world_size

    def content(rank: int) -> dict[str, Any]:
        large = torch.full((16 * 2**20,), float(rank))  # 64 MiB, far beyond any socket buffer
        return {
            "large": large,
            "slice": values((4, 6), torch.float32, rank)[:, ::2],
            "empty": torch.empty(0, 3),
            "n": rank,
        }

    sent = content(context.rank)
    works = communicator.send_tensor_dict(sent, async_send=async_send)
    assert bool(works) == async_send
    if not async_send:
        sent["large"].fill_(-1.0)  # both sides have sent first, and a blocking send's tensor is free again
    else:
        del sent
        torch.full((16 * 2**20,), -1.0)
    received = communicator.recv_tensor_dict()
    assert received is not None
    for key, value in content(previous).items():
        if isinstance(value, torch.Tensor):
            same(received[key], value, f"tensor dict {key}")
        else:
            assert received[key] == value
    for work in works:
        work.work.wait()
    dist.barrier()


def _tensor_dict_shares(context: RankContext) -> None:
    # Two stages of two ranks: each rank of a stage sends its share, the receivers gather it.
    stages = [[0, 1], [2, 3]]
    stage_groups = [world_of(context, ranks) for ranks in stages]
    pipes = [world_of(context, ranks) for ranks in ([0, 2], [1, 3])]
    stage = stage_groups[context.rank // 2]
    pipe = pipes[context.rank % 2]
    assert stage is not None and pipe is not None
    content = {"even": torch.arange(12.0).reshape(3, 4), "odd": torch.arange(5.0), "name": "x"}
    if context.rank < 2:
        pipe.send_tensor_dict(content, dst=1, all_gather_group=stage)
    else:
        received = pipe.recv_tensor_dict(src=0, all_gather_group=stage)
        assert received is not None and received["name"] == "x"
        same(received["even"], content["even"], "shared")  # type: ignore[arg-type]
        same(received["odd"], content["odd"], "whole")  # type: ignore[arg-type]
    dist.barrier()


def world_of(context: RankContext, ranks: list[int]) -> CommunicatorFL | None:
    """A communicator of some of the ranks; None on the others, which take part in making the groups."""
    group, device_group = dist.new_group(ranks, backend="gloo"), dist.new_group(ranks, backend="gloo")
    if context.rank not in ranks:
        return None
    return communicator_of(group, device_group, ranks)


def communicator_of(group: Any, device_group: Any, ranks: list[int]) -> CommunicatorFL:
    """The communicator, on the backend that the environment selects and no other."""
    communicator = CommunicatorFL(
        cpu_group=group, device_group=device_group, device="cpu", ranks=ranks, name=f"test:{ranks}"
    )
    assert communicator.backend == os.environ["SGLANG_FL_DIST_BACKEND"]
    assert communicator.exceptions() == {}
    return communicator


def _broadcast_tensor_dict(context: RankContext) -> None:
    communicator = world(context)
    for src in range(context.world_size):
        content = {
            "a": values((2, 3), torch.float32, src),
            "b": values((4,), torch.bool, src),
            "c": [src],
            "e": torch.empty(0),
        }
        received = communicator.broadcast_tensor_dict(content if context.rank == src else None, src=src)
        assert received is not None and received["c"] == [src]
        for key in ("a", "b", "e"):
            same(received[key], content[key], key)  # type: ignore[arg-type]


def _group_ranks(context: RankContext) -> None:
    # Cases 4 and 5: groups that do not start at rank 0 or are in another order; ranks are the group's own.
    for ranks in ([2, 3], [3, 1], [0, 1]):
        communicator = world_of(context, ranks)
        if communicator is None:
            continue
        mine = ranks.index(context.rank)
        tensor = torch.tensor([float(context.rank)])
        assert communicator.broadcast(tensor, src=1).item() == ranks[1]
        assert communicator.all_reduce(torch.ones(1)).item() == len(ranks)
        gathered = communicator.all_gather(torch.tensor([context.rank]))
        assert gathered is not None and gathered.tolist() == ranks
        collected = communicator.gather(torch.tensor([context.rank]), dst=1)
        assert collected is None if mine == 0 else collected.tolist() == ranks  # type: ignore[union-attr]
        share = communicator.reduce_scatter_tensor(torch.zeros(1), torch.tensor([10.0, 20.0]))
        assert share.item() == [20.0, 40.0][mine]
        if mine == 1:
            communicator.send(torch.tensor([41.0]), dst=0)
        else:
            assert communicator.recv(torch.Size([1]), torch.float32, src=1).item() == 41.0
    dist.barrier()


def _refuses(context: RankContext) -> None:
    communicator = world(context)
    for dtype in (torch.bool, torch.int16, torch.float8_e4m3fn, torch.float8_e5m2):
        with pytest.raises(TypeError, match=rf"all_reduce.*backend {communicator.backend} has no sum for {dtype}"):
            communicator.all_reduce(torch.zeros(2).to(dtype))
    with pytest.raises(ValueError, match="src=7"):
        communicator.broadcast(torch.zeros(1), src=7)
    with pytest.raises(ValueError, match="this rank itself"):
        communicator.send(torch.zeros(1), dst=context.rank)
    with pytest.raises(ValueError, match="do not fit"):
        communicator.all_gather_into_tensor(torch.zeros(3), torch.zeros(2))
    # Nothing was enqueued: the next collective pairs on all ranks.
    assert communicator.all_reduce(torch.ones(1)).item() == context.world_size


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "body", [_all_reduce, _all_gather, _broadcast_and_gather, _reduce_scatter, _uneven, _point_to_point, _refuses]
)
def test_operation(body: Callable[[RankContext], None], world_size: int, backend: dict[str, str]) -> None:
    """Given ranks on a backend, when each calls the operation, then every one has the right values."""
    run_ranks(body, world_size, env=backend)


@pytest.mark.parametrize("async_send", [False, True])
def test_both_sides_send_a_tensor_dict_first(async_send: bool, backend: dict[str, str]) -> None:
    """Given 64 MiB each way, when both ranks send first, then both receive what was sent before it was changed."""
    run_ranks(_tensor_dict, 2, async_send, env=backend)


def test_tensor_dict_in_shares(backend: dict[str, str]) -> None:
    """Given an all_gather_group, when its ranks send shares, then the receivers have the whole tensors."""
    run_ranks(_tensor_dict_shares, 4, env=backend)


def test_broadcast_tensor_dict(backend: dict[str, str]) -> None:
    """Given a dictionary on one rank, when it is broadcast, then all ranks have it."""
    run_ranks(_broadcast_tensor_dict, 3, env=backend)


def test_ranks_are_the_groups_own(backend: dict[str, str]) -> None:
    """Given groups of a world of four, when src and dst are named, then they are ranks within the group."""
    run_ranks(_group_ranks, 4, env=backend)


def _differs(context: RankContext) -> str:
    os.environ["SGLANG_FL_DIST_BACKEND"] = "torch" if context.rank == 0 else "auto"
    with pytest.raises(AgreementError) as raised:
        world(context)
    return str(raised.value)


def test_different_settings_are_the_same_error_on_all_ranks() -> None:
    """Given ranks with different backends selected, when they make a communicator, then all raise one error."""
    texts = run_ranks(_differs, 2)
    assert texts[0] == texts[1]
    assert "global rank 0 has torch; global rank 1 has" in texts[0]


def _absent(context: RankContext, ends: bool) -> str:
    group = dist.new_group([0, 1], backend="gloo")
    store = context.store("done")
    if context.rank == 1:
        if not ends:
            store.wait(["done"])
        return ""
    with pytest.raises(AgreementError) as raised:
        CommunicatorFL(cpu_group=group, device_group=group, device="cpu", ranks=[0, 1], name="tp:0", timeout_s=1.0)
    store.set("done", "1")
    return str(raised.value)


@pytest.mark.parametrize("ends", [False, True])
def test_a_rank_that_never_arrives_is_named(ends: bool) -> None:
    """Given a peer without the plugin, or gone, when a rank makes a communicator, then an error names the peer."""
    text = run_ranks(_absent, 2, ends)[0]
    assert "group tp:0, global rank 0 of [0, 1]: global rank(s) [1] did not reach 'announce candidates'" in text
