"""What one call at a time does not show: groups, several communicators and threads, order, wrong arguments.

Each scenario runs on every rank with a fresh session and raises AssertionError where the library is wrong.
"""

from __future__ import annotations

import math
import threading
import time

import torch

from sglang_fl.comm.backends.flagcx import (
    DataType,
    FlagCXCommunicator,
    FlagCXError,
    ReduceOp,
    ResultCode,
    torch_data_types,
)

from .buffers import difference
from .data import ELEMENT_TYPES, as_bytes
from .session import Session
from .wrong_calls import wrong_calls

_STALE = -77


def _made_on(rank: int, count: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Small whole numbers, different for each rank, element and salt, exact in every dtype and in its sums."""
    return ((torch.arange(count) * 3 + 5 * rank + salt) % 29).to(dtype)


def _summed(world_size: int, count: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    return sum(_made_on(rank, count, torch.int64, salt) for rank in range(world_size)).to(dtype)


def _expect(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    wrong = difference(as_bytes(got.cpu()), as_bytes(expected), expected.dtype, 0.0)
    assert wrong is None, f"{what}: {wrong}"


class _Calls:
    """Calls on one communicator with tensors instead of addresses."""

    def __init__(self, session: Session, communicator: FlagCXCommunicator, stream: int) -> None:
        self.session = session
        self.communicator = communicator
        self.stream = stream

    def made(self, count: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
        """What this rank of the communicator sends."""
        return _made_on(self.communicator.rank, count, dtype, salt).to(self.session.device)

    def stale(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((count,), _STALE, device=self.session.device).to(dtype)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        data_type = torch_data_types()[tensor.dtype]
        address = tensor.data_ptr()
        self.communicator.all_reduce(address, address, tensor.numel(), data_type, ReduceOp.SUM, self.stream)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        data_type = torch_data_types()[tensor.dtype]
        self.communicator.all_gather(tensor.data_ptr(), output.data_ptr(), tensor.numel(), data_type, self.stream)

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        data_type = torch_data_types()[tensor.dtype]
        self.communicator.send(tensor.data_ptr(), tensor.numel(), data_type, peer, self.stream)

    def recv(self, tensor: torch.Tensor, peer: int) -> None:
        data_type = torch_data_types()[tensor.dtype]
        self.communicator.recv(tensor.data_ptr(), tensor.numel(), data_type, peer, self.stream)

    def expect_sum(self, tensor: torch.Tensor, salt: int, what: str) -> None:
        self.session.synchronize()
        _expect(tensor, _summed(self.session.world_size, tensor.numel(), tensor.dtype, salt), what)


def _calls(session: Session) -> _Calls:
    return _Calls(session, session.communicator, session.stream)


def _works(session: Session, what: str) -> None:
    """The communicator still gives right values."""
    calls = _calls(session)
    tensor = calls.made(33, torch.float32, salt=9)
    calls.all_reduce(tensor)
    calls.expect_sum(tensor, 9, f"all_reduce after {what}")


def properties(session: Session) -> None:
    """The library knows the communicator's size and rank, and no error."""
    communicator = session.communicator
    assert communicator.library_world_size() == session.world_size
    assert communicator.library_rank() == session.rank
    assert communicator.is_homogeneous()
    assert communicator.async_error() == 0
    if not session.on_host:
        assert communicator.library_device() == session.device.index


def group_of_different_calls(session: Session) -> None:
    """Collectives and point-to-point of different dtypes and sizes in one group."""
    calls = _calls(session)
    for count in (1, 4096, 300_000):
        reduced = calls.made(count, torch.float32, 1)
        gathered = calls.stale(count * session.world_size, torch.int64)
        sent, received = calls.made(count, torch.bfloat16, 3), calls.stale(count, torch.bfloat16)
        part = calls.made(count, torch.int64, 2)
        with session.communicator.group():
            calls.all_reduce(reduced)
            calls.all_gather(gathered, part)
            calls.send(sent, session.next_rank)
            calls.recv(received, session.previous_rank)
        calls.expect_sum(reduced, 1, f"all_reduce in a group, count {count}")
        parts = [_made_on(rank, count, torch.int64, 2) for rank in range(session.world_size)]
        _expect(gathered, torch.cat(parts), f"all_gather in a group, count {count}")
        from_previous = _made_on(session.previous_rank, count, torch.bfloat16, 3)
        _expect(received, from_previous, f"send and recv in a group, count {count}")


def nested_groups(session: Session) -> None:
    """Inner groups, with a communicator and with NULL, start nothing: only the outermost end does."""
    calls = _calls(session)
    first, second = calls.made(1000, torch.float32, 1), calls.made(1000, torch.float64, 2)
    third = calls.made(1000, torch.int32, 3)
    with session.library.group():
        with session.communicator.group():
            calls.all_reduce(first)
            with session.library.group():
                calls.all_reduce(second)
        session.synchronize()
        _expect(first, _made_on(session.rank, 1000, torch.float32, 1), "a call in a group that has not ended")
        calls.all_reduce(third)
    for tensor, salt in ((first, 1), (second, 2), (third, 3)):
        calls.expect_sum(tensor, salt, f"call {salt} in nested groups")
    with session.library.group(), session.communicator.group():
        pass
    _works(session, "an empty group")


def all_pairs_in_a_group(session: Session) -> None:
    """Three messages of different dtype and size between every two ranks, oneself included, arrive in order."""
    calls = _calls(session)
    kinds = ((5, torch.float16), (70_000, torch.int8), (1234, torch.float64))
    ranks = range(session.world_size)
    incoming = {(peer, k): calls.stale(count + peer, dtype) for peer in ranks for k, (count, dtype) in enumerate(kinds)}
    outgoing = {
        (peer, k): calls.made(count + session.rank, dtype, 7 * peer + k)
        for peer in ranks
        for k, (count, dtype) in enumerate(kinds)
    }
    with session.communicator.group():
        for (peer, _), tensor in incoming.items():
            calls.recv(tensor, peer)
        for (peer, _), tensor in outgoing.items():
            calls.send(tensor, peer)
    session.synchronize()
    for (peer, k), tensor in incoming.items():
        expected = _made_on(peer, kinds[k][0] + peer, kinds[k][1], 7 * session.rank + k)
        _expect(tensor, expected, f"message {k} from rank {peer} to rank {session.rank}")


def pairs_in_turn(session: Session) -> None:
    """Messages of growing size, one call each, between neighbours; a rank without a neighbour rests."""
    calls = _calls(session)
    peer = session.rank ^ 1
    if peer >= session.world_size:
        return
    counts = (0, 1, 7, 4096, 65_536, 1_000_000)
    for turn, count in enumerate(counts):
        sent, received = calls.made(count, torch.float64, turn), calls.stale(count, torch.float64)
        if session.rank < peer:
            calls.send(sent, peer)
            calls.recv(received, peer)
        else:
            calls.recv(received, peer)
            calls.send(sent, peer)
        session.synchronize()
        _expect(received, _made_on(peer, count, torch.float64, turn), f"count {count} from rank {peer}")


def sends_before_receives(session: Session) -> None:
    """Every rank sends to every other one before it receives anything: a bounded send waits for nobody."""
    calls = _calls(session)
    peers = [rank for rank in range(session.world_size) if rank != session.rank]
    for peer in peers:
        for k in range(4):
            calls.send(calls.made(1024, torch.float32, 10 * peer + k), peer)
    for peer in peers:
        for k in range(4):
            received = calls.stale(1024, torch.float32)
            calls.recv(received, peer)
            expected = _made_on(peer, 1024, torch.float32, 10 * session.rank + k)
            _expect(received, expected, f"message {k} from rank {peer}")


def two_communicators_in_turn(session: Session) -> None:
    """Two communicators, the second with the ranks the other way round, share nothing."""
    other = session.join("reversed", session.world_size - 1 - session.rank)
    sizes = (1, 4096, 7, 300_000, 0, 33)
    for turn in range(24):
        count = sizes[turn % len(sizes)]
        for communicator, dtype in ((session.communicator, torch.float32), (other, torch.int64)):
            calls = _Calls(session, communicator, session.stream)
            reduced = calls.made(count + turn, dtype, turn)
            gathered = calls.stale(count * session.world_size, dtype)
            part = calls.made(count, dtype, turn)
            calls.all_reduce(reduced)
            calls.all_gather(gathered, part)
            what = f"turn {turn} as rank {communicator.rank}, count {count}"
            calls.expect_sum(reduced, turn, f"all_reduce, {what}")
            parts = [_made_on(rank, count, dtype, turn) for rank in range(session.world_size)]
            _expect(gathered, torch.cat(parts), f"all_gather, {what}")
    other.close()
    _works(session, "the other communicator was closed")


def one_group_over_two_communicators(session: Session) -> None:
    """A group without a communicator of its own holds calls of two."""
    other = session.join("reversed", session.world_size - 1 - session.rank)
    first, second = _calls(session), _Calls(session, other, session.stream)
    one, two = first.made(5000, torch.float32, 1), second.made(77, torch.int32, 2)
    with session.library.group():
        first.all_reduce(one)
        second.all_reduce(two)
    first.expect_sum(one, 1, "first communicator")
    second.expect_sum(two, 2, "second communicator")
    other.close()


def two_threads_on_two_communicators(session: Session) -> None:
    """A thread with groups and one with single calls, each on a communicator of its own, at the same time."""
    other = session.join("reversed", session.world_size - 1 - session.rank)
    errors: list[str] = []

    def work(communicator: FlagCXCommunicator, dtype: torch.dtype, in_groups: bool, turns: int) -> None:
        stream = 0
        if not session.on_host:
            torch.cuda.set_device(session.device)
            own_stream = torch.cuda.Stream(session.device)
            torch.cuda.set_stream(own_stream)
            stream = own_stream.cuda_stream
        calls = _Calls(session, communicator, stream)
        for turn in range(turns):
            tensors = [calls.made((turn * 977) % 20_000 + k, dtype, turn + k) for k in range(3)]
            if in_groups:
                with communicator.group():
                    for tensor in tensors:
                        calls.all_reduce(tensor)
            else:
                for tensor in tensors:
                    calls.all_reduce(tensor)
            if not session.on_host:
                own_stream.synchronize()
            for k, tensor in enumerate(tensors):
                expected = _summed(session.world_size, tensor.numel(), dtype, turn + k)
                wrong = difference(as_bytes(tensor.cpu()), as_bytes(expected), dtype, 0.0)
                if wrong:
                    errors.append(f"rank {communicator.rank}, turn {turn}, call {k}, {dtype}: {wrong}")

    def together(turns: int, at_once: bool) -> None:
        threads = [
            threading.Thread(target=work, args=(session.communicator, torch.float32, True, turns)),
            threading.Thread(target=work, args=(other, torch.int64, False, turns)),
        ]
        for thread in threads:
            thread.start()
            if not at_once:
                thread.join()
        for thread in threads:
            thread.join()

    together(turns=2, at_once=False)  # a device loads its kernels now: it cannot while another one waits for a peer
    together(turns=60, at_once=True)
    assert not errors, "\n".join(errors[:10])
    other.close()


def a_group_belongs_to_its_thread(session: Session) -> None:
    """While one thread holds a group open, a call of another thread on another communicator runs at once."""
    other = session.join("reversed", session.world_size - 1 - session.rank)
    first, second = _calls(session), _Calls(session, other, session.stream)
    one, two = first.made(5000, torch.float32, 1), second.made(77, torch.int32, 2)
    errors: list[AssertionError] = []

    def work() -> None:
        if not session.on_host:
            torch.cuda.set_device(session.device)
        try:
            second.all_reduce(two)
            second.expect_sum(two, 2, "a call beside another thread's open group")
        except AssertionError as error:
            errors.append(error)

    with session.communicator.group():
        first.all_reduce(one)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    for error in errors:
        raise error
    first.expect_sum(one, 1, "the call in the group")
    other.close()


def wrong_arguments(session: Session) -> None:
    """Each is refused as an invalid argument, leaves the buffer as it is, and the communicator works on."""
    calls = _calls(session)
    memory = calls.stale(64, torch.float32)
    for wrong in wrong_calls(session.world_size):
        try:
            wrong.call(session.communicator, memory.data_ptr(), session.stream)
        except FlagCXError as error:
            assert error.code is ResultCode.INVALID_ARGUMENT, f"{wrong.what}: {error}"
        else:
            raise AssertionError(f"{wrong.what} was accepted")
        session.synchronize()
        _expect(memory, torch.full((64,), float(_STALE)), f"the buffer after {wrong.what}")
        _works(session, wrong.what)


def a_wrong_call_in_a_group(session: Session) -> None:
    """The error comes out of the group, the group has ended, and the communicator works on."""
    memory = _calls(session).stale(64, torch.float32)
    address = memory.data_ptr()
    try:
        with session.communicator.group():
            session.communicator.all_reduce(address, address, 64, 99, ReduceOp.SUM, session.stream)
    except FlagCXError as error:
        assert error.code is ResultCode.INVALID_ARGUMENT, str(error)
    else:
        raise AssertionError("a wrong call in a group was accepted")
    session.synchronize()
    _expect(memory, torch.full((64,), float(_STALE)), "the buffer after a wrong call in a group")
    _works(session, "a wrong call in a group")


def barrier_holds_everyone(session: Session) -> None:
    """After the barrier every rank has written what it wrote before it."""
    for turn in range(3):
        if session.rank == turn % session.world_size:
            time.sleep(0.1)
        (session.context.directory / f"turn-{turn}-rank-{session.rank}").touch()
        session.communicator.barrier(session.stream)
        for rank in range(session.world_size):
            there = (session.context.directory / f"turn-{turn}-rank-{rank}").exists()
            assert there, f"turn {turn}: the barrier let rank {session.rank} through before rank {rank} came"


def library_memory(session: Session) -> None:
    """Memory of the library's own, also registered, carries an all_reduce."""
    size = 1 << 20
    address = session.library.mem_alloc(size)
    registration = session.communicator.register(address, size)
    _all_reduce_in(session, address, 1)
    session.communicator.deregister(registration)
    session.library.mem_free(address)
    _works(session, "memory was given back")


def symmetric_window(session: Session) -> None:
    """Memory of the library's own as a symmetric window carries an all_reduce."""
    size = 1 << 20
    address = session.library.mem_alloc(size)
    window = session.communicator.window_register(address, size)
    _all_reduce_in(session, address, 2)
    session.communicator.window_deregister(window)
    session.library.mem_free(address)
    _works(session, "memory was given back")


def _all_reduce_in(session: Session, address: int, salt: int) -> None:
    calls = _calls(session)
    count = 4096
    # The library's memory is no tensor's: what goes in and comes out is copied by a broadcast to oneself.
    source, result = calls.made(count, torch.float32, salt), calls.stale(count, torch.float32)
    with session.communicator.group():
        calls.send(source, session.rank)
        session.communicator.recv(address, count, DataType.FLOAT32, session.rank, session.stream)
    session.communicator.all_reduce(address, address, count, DataType.FLOAT32, ReduceOp.SUM, session.stream)
    with session.communicator.group():
        session.communicator.send(address, count, DataType.FLOAT32, session.rank, session.stream)
        calls.recv(result, session.rank)
    calls.expect_sum(result, salt, "all_reduce in the library's own memory")


def special_values(session: Session) -> None:
    """Infinities, NaN, negative zero and the smallest and largest numbers go through sum, max and min."""
    for element in ELEMENT_TYPES:
        if not element.is_float:
            continue
        limits = torch.finfo(element.torch_dtype)
        smallest, largest, inf, nan = limits.smallest_normal / 2, limits.max, float("inf"), float("nan")
        of_root = torch.tensor([inf, -inf, nan, -0.0, smallest, largest, -largest, 1.0], dtype=torch.float64)
        of_others = torch.tensor([1.0, 1.0, 1.0, -0.0, smallest, 0.5, 0.5, 1.0], dtype=torch.float64)
        values = [of_root if rank == 0 else of_others for rank in range(session.world_size)]
        own = values[session.rank].to(element.torch_dtype).to(session.device)
        for op, combine in ((ReduceOp.SUM, torch.add), (ReduceOp.MAX, torch.maximum), (ReduceOp.MIN, torch.minimum)):
            result = torch.empty_like(own)
            session.communicator.all_reduce(
                own.data_ptr(), result.data_ptr(), own.numel(), element.data_type, op, session.stream
            )
            session.synchronize()
            expected = values[0]
            for value in values[1:]:
                expected = combine(expected, value)
            _expect_special(result.cpu(), expected.to(element.torch_dtype), op, element.name)


def _expect_special(got: torch.Tensor, expected: torch.Tensor, op: ReduceOp, name: str) -> None:
    for index, (one, other) in enumerate(zip(got.tolist(), expected.tolist(), strict=True)):
        if math.isnan(other) and op is not ReduceOp.SUM:
            continue  # the API does not say whether NaN wins a comparison
        # As text: NaN equals NaN, and -0.0 does not equal 0.0.
        assert str(one) == str(other), f"{name} {op.name}: element {index} is {one}, expected {other}"


def default_stream(session: Session) -> None:
    """The stream with the raw handle 0 is one like any other."""
    with torch.cuda.stream(torch.cuda.default_stream(session.device)):
        calls = _Calls(session, session.communicator, 0)
        tensor = calls.made(4096, torch.float32, 1)
        calls.all_reduce(tensor)
        calls.expect_sum(tensor, 1, "all_reduce on the default stream")


def order_on_a_stream(session: Session) -> None:
    """A call comes after what was enqueued on its stream before, and before what is enqueued after."""
    calls = _calls(session)
    tensor = calls.made(1 << 20, torch.float32, 1)
    torch.cuda._sleep(50_000_000)
    tensor += 2
    calls.all_reduce(tensor)
    tensor *= 2
    expected = 2 * (_summed(session.world_size, 1 << 20, torch.float32, 1) + 2 * session.world_size)
    session.synchronize()
    _expect(tensor, expected, "an all_reduce between two kernels")


def captured_in_a_graph(session: Session) -> None:
    """A captured all_reduce reduces what lies in its buffer at each replay."""
    calls = _calls(session)
    tensor = calls.made(4096, torch.float32, 1)
    calls.all_reduce(tensor)
    session.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(session.device)):
        captured = _Calls(session, session.communicator, torch.cuda.current_stream().cuda_stream)
        captured.all_reduce(tensor)
    for salt in (2, 3, 4):
        tensor.copy_(calls.made(4096, torch.float32, salt))
        graph.replay()
        calls.expect_sum(tensor, salt, f"replay with new data {salt}")


EVERYWHERE = (
    properties,
    group_of_different_calls,
    nested_groups,
    all_pairs_in_a_group,
    pairs_in_turn,
    two_communicators_in_turn,
    one_group_over_two_communicators,
    two_threads_on_two_communicators,
    a_group_belongs_to_its_thread,
    wrong_arguments,
    a_wrong_call_in_a_group,
    barrier_holds_everyone,
    library_memory,
    symmetric_window,
    special_values,
)
# What FlagCX leaves to the library below it and hostcx promises.
ON_HOST = (sends_before_receives,)
ON_DEVICE = (default_stream, order_on_a_stream, captured_in_a_graph)
