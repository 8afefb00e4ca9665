"""The functions of the matrix as data: how each is called, how large its buffers are, what it must give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch

from sglang_fl.comm.backends.flagcx.types import ReduceOp

from .data import ElementType, Sources
from .session import Session
from .torch_reference import TorchSession


class Placement(Enum):
    """How the send and the receive buffer lie to each other."""

    APART = "out of place"
    SAME = "in place"
    OWN_BLOCK_OF_RECEIVE = "in place, send = receive + rank * count"
    OWN_BLOCK_OF_SEND = "in place, receive = send + rank * count"


@dataclass(frozen=True)
class Case:
    """One call of the matrix, the same on all ranks."""

    function: Function
    element: ElementType
    op: ReduceOp
    count: int
    placement: Placement
    root: int

    def __str__(self) -> str:
        words = [self.function.name, self.element.name]
        if self.function.reduces:
            words.append(self.op.name)
        words.append(f"count {self.count}")
        if self.function.is_rooted:
            words.append(f"root {self.root}")
        return ", ".join([*words, self.placement.value])


AnySession = Session | TorchSession
Blocks = list[torch.Tensor]
# Calls the library with the addresses of the send and of the receive buffer.
Call = Callable[[AnySession, Case, int, int], None]
# The blocks that a rank must receive, one after the other; None where it must receive nothing.
Expected = Callable[[Case, Sources, int], "Blocks | None"]


@dataclass(frozen=True)
class Function:
    """One function of the library. A send or receive buffer holds one block, or one for each rank."""

    name: str
    call: Call
    expected: Expected
    reduces: bool = False
    sends_all_blocks: bool = False
    receives_all_blocks: bool = False
    only_root_sends: bool = False
    only_root_receives: bool = False
    in_place: Placement | None = None

    @property
    def is_rooted(self) -> bool:
        return self.only_root_sends or self.only_root_receives


def _all_reduce(session: AnySession, case: Case, send: int, receive: int) -> None:
    session.communicator.all_reduce(send, receive, case.count, case.element.data_type, case.op, session.stream)


def _reduce(session: AnySession, case: Case, send: int, receive: int) -> None:
    session.communicator.reduce(send, receive, case.count, case.element.data_type, case.op, case.root, session.stream)


def _reduce_scatter(session: AnySession, case: Case, send: int, receive: int) -> None:
    session.communicator.reduce_scatter(send, receive, case.count, case.element.data_type, case.op, session.stream)


def _all_gather(session: AnySession, case: Case, send: int, receive: int) -> None:
    session.communicator.all_gather(send, receive, case.count, case.element.data_type, session.stream)


def _broadcast(session: AnySession, case: Case, send: int, receive: int) -> None:
    session.communicator.broadcast(send, receive, case.count, case.element.data_type, case.root, session.stream)


def _gather(session: AnySession, case: Case, send: int, receive: int) -> None:
    session.communicator.gather(send, receive, case.count, case.element.data_type, case.root, session.stream)


def _scatter(session: AnySession, case: Case, send: int, receive: int) -> None:
    session.communicator.scatter(send, receive, case.count, case.element.data_type, case.root, session.stream)


def _all_to_all(session: AnySession, case: Case, send: int, receive: int) -> None:
    session.communicator.all_to_all(send, receive, case.count, case.element.data_type, session.stream)


def _ring(session: AnySession, case: Case, send: int, receive: int) -> None:
    communicator, data_type = session.communicator, case.element.data_type
    with communicator.group():
        communicator.send(send, case.count, data_type, session.next_rank, session.stream)
        communicator.recv(receive, case.count, data_type, session.previous_rank, session.stream)


def _reduction(case: Case, sources: Sources, rank: int) -> Blocks:
    return [sources.reduction(0, case.count)]


def _own_block_of_reduction(case: Case, sources: Sources, rank: int) -> Blocks:
    return [sources.reduction(rank * case.count, case.count)]


def _first_block_of_each(case: Case, sources: Sources, rank: int) -> Blocks:
    return [source.block(0, case.count) for source in sources.of_rank]


def _own_block_of_each(case: Case, sources: Sources, rank: int) -> Blocks:
    return [source.block(rank * case.count, case.count) for source in sources.of_rank]


def _first_block_of_root(case: Case, sources: Sources, rank: int) -> Blocks:
    return [sources.of_rank[case.root].block(0, case.count)]


def _own_block_of_root(case: Case, sources: Sources, rank: int) -> Blocks:
    return [sources.of_rank[case.root].block(rank * case.count, case.count)]


def _first_block_of_previous(case: Case, sources: Sources, rank: int) -> Blocks:
    return [sources.of_rank[rank - 1].block(0, case.count)]


def _at_root(expected: Callable[[Case, Sources, int], Blocks]) -> Expected:
    def at_root(case: Case, sources: Sources, rank: int) -> Blocks | None:
        return expected(case, sources, rank) if rank == case.root else None

    return at_root


FUNCTIONS = (
    Function("all_reduce", _all_reduce, _reduction, reduces=True, in_place=Placement.SAME),
    Function(
        name="reduce",
        call=_reduce,
        expected=_at_root(_reduction),
        reduces=True,
        only_root_receives=True,
        in_place=Placement.SAME,
    ),
    Function(
        name="reduce_scatter",
        call=_reduce_scatter,
        expected=_own_block_of_reduction,
        reduces=True,
        sends_all_blocks=True,
        in_place=Placement.OWN_BLOCK_OF_SEND,
    ),
    Function(
        name="all_gather",
        call=_all_gather,
        expected=_first_block_of_each,
        receives_all_blocks=True,
        in_place=Placement.OWN_BLOCK_OF_RECEIVE,
    ),
    Function(
        name="broadcast",
        call=_broadcast,
        expected=_first_block_of_root,
        only_root_sends=True,
        in_place=Placement.SAME,
    ),
    Function(
        name="gather",
        call=_gather,
        expected=_at_root(_first_block_of_each),
        receives_all_blocks=True,
        only_root_receives=True,
        in_place=Placement.OWN_BLOCK_OF_RECEIVE,
    ),
    Function(
        name="scatter",
        call=_scatter,
        expected=_own_block_of_root,
        sends_all_blocks=True,
        only_root_sends=True,
        in_place=Placement.OWN_BLOCK_OF_SEND,
    ),
    Function("all_to_all", _all_to_all, _own_block_of_each, sends_all_blocks=True, receives_all_blocks=True),
    Function("send and recv in a ring", _ring, _first_block_of_previous),
)
