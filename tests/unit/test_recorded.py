"""The wrapper that records other transports, its ring, and how a caller's place is found.

The transport within stands for a third party's: what it returns and raises is the test's.
"""

from __future__ import annotations

import gc
import time
from _thread import start_new_thread
from collections.abc import Callable
from types import CodeType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

from sglang_fl.comm import places, ring
from sglang_fl.comm.errors import CommError, PeerLost
from sglang_fl.comm.places import CallSite, in_words, is_on_the_way
from sglang_fl.comm.recorded import RecordedTransport, recorded
from sglang_fl.comm.recorder import RecordedCall, Recorder, from_row
from sglang_fl.comm.ring import CallRing
from sglang_fl.comm.routes import RoutedTransport
from sglang_fl.comm.sizes import SizedTransport
from sglang_fl.comm.types import Capabilities, GroupContext, Operation, Transport, Work

CPU = torch.device("cpu")
LIMIT_S = 30.0


class HandmadeWork:
    """Done when the test says so."""

    def __init__(self) -> None:
        self.is_done = False
        self.error: BaseException | None = None

    def wait(self) -> str:
        if self.error is not None:
            raise self.error
        self.is_done = True
        return "waited"

    def is_completed(self) -> bool:
        return self.is_done


class HandmadeTransport(Transport):
    """Does what the test wants, and counts."""

    def __init__(self, name: str = "handmade") -> None:
        self.name = name
        self.extra_bytes = 7
        everything = frozenset(Operation)
        self.capabilities = Capabilities(everything, frozenset({torch.float32}), frozenset(), frozenset({"cpu"}))
        self.calls: list[str] = []
        self.inside: Callable[[], object] = lambda: None
        self.works: list[HandmadeWork] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        self.inside()

    def _work(self, name: str) -> HandmadeWork:
        self._call(name)
        self.works.append(HandmadeWork())
        return self.works[-1]

    def exceptions(self) -> dict[str, str]:
        return {"gather": "another"}

    def interrupt(self) -> bool:
        self.calls.append("interrupt")
        return True

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._call("all_reduce")

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        self._call("all_gather")

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        self._call("reduce_scatter")

    def reduce(self, tensor: torch.Tensor, dst: int) -> None:
        self._call("reduce")

    def broadcast(self, tensor: torch.Tensor, src: int) -> Work | None:
        return self._work("broadcast")

    def gather(self, output: torch.Tensor | None, tensor: torch.Tensor, dst: int) -> None:
        self._call("gather")

    def send(self, tensor: torch.Tensor, dst: int) -> Work:
        return self._work("send")

    def recv(self, tensor: torch.Tensor, src: int) -> Work:
        return self._work("recv")

    def close(self) -> None:
        self._call("close")


def context_of(records: bool = True, watch: Callable[[Recorder], None] = lambda recorder: None) -> GroupContext:
    group = cast(Any, None)  # nothing here reaches torch.distributed
    return GroupContext("tp:0", (4, 6, 8), 1, CPU, group, group, records=records, watch=watch)


@pytest.fixture
def inner() -> HandmadeTransport:
    return HandmadeTransport()


@pytest.fixture
def transport(inner: HandmadeTransport) -> RecordedTransport:
    return RecordedTransport(inner, context_of())


def ring_of(transport: Transport) -> Recorder:
    return transport.recorders()[0]


def whats(recorder: Recorder) -> list[str]:
    return [call.what() for call in recorder.calls()]


# --- what is recorded ---


def test_every_operation_is_a_row(transport: RecordedTransport, inner: HandmadeTransport) -> None:
    """Given a recorded transport, when each operation is called, then each is one row, by direction for transfers, and
    reaches the transport within once."""
    three, nine = torch.ones(3), torch.ones(9)
    transport.all_reduce(three)
    assert transport.all_reduce_result(three) is three
    assert transport.all_reduce_new(three) is not three
    transport.all_gather(nine, three)
    transport.reduce_scatter(three, nine)
    transport.reduce(nine, 2)
    transport.gather(nine, three, 0)
    transport.gather(None, three, 0)
    transport.broadcast(nine, 1)
    transport.send(nine, 2)
    transport.recv(three, 2)
    transport.send(three, 0)
    collectives, to_8, from_8, to_4 = transport.recorders()
    reduced = ["all_reduce float32[3]"] * 3
    moved = ["all_gather float32[3]", "reduce_scatter float32[3]", "reduce float32[9] rank 2"]
    gathered = ["gather float32[3] rank 0"] * 2
    assert whats(collectives) == [*reduced, *moved, *gathered, "broadcast float32[9] rank 1"]
    names = [(recorder.name, recorder.ranks, whats(recorder)) for recorder in (to_8, from_8, to_4)]
    assert names == [
        ("tp:0 handmade 6>8", (6, 8), ["send float32[9] rank 2"]),
        ("tp:0 handmade 8>6", (8, 6), ["recv float32[3] rank 2"]),
        ("tp:0 handmade 6>4", (6, 4), ["send float32[3] rank 0"]),
    ]
    assert [call.number for call in collectives.calls()] == list(range(1, 10))
    assert len(inner.calls) == 12
    assert collectives.ranks == (4, 6, 8) and collectives.device == CPU
    assert all(from_row(call.row()) == call for call in collectives.calls())


