"""The routes over symmetric memory as far as a CPU goes: what reaches torch's operators, streams, and refusals.

The operators are stand-ins with torch's own conditions (CUDASymmetricMemoryOps.cu); the real ones run in tests/gpu.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory

from sglang_fl.comm.backends.flagcx.machine import Machine
from sglang_fl.comm.backends.vendor.cuda.stream_order import StreamOrder
from sglang_fl.comm.backends.vendor.cuda.symmetric import (
    NEEDED,
    OneShotTransport,
    SymmetricBackend,
    SymmetricTransport,
    TwoShotTransport,
)
from sglang_fl.comm.backends.vendor.cuda.symmetric_group import Place, SymmetricGroup, refusal
from sglang_fl.comm.types import GroupContext

WAYS = [OneShotTransport, TwoShotTransport]
BUFFER_BYTES = 1024


class StandInOperators:
    """torch.ops.symm_mem of a group whose ranks all have the same data: a sum is a product with the world size."""

    def __init__(self, world_size: int, blocks: list[torch.Tensor]) -> None:
        self.calls: list[tuple[str, int]] = []
        self._world_size = world_size
        self._blocks = blocks

    def two_shot_all_reduce_(self, tensor: torch.Tensor, op: str, group: str) -> torch.Tensor:
        self._note("two_shot_all_reduce_", tensor, op, group)
        return tensor.mul_(self._world_size)

    def two_shot_all_reduce_out(self, tensor: torch.Tensor, op: str, group: str, output: torch.Tensor) -> torch.Tensor:
        self._note("two_shot_all_reduce_out", tensor, op, group)
        assert self._world_size in (2, 4, 8) and tensor.data_ptr() != output.data_ptr()
        output.copy_(tensor * self._world_size)
        return tensor.fill_(-1)  # this rank's share is summed in it: nobody may read it afterwards

    def one_shot_all_reduce_out(self, tensor: torch.Tensor, op: str, group: str, out: torch.Tensor) -> torch.Tensor:
        self._note("one_shot_all_reduce_out", tensor, op, group)
        assert tensor.data_ptr() != out.data_ptr(), "peers still read the tensor while it is written to"
        return out.copy_(tensor * self._world_size)

    def one_shot_all_reduce_copy_out(
        self, buffer: torch.Tensor, tensor: torch.Tensor, op: str, group: str, out: torch.Tensor
    ) -> torch.Tensor:
        self._note("one_shot_all_reduce_copy_out", buffer, op, group)
        assert buffer.shape == tensor.shape == out.shape
        assert _vectors(buffer) == _vectors(tensor)
        buffer.copy_(tensor)
        return out.copy_(buffer * self._world_size)

    def _note(self, name: str, tensor: torch.Tensor, op: str, group: str) -> None:
        assert (op, group) == ("sum", "g")
        assert tensor.is_contiguous() and tensor.dtype in (torch.float32, torch.bfloat16)
        assert any(block.data_ptr() == tensor.untyped_storage().data_ptr() for block in self._blocks)
        assert _vectors(tensor) >= max(4, tensor.itemsize), "torch refuses this alignment"
        self.calls.append((name, tensor.nbytes))


def _vectors(tensor: torch.Tensor) -> int:
    """The largest of torch's vector sizes that fits, bytes."""
    odd = (tensor.storage_offset() * tensor.itemsize) | tensor.nbytes
    return next(size for size in (16, 8, 4, 2, 1) if odd % size == 0)


@dataclass
class Made:
    """A transport on stand-ins, and a registered block."""

    transport: SymmetricTransport
    operators: StandInOperators
    block: torch.Tensor


def make(way: type[SymmetricTransport], world_size: int = 2) -> Made:
    """A transport with a small buffer."""
    cpu_group: Any = SimpleNamespace(group_name="g")
    context = GroupContext("tp:0", tuple(range(world_size)), 0, torch.device("cpu"), cpu_group, cpu_group)
    group = SymmetricGroup(context)
    group.order = order_on(StandInDevice())
    staging, block = (torch.zeros(BUFFER_BYTES, dtype=torch.uint8) for _ in range(2))
    group.spans = ((block.data_ptr(), block.data_ptr() + block.numel()),)
    operators = StandInOperators(world_size, [staging, block])
    return Made(way("symm", context, group, staging, operators), operators, block)


