"""all_to_all_v: every pair of ranks has its own count, zero among them, and blocks lie in any order with gaps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from sglang_fl.testing.ranks import RankContext

from .buffers import GuardedBuffer, difference, is_stale, same_bytes
from .data import ELEMENT_TYPES, ElementType, Sources
from .matrix import COUNTS
from .session import Session

_GAP = 3  # elements between two blocks
_SENT_APART = 1013  # elements by which the data for two receivers differ


def _count(base: int, sender: int, receiver: int) -> int:
    return base * ((sender + 2 * receiver) % 3) // 2


def _offsets(counts: Sequence[int]) -> list[int]:
    return [0, *accumulate(count + _GAP for count in counts)][: len(counts)]


def _receive_offsets(counts: Sequence[int]) -> list[int]:
    """The block of the last rank comes first."""
    return _offsets(counts[::-1])[::-1]


def all_to_all_v(context: RankContext, session: Session) -> list[str]:
    """Run all dtypes and counts; return what was wrong."""
    room = session.world_size * (max(COUNTS) + _GAP) * 8
    send_buffer, receive_buffer = GuardedBuffer(room, session.device), GuardedBuffer(room, session.device)
    errors: list[str] = []
    for element in ELEMENT_TYPES:
        sources = Sources(element, None, session.world_size, session.device)
        for base in COUNTS:
            context.note(f"all_to_all_v {element.name}, count about {base}")
            errors += _exchange(session, element, sources, base, send_buffer, receive_buffer)
    return errors


def _exchange(
    session: Session,
    element: ElementType,
    sources: Sources,
    base: int,
    send_buffer: GuardedBuffer,
    receive_buffer: GuardedBuffer,
) -> list[str]:
    ranks, size = range(session.world_size), element.size
    send_counts = [_count(base, session.rank, peer) for peer in ranks]
    receive_counts = [_count(base, peer, session.rank) for peer in ranks]
    send_offsets, receive_offsets = _offsets(send_counts), _receive_offsets(receive_counts)
    send = send_buffer.take((sum(send_counts) + len(ranks) * _GAP) * size)
    receive = receive_buffer.take((sum(receive_counts) + len(ranks) * _GAP) * size)
    for peer in ranks:
        block = sources.of_rank[session.rank].block(peer * _SENT_APART, send_counts[peer])
        send[send_offsets[peer] * size :][: block.numel()].copy_(block)
    before = send.clone()

    session.communicator.all_to_all_v(
        send.data_ptr(),
        send_counts,
        send_offsets,
        receive.data_ptr(),
        receive_counts,
        receive_offsets,
        element.data_type,
        session.stream,
    )
    session.synchronize()

    faults = [buffer.damage() for buffer in (send_buffer, receive_buffer)]
    if not same_bytes(send, before):
        faults.append("changed the send buffer")
    for peer in ranks:
        start, end = receive_offsets[peer] * size, (receive_offsets[peer] + receive_counts[peer]) * size
        expected = sources.of_rank[peer].block(session.rank * _SENT_APART, receive_counts[peer])
        wrong = difference(receive[start:end], expected, element.torch_dtype, 0.0)
        faults.append(wrong and f"block from rank {peer}: {wrong}")
        if not is_stale(receive[end : end + _GAP * size]):
            faults.append(f"wrote behind the block from rank {peer}")
    where = f"rank {session.rank} of {session.world_size}: all_to_all_v {element.name}, count about {base}"
    return [f"{where}: {fault}" for fault in faults if fault]