def test_the_rest_is_the_transports_own(transport: RecordedTransport, inner: HandmadeTransport) -> None:
    """Given a recorded transport, when it is asked for anything else, then it answers as the one within."""
    assert (transport.name, transport.extra_bytes, transport.exceptions()) == ("handmade", 7, {"gather": "another"})
    assert transport.capabilities is inner.capabilities
    assert transport.interrupt()
    transport.close()
    assert inner.calls == ["interrupt", "close"]


def test_a_call_is_under_way_until_it_returns(transport: RecordedTransport, inner: HandmadeTransport) -> None:
    """Given a call that has not returned, when its recorder is asked, then it is under way, with no time out."""
    seen: list[RecordedCall | None] = []
    inner.inside = lambda: seen.append(ring_of(transport).under_way())
    before_s = time.time()
    transport.all_reduce(torch.ones(3))
    (call,) = seen
    assert call is not None and (call.number, call.time_out_s, call.error) == (1, None, "")
    assert ring_of(transport).under_way() is None
    (ended,) = ring_of(transport).calls()
    assert before_s <= ended.time_in_s <= (ended.time_out_s or 0) <= time.time()


def test_a_work_ends_its_call(transport: RecordedTransport, inner: HandmadeTransport) -> None:
    """Given works, when they are waited for or found done, in any order, then their calls have returned; of those that
    were asked for and are not done the oldest is under way."""
    first, second, third = (transport.broadcast(torch.ones(n), 0) for n in (1, 2, 3))
    assert first is not None and second is not None and third is not None
    recorder = ring_of(transport)

    def number() -> int | None:
        call = recorder.under_way()
        return None if call is None else call.number

    assert number() is None
    assert second.wait() == "waited"
    assert number() is None
    assert not first.is_completed()
    assert number() == 1
    inner.works[0].is_done = True
    assert first.is_completed()
    assert number() is None
    assert not third.is_completed()
    assert number() == 3
    third.wait()
    assert number() is None
    assert all(call.time_out_s is not None for call in recorder.calls())


def test_a_work_that_is_dropped_is_not_under_way(transport: RecordedTransport) -> None:
    """Given a work that nobody holds any more, when its recorder is asked, then its call is not under way: nobody
    waits, and how it ended is not known."""
    transport.send(torch.ones(3), 2)
    gc.collect()
    direction = transport.recorders()[1]
    assert direction.under_way() is None
    assert direction.calls()[0].time_out_s is None


def test_an_old_work_stays_under_way_beyond_what_is_kept() -> None:
    """Given a work older than all that the ring keeps, and asked for, then it is still under way; before it was asked
    or waited for it was not: its rank may come back to it whenever it wants."""
    ring = CallRing("pp:0 handmade", (0, 1), CPU, size=4)
    work = ring.watch(ring.enter("send"), HandmadeWork(), ())
    assert ring.under_way() is None
    assert not work.is_completed()
    for _ in range(9):
        ring.leave(ring.enter("send"))
    assert [call.number for call in ring.calls()] == [7, 8, 9, 10]
    call = ring.under_way()
    assert call is not None and call.number == 1
    work.wait()
    assert ring.under_way() is None


# --- failures ---


def test_a_failed_call_keeps_its_error(transport: RecordedTransport, inner: HandmadeTransport) -> None:
    """Given a transport that raises, when it is called, then the same error comes out, its first line is recorded."""
    error = ValueError("no such rank\nmore")
    inner.inside = lambda: _raise(error)
    with pytest.raises(ValueError, match="no such rank") as raised:
        transport.reduce(torch.ones(3), 0)
    assert raised.value is error
    (call,) = ring_of(transport).calls()
    assert call.error == "ValueError: no such rank"
    assert call.time_out_s is not None and ring_of(transport).under_way() is None


