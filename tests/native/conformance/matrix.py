"""The walk through the matrix: every function, dtype, operation, count and placement, in one process per rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from sglang_fl.comm.backends.flagcx.types import ReduceOp
from sglang_fl.testing.ranks import RankContext

from .buffers import GuardedBuffer, difference, is_stale, same_bytes
from .data import ELEMENT_TYPES, ElementType, Sources
from .functions import FUNCTIONS, Case, Placement
from .session import Session
from .torch_reference import TorchSession

COUNTS = (0, 1, 7, 4096, 1_000_000)
# With these counts a buffer that a rank needs not is NULL; with the others it is there and must stay as it is.
_NULL_COUNTS = (7, 1_000_000)
_LARGEST_ITEM_BYTES = 8
_MOST_ERRORS = 20


def cases(element: ElementType, op: ReduceOp | None, world_size: int, counts: Sequence[int] = COUNTS) -> Iterator[Case]:
    """The cases of a dtype with a reduce operation, or with None those that only move data.

    Every rank gets them in the same order; the root goes round from case to case.
    """
    number = 0
    for function in FUNCTIONS:
        if function.reduces != (op is not None):
            continue
        for placement in (Placement.APART, function.in_place):
            for count in counts if placement else ():
                number += 1
                yield Case(function, element, op or ReduceOp.SUM, count, placement, number % world_size)


@dataclass(frozen=True)
class MatrixReport:
    """What one rank saw, on memory of the kind "host" or "device"."""

    memory: str
    cases_run: int
    errors: list[str]


@dataclass
class _Walk:
    """One rank's state: what it sends from and receives into, and what was wrong so far."""

    context: RankContext
    session: Session | TorchSession
    cases_run: int = 0
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        capacity = self.session.world_size * max(COUNTS) * _LARGEST_ITEM_BYTES
        self.send_buffer = GuardedBuffer(capacity, self.session.device)
        self.receive_buffer = GuardedBuffer(capacity, self.session.device)

    def run(self, case: Case, sources: Sources) -> None:
        self.context.note(str(case))
        world_size = self.session.world_size
        given = sources.of_rank[self.session.rank].block(
            0, case.count * (world_size if case.function.sends_all_blocks else 1)
        )
        send, receive = self._place(case, given)
        case.function.call(self.session, case, self._send_address(case, send), self._receive_address(case, receive))
        self.session.synchronize()
        self.cases_run += 1
        for error in self._faults(case, sources, given, send, receive):
            if len(self.errors) < _MOST_ERRORS:
                self.errors.append(f"rank {self.session.rank} of {world_size}: {case}: {error}")

    def _place(self, case: Case, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Lay out both buffers; small ones at an address that is aligned to the dtype only."""
        shift = case.element.size if case.count in {1, 7} else 0
        block = case.count * case.element.size
        own = slice(self.session.rank * block, (self.session.rank + 1) * block)
        receive_bytes = block * (self.session.world_size if case.function.receives_all_blocks else 1)
        if case.placement is Placement.OWN_BLOCK_OF_RECEIVE:
            receive = self.receive_buffer.take(receive_bytes, shift)
            send = receive[own].copy_(given)
            return send, receive
        send = self.send_buffer.take(given.numel(), shift).copy_(given)
        if case.placement is Placement.SAME:
            return send, send
        if case.placement is Placement.OWN_BLOCK_OF_SEND:
            return send, send[own]
        return send, self.receive_buffer.take(receive_bytes, shift)

    def _is_null(self, case: Case, only_at_root: bool) -> bool:
        needs_not = only_at_root and self.session.rank != case.root
        return needs_not and case.placement is Placement.APART and case.count in _NULL_COUNTS

    def _send_address(self, case: Case, send: torch.Tensor) -> int:
        return 0 if self._is_null(case, case.function.only_root_sends) else send.data_ptr()

    def _receive_address(self, case: Case, receive: torch.Tensor) -> int:
        return 0 if self._is_null(case, case.function.only_root_receives) else receive.data_ptr()

    def _faults(
        self, case: Case, sources: Sources, given: torch.Tensor, send: torch.Tensor, receive: torch.Tensor
    ) -> Iterator[str]:
        blocks = case.function.expected(case, sources, self.session.rank)
        if blocks is not None:
            yield from self._wrong_blocks(case, blocks, receive)
        elif case.placement is Placement.SAME:
            if not same_bytes(receive, given):
                yield "a rank that receives nothing has another content in its buffer"
        elif case.placement is Placement.APART and not is_stale(receive):
            yield "wrote into the receive buffer of a rank that receives nothing"
        if case.placement is Placement.APART and not same_bytes(send, given):
            yield "changed the send buffer"
        for name, buffer in (("send", self.send_buffer), ("receive", self.receive_buffer)):
            damage = buffer.damage()
            if damage:
                yield f"{damage} ({name})"

    def _wrong_blocks(self, case: Case, blocks: list[torch.Tensor], receive: torch.Tensor) -> Iterator[str]:
        size = case.count * case.element.size
        tolerance = case.element.rounding(case.op, self.session.world_size) if case.function.reduces else 0.0
        for index, block in enumerate(blocks):
            got = receive[index * size : (index + 1) * size]
            wrong = difference(got, block, case.element.torch_dtype, tolerance)
            if wrong:
                yield f"block {index}: {wrong}" if len(blocks) > 1 else wrong


def run_matrix(
    context: RankContext,
    session: Session | TorchSession,
    counts: Sequence[int] = COUNTS,
    is_included: Callable[[ElementType, ReduceOp | None, int], bool] = lambda element, op, world_size: True,
) -> MatrixReport:
    """Walk through all cases and go on after wrong values, so that one run shows the whole pattern of a fault."""
    walk = _Walk(context, session)
    for element in ELEMENT_TYPES:
        for op in (None, *ReduceOp):
            if not is_included(element, op, session.world_size):
                continue
            sources = Sources(element, op, session.world_size, session.device)
            for case in cases(element, op, session.world_size, counts):
                walk.run(case, sources)
    memory = "host" if session.device.type == "cpu" else "device"
    return MatrixReport(memory, walk.cases_run, walk.errors)