def values(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers whose sums are exact."""
    return (torch.arange(count) % 50 + 1).to(dtype)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 3, 8, 255, 256, 257, 512, 2049])
@pytest.mark.parametrize("shift", [0, 1, 4])
def test_ordinary_memory(
    way: type[SymmetricTransport], dtype: torch.dtype, world_size: int, count: int, shift: int
) -> None:
    """Given tensors of any length and offset, longer than the buffer too, when they are summed in place, into a new
    tensor or as the result, then values are right, and nothing beside the tensor or in the argument of
    all_reduce_new changes."""
    made = make(way, world_size)
    for method in ("all_reduce", "all_reduce_result", "all_reduce_new"):
        whole = values(count + shift + 3, dtype)
        before, tensor = whole.clone(), whole[shift : shift + count]
        result = getattr(made.transport, method)(tensor)
        result = tensor if result is None else result
        assert torch.equal(result, before[shift : shift + count] * world_size)
        if method == "all_reduce_new":
            assert torch.equal(whole, before)
        else:
            rest = [whole[:shift], whole[shift + count :]]
            assert torch.equal(torch.cat(rest), torch.cat([before[:shift], before[shift + count :]]))


def test_an_aligned_tensor_takes_the_short_way() -> None:
    """Given whole vectors of ordinary memory, then one operator is called, and a copy precedes it only in two shots."""
    for way, operator in (
        (OneShotTransport, "one_shot_all_reduce_copy_out"),
        (TwoShotTransport, "two_shot_all_reduce_out"),
    ):
        made = make(way)
        made.transport.all_reduce(values(128, torch.bfloat16))
        assert made.operators.calls == [(operator, 256)]


def test_a_tensor_longer_than_the_buffer_goes_in_pieces() -> None:
    """Given 2.5 times the buffer, then three calls of at most its size."""
    made = make(TwoShotTransport)
    made.transport.all_reduce(values(640, torch.float32))
    assert [size for _, size in made.operators.calls] == [1024, 1024, 512]


@pytest.mark.parametrize("way", WAYS)
def test_registered_memory_is_used_where_it_lies(way: type[SymmetricTransport]) -> None:
    """Given a tensor in a block, when it is summed, then the operators get it itself, and values are right."""
    made = make(way)
    tensor = made.block[256:512].view(torch.bfloat16)
    one_shot = way is OneShotTransport

    tensor.copy_(values(128, torch.bfloat16))
    made.transport.all_reduce(tensor)
    assert torch.equal(tensor, values(128, torch.bfloat16) * 2)
    assert made.operators.calls.pop() == ("two_shot_all_reduce_", 256)

    tensor.copy_(values(128, torch.bfloat16))
    result = made.transport.all_reduce_result(tensor)
    assert torch.equal(result, values(128, torch.bfloat16) * 2)
    assert made.operators.calls.pop() == ("one_shot_all_reduce_out" if one_shot else "two_shot_all_reduce_", 256)

    tensor.copy_(values(128, torch.bfloat16))
    result = made.transport.all_reduce_new(tensor)
    assert torch.equal(result, values(128, torch.bfloat16) * 2)
    assert torch.equal(tensor, values(128, torch.bfloat16))
    assert not made.operators.calls[1:]


@pytest.mark.parametrize("way", WAYS)
def test_odd_parts_of_registered_memory(way: type[SymmetricTransport]) -> None:
    """Given a part of a block that is no whole vectors, then it goes through the buffer, and its neighbours stay."""
    made = make(way)
    tensor = made.block[256:512].view(torch.bfloat16)
    tensor.copy_(values(128, torch.bfloat16))
    made.transport.all_reduce(tensor[1:4])
    expected = values(128, torch.bfloat16)
    expected[1:4] *= 2
    assert torch.equal(tensor, expected)


def test_blocks_are_exchanged_over_the_group_that_the_operators_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given the symmetric memory of one group, when another one of the same ranks takes a buffer and a block to hand
    out, then torch exchanges both over the first group, whose name its operators get."""
    torchs, asked = torch.distributed._symmetric_memory, []

    def rendezvous(block: torch.Tensor, group: Any) -> Any:
        asked.append(group.group_name)
        return SimpleNamespace(rank=0, buffer_ptrs=[block.data_ptr()])

    def context_of(name: str) -> Any:
        own = SimpleNamespace(group_name=name)
        return SimpleNamespace(
            cpu_group=own, device=torch.device("cpu"), world_size=1, ranks=(0,), exchange=lambda stage, value: [value]
        )

    monkeypatch.setattr(torchs, "empty", torch.empty)
    monkeypatch.setattr(torchs, "rendezvous", rendezvous)
    group = SymmetricGroup(context_of("first"))
    group.staging(context_of("second"), "symm_pull", 64)
    group.registered(context_of("second"), 64)
    assert asked == ["first", "first"] and group.group_name == "first"


def test_what_is_not_offered() -> None:
    """Given the capabilities, then all_reduce of the two dtypes is all; another operation says so."""
    transport = make(OneShotTransport).transport
    assert [operation.value for operation in transport.capabilities.operations] == ["all_reduce"]
    assert transport.capabilities.reducible == {torch.float32, torch.bfloat16}
    with pytest.raises(NotImplementedError, match="symm offers all_reduce alone"):
        transport.broadcast(torch.zeros(1), 0)


def test_not_on_a_cpu() -> None:
    """Given a group on the CPU, then the backend is not available there, and says where the tensors are."""
    context: Any = SimpleNamespace(device=torch.device("cpu"))
    availability = SymmetricBackend("symm_one_shot", OneShotTransport).probe(context)
    assert not availability.available and availability.reason == "the group's tensors are on cpu, not on cuda"


def test_this_torch_has_the_operators() -> None:
    """Given the installed torch, then it declares every operator that is called, as the stand-ins do."""
    assert [name for name in NEEDED if not hasattr(torch.ops.symm_mem, name)] == []
    assert all(hasattr(StandInOperators, name) for name in NEEDED)


# --- places ---

HERE, ELSEWHERE = Machine("a", "1" * 36, 1), Machine("b", "2" * 36, 1)


def place(gpu: str, reachable: str = "", visible: str = "", machine: Machine = HERE, may_share: bool = False) -> Place:
    """GPUs are letters."""
    return Place(machine, gpu, frozenset(reachable or gpu), frozenset(visible or reachable or gpu), may_share)


@pytest.mark.parametrize(
    ("places", "wanted"),
    [
        ([place("A", "AB"), place("B", "AB")], ""),
        ([place("A"), place("B")], ""),  # each sees its own alone: torch will tell
        (
            [place("A", "A", "AB"), place("B", "AB")],
            "the GPU of global rank 4 cannot reach the memory of global rank 7",
        ),
        ([place("A"), place("A")], "global ranks 4 and 7 are on the same GPU"),
        ([place("A", may_share=True), place("A", may_share=True)], ""),
        ([place("A"), place("B", machine=ELSEWHERE)], "symmetric memory needs GPUs of one machine: global rank(s) [4]"),
    ],
)
def test_where_there_is_no_symmetric_memory(places: list[Place], wanted: str) -> None:
    """Given the ranks' places, then the reason names the ranks and what is missing; the same on all."""
    found = refusal(places, (4, 7))
    assert found.startswith(wanted) and bool(found) == bool(wanted)


# --- streams ---


@dataclass
class StandInStream:
    """A stream that notes what it waits for."""

    name: str
    capturing: bool = False
    waits_for: list[str] = field(default_factory=list)

    def record_event(self) -> str:
        return self.name

    def wait_event(self, event: str) -> None:
        self.waits_for.append(event)


class StandInDevice:
    """The device module of torch, with one current stream."""

    def __init__(self) -> None:
        self.stream_now = StandInStream("none")

    def current_stream(self, device: torch.device) -> StandInStream:
        return self.stream_now

    @contextmanager
    def stream(self, stream: StandInStream) -> Any:
        before, self.stream_now = self.stream_now, stream
        yield
        self.stream_now = before

    def is_current_stream_capturing(self) -> bool:
        return self.stream_now.capturing


def order_on(device: StandInDevice) -> StreamOrder:
    """The order over stand-ins: there are no streams on a CPU."""
    order = StreamOrder(torch.device("cpu"))
    order._module = device
    order._stream_now = lambda: id(device.stream_now)
    return order


def test_a_call_on_another_stream_waits_for_the_one_before() -> None:
    """Given calls on one stream, on another and back, then each change waits once for the stream before."""
    device = StandInDevice()
    order = order_on(device)
    main, side = StandInStream("main"), StandInStream("side")
    for stream in (main, main, side, side, main):
        with device.stream(stream):
            order.take_turn()
    assert (main.waits_for, side.waits_for) == (["side"], ["main"])


def test_a_capture_waits_for_its_own_streams_alone() -> None:
    """Given an eager call, calls on two streams of a capture, and eager calls after it, one of them on a stream that
    was captured, then within the capture one waits for the other, eager calls wait for eager ones, and no event
    crosses the capture's border."""
    device = StandInDevice()
    order = order_on(device)
    main, first, second = StandInStream("main"), StandInStream("first", True), StandInStream("second", True)
    for stream in (main, first, second, main):
        with device.stream(stream):
            order.take_turn()
    assert (main.waits_for, first.waits_for, second.waits_for) == ([], [], ["first"])
    first.capturing = second.capturing = False
    for stream in (second, first):
        with device.stream(stream):
            order.take_turn()
    assert (second.waits_for, first.waits_for) == (["first", "main"], ["second"])


def test_a_new_capture_does_not_wait_for_the_one_before() -> None:
    """Given a capture that ended on one stream, when the next one begins on another, then that waits for nothing."""
    device = StandInDevice()
    order = order_on(device)
    first, second = StandInStream("first", True), StandInStream("second", True)
    with device.stream(first):
        order.take_turn()
    first.capturing = False
    with device.stream(second):
        order.take_turn()
    assert second.waits_for == []