def test_a_failed_work_keeps_its_error(transport: RecordedTransport, inner: HandmadeTransport) -> None:
    """Given a work that fails, when it is waited for, then the error is recorded with its call."""
    work = transport.recv(torch.ones(3), 0)
    inner.works[0].error = RuntimeError("connection closed by peer")
    with pytest.raises(RuntimeError, match="connection closed"):
        work.wait()
    assert transport.recorders()[1].calls()[0].error == "RuntimeError: connection closed by peer"


@pytest.mark.parametrize("is_work", [False, True])
def test_what_is_known_of_a_failure_is_raised(
    transport: RecordedTransport, inner: HandmadeTransport, is_work: bool
) -> None:
    """Given a monitor that knows why, when a call or its work fails, then the caller gets that, with the call's shape,
    and the transport's own error as its cause; where it knows nothing, the transport's own."""
    told: list[tuple[str, tuple[int, ...]]] = []

    def explain(error: CommError, shape: tuple[int, ...]) -> CommError:
        told.append((str(error), shape))
        return PeerLost("rank 8 is gone") if len(told) == 1 else error

    ring_of(transport).explainer = explain
    error = RuntimeError("connection closed")

    def call() -> None:
        if is_work:
            work = transport.broadcast(torch.ones(2, 3), 0)
            inner.works[-1].error = error
            assert work is not None
            work.wait()
        else:
            inner.inside = lambda: _raise(error)
            transport.all_reduce(torch.ones(2, 3))

    with pytest.raises(PeerLost, match="rank 8 is gone") as raised:
        call()
    assert raised.value.__cause__ is error
    with pytest.raises(RuntimeError) as again:
        call()
    assert again.value is error
    assert told == [("connection closed", (2, 3))] * 2


def test_a_refused_call_does_not_come_about(transport: RecordedTransport, inner: HandmadeTransport) -> None:
    """Given a refused recorder, when its transport is called, then the reason is raised, nothing reaches the transport
    and no number is spent; a call under way that fails raises it as well."""
    recorder = ring_of(transport)

    def refused_meanwhile() -> None:
        recorder.refuse("rank 4 is stopped")
        raise RuntimeError("interrupted")

    inner.inside = refused_meanwhile
    for _ in range(2):
        with pytest.raises(CommError, match=r"^rank 4 is stopped$"):
            transport.all_reduce(torch.ones(3))
    assert inner.calls == ["all_reduce"]
    assert recorder.entered() == 1


def test_an_abort_goes_to_the_transport(transport: RecordedTransport, inner: HandmadeTransport) -> None:
    """Given a recorder of collectives, or of a direction, when it is to abort, then the transport is interrupted."""
    assert ring_of(transport).abort(1.0)
    assert inner.calls == ["interrupt"]
    transport.send(torch.ones(1), 0)
    assert transport.recorders()[1].abort(1.0)
    assert inner.calls == ["interrupt", "send", "interrupt"]


def test_host_memory_has_no_marks(transport: RecordedTransport) -> None:
    """Given host memory, when a mark is asked for, then calls go on and there is none."""
    recorder = ring_of(transport)
    recorder.ask_for_mark()
    transport.all_reduce(torch.ones(3))
    assert recorder.take_mark() is recorder.mark_now() is None
    assert not recorder.has_captured()


def test_a_mark_says_whether_it_is_right_behind_its_call(
    inner: HandmadeTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a device, when a mark is asked for, then one that the call itself makes is close; one that is made later,
    at a work's wait or by the monitor, is not."""
    marker = SimpleNamespace(here=lambda: "event", on=lambda stream: "event", is_capturing=lambda: False)
    monkeypatch.setattr(ring, "marker_for", lambda device: marker)
    made = ring.CallRing("tp:0 handmade", (0, 1), CPU)
    made.ask_for_mark()
    made.leave(made.enter("all_reduce"))
    found = [made.take_mark(), made.mark_now()]
    transport = RecordedTransport(inner, context_of())
    recorder = ring_of(transport)
    tensor = torch.ones(3)
    calls: list[Callable[[], object]] = [
        lambda: transport.all_reduce(tensor),
        lambda: _waited(transport.broadcast(tensor, 1)),
    ]
    for call in calls:
        recorder.ask_for_mark()
        call()
        found.append(recorder.take_mark())
    assert [mark is not None and mark.is_close for mark in found] == [True, False, True, False]
    assert [mark is not None and mark.number for mark in found] == [1, 1, 1, 2]


def _waited(work: Work | None) -> None:
    assert work is not None
    work.wait()


# --- who is wrapped ---


def test_what_records_itself_is_not_wrapped(inner: HandmadeTransport) -> None:
    """Given a transport with recorders, or a group that is not recorded, when it is to be recorded, then it stays."""
    assert recorded(context_of(records=False), inner) is inner
    assert inner.recorders() == ()
    wrapped = recorded(context_of(), inner)
    assert isinstance(wrapped, RecordedTransport)
    assert recorded(context_of(), wrapped) is wrapped


def test_a_recorder_is_watched_from_its_beginning(inner: HandmadeTransport) -> None:
    """Given a group whose creation is watched, when its transport is wrapped, then the monitor knows the recorder
    before the first call."""
    watched: list[Recorder] = []
    transport = RecordedTransport(inner, context_of(watch=watched.append))
    assert watched == [ring_of(transport)]


def test_transports_of_transports_tell_all_recorders() -> None:
    """Given routes over several transports, when they are asked, then they name the recorders of all of them."""
    one, two = (RecordedTransport(HandmadeTransport(name), context_of()) for name in ("one", "two"))
    one.restrict(frozenset({Operation.ALL_REDUCE}))
    routed = RoutedTransport(one, two)
    sized = SizedTransport(one, [two], {}, lambda: False)
    for transport in (routed, sized):
        assert [recorder.name for recorder in transport.recorders()] == ["tp:0 one", "tp:0 two"]
    routed.gather(None, torch.ones(1), 0)
    assert [recorder.entered() for recorder in routed.recorders()] == [0, 1]


def _raise(error: BaseException) -> None:
    raise error


# --- places ---


def _operation() -> Callable[[], str]:
    """An operation that tells in words from where it was called."""
    site = CallSite()

    def operation() -> str:
        return in_words(site.find())

    return _on_the_way(operation)


def _through(call: Callable[[], str]) -> Callable[[], str]:
    """A thin wrapper, as SGLang has them."""

    def thin() -> str:
        return call()

    return _on_the_way(thin)


def _on_the_way(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function as if it lay in this package's communication layer."""
    code: CodeType = function.__code__
    function.__code__ = code.replace(co_filename=places.__file__)
    return function


def test_a_place_is_the_first_caller_outside() -> None:
    """Given thin wrappers around an operation, when it is called through any number of them, then the place is who
    called the outermost one: file, line and function."""
    operation = _operation()
    thin = _through(operation)
    thinner = _through(thin)
    for call in (operation, thin, thinner, thin, operation):
        file, _, where = call().rpartition(":")
        assert file == __file__
        line, _, name = where.partition(" ")
        assert int(line) == test_a_place_is_the_first_caller_outside.__code__.co_firstlineno + 7
        assert name.endswith("test_a_place_is_the_first_caller_outside")


def test_a_caller_further_out_is_not_taken_for_the_place() -> None:
    """Given a function that calls an operation through a wrapper, then one that calls it without, at the depth where
    the first one was, when places are taken, then each is the one that called."""
    operation = _operation()
    thin = _through(operation)

    def outer() -> tuple[str, str]:
        return thin(), inner()

    def inner() -> str:
        return operation()

    for _ in range(3):
        through, direct = outer()
        assert through.endswith("outer")
        assert direct.endswith("inner")


def test_callers_of_the_same_shape_are_told_apart(transport: RecordedTransport) -> None:
    """Given two functions whose calls are the same instruction of each, when they call in turn, then each row has its
    own function."""
    tensor = torch.ones(1)

    def one() -> None:
        transport.all_reduce(tensor)

    def two() -> None:
        transport.all_reduce(tensor)

    for _ in range(2):
        one()
        two()
    assert [call.place.rpartition(".")[2] for call in ring_of(transport).calls()] == ["one", "two"] * 2


def test_a_stack_without_a_caller_has_no_place() -> None:
    """Given a stack that lies on the way as a whole, when a place is taken, then it is empty."""
    found: list[str] = []
    operation = _operation()
    start_new_thread(_on_the_way(lambda: found.append(operation())), ())
    deadline = time.monotonic() + LIMIT_S
    while not found:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert found == [""]


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (places.__file__, True),
        (places.__file__.replace("comm/places.py", "sglang_hooks/coordinator.py"), True),
        ("/x/site-packages/sglang/srt/distributed/communication_op.py", True),
        ("/x/site-packages/sglang/srt/distributed/parallel_state.py", True),
        ("/x/site-packages/sglang/srt/plugins/hook_registry.py", True),
        ("/x/site-packages/sglang/srt/layers/linear.py", False),
        (places.__file__.replace("places.py", "selftest.py"), False),
        (places.__file__.replace("places.py", "bench.py"), False),
        (__file__, False),
    ],
)
def test_what_lies_on_the_way(file: str, expected: bool) -> None:
    """Given a file, when it is asked for, then only code that hands calls on lies on the way."""
    assert is_on_the_way(file) is expected
