"""The look-up of a call's route: tables by dtype, size, capture and memory, made from routes once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from sglang_fl.comm.registered import RegisteredMemory
from sglang_fl.comm.types import Capabilities, Operation, Transport
from sglang_fl.config import CaptureRule, CommRoute, CommRouteOrder, MemoryRule

NATIVE = "native"
_REDUCTIONS = frozenset({Operation.ALL_REDUCE, Operation.REDUCE_SCATTER})
ANY_SIZE = sys.maxsize

# For one dtype: (largest size in bytes, transport), in the order in which they are tried; the last takes any size.
Entries = tuple[tuple[int, Transport], ...]
Finder = Callable[[torch.Tensor], Transport]


@dataclass(frozen=True)
class Table:
    """The routes of one operation: by dtype, outside of a graph's capture and inside; ``other`` for other dtypes.

    ``registered``: for tensors in registered memory; None where they take the same ways.
    """

    other: Transport
    eager: Mapping[torch.dtype, Entries] = field(default_factory=dict)
    graph: Mapping[torch.dtype, Entries] = field(default_factory=dict)
    registered: Table | None = None

    def finder(self, is_capturing: Callable[[], bool], memory: RegisteredMemory | None = None) -> Finder:
        """The look-up of a call's transport by the larger one of its tensors: a dictionary get, then comparisons."""
        ordinary = self._finder(is_capturing)
        if self.registered is None or memory is None:
            return ordinary
        registered = self.registered._finder(is_capturing)

        def find(tensor: torch.Tensor) -> Transport:
            # Before the first tensor was taken from it, registered memory costs no more than this comparison.
            if memory.spans and memory.holds(tensor.data_ptr()):
                return registered(tensor)
            return ordinary(tensor)

        return find

    def _finder(self, is_capturing: Callable[[], bool]) -> Finder:
        if self.eager == self.graph:
            return _finder(self.eager, self.other)
        return _finder_by_capture(self.eager, self.graph, self.other, is_capturing)


def _finder(by_dtype: Mapping[torch.dtype, Entries], other: Transport) -> Finder:
    # Each entry holds the next one, so that the first comparison mostly ends the search.
    chained = {dtype: _chained(entries) for dtype, entries in by_dtype.items()}
    get = chained.get
    unrouted = _chained(((ANY_SIZE, other),))

    def find(tensor: torch.Tensor) -> Transport:
        transport: Transport
        limit, transport, following = get(tensor.dtype, unrouted)
        size = tensor.nbytes
        while size > limit:
            limit, transport, following = following
        return transport

    return find


def _finder_by_capture(
    eager: Mapping[torch.dtype, Entries],
    graph: Mapping[torch.dtype, Entries],
    other: Transport,
    is_capturing: Callable[[], bool],
) -> Finder:
    """Asks whether the stream is captured, which costs as much as all else here, only where that makes a difference."""
    every = ((ANY_SIZE, other),)
    chained = {
        dtype: _chained(_merged(eager.get(dtype, every), graph.get(dtype, every))) for dtype in {**eager, **graph}
    }
    get = chained.get
    unrouted = _chained(((ANY_SIZE, other, None),))

    def find(tensor: torch.Tensor) -> Transport:
        transport: Transport
        captured: Transport | None
        limit, transport, captured, following = get(tensor.dtype, unrouted)
        size = tensor.nbytes
        while size > limit:
            limit, transport, captured, following = following
        if captured is None or not is_capturing():
            return transport
        return captured

    return find


def _merged(eager: Entries, graph: Entries) -> tuple[tuple[int, Transport, Transport | None], ...]:
    """(largest size, transport outside of a capture, inside if that is another one)."""
    found = []
    for limit in sorted({limit for limit, _ in (*eager, *graph)}):
        outside, inside = (next(one for most, one in entries if limit <= most) for entries in (eager, graph))
        found.append((limit, outside, None if inside is outside else inside))
    return tuple(found)


def _chained(entries: tuple[tuple[Any, ...], ...]) -> Any:
    chain: Any = None
    for entry in reversed(entries):
        chain = (*entry, chain)
    return chain


def dtypes_of(capabilities: Capabilities, op: str) -> frozenset[torch.dtype]:
    """Those in which it carries the operation, if it offers it."""
    return capabilities.reducible if Operation(op) in _REDUCTIONS else capabilities.movable


def orders_for(ranks: int, orders: Sequence[CommRouteOrder]) -> list[CommRouteOrder]:
    """Those of a group of so many ranks: without the routes, and the operations, that are for groups of others."""
    kept = ((order.op, tuple(route for route in order.routes if route.ranks.holds(ranks))) for order in orders)
    return [CommRouteOrder(op, routes) for op, routes in kept if routes]


def table_of(order: CommRouteOrder, transports: Mapping[str, Transport], base: Transport) -> Table:
    """The table of one operation; routes whose transport is not there are left out."""

    def entries(dtype: torch.dtype, when: CaptureRule, memory: MemoryRule) -> Entries:
        found = []
        for route in order.routes:
            transport = transports.get(route.backend)
            if transport is None or not _holds(route, when, memory) or not _carries(transport, order.op, dtype):
                continue
            found.append((ANY_SIZE if route.max_bytes is None else route.max_bytes, transport))
        return (*found, (ANY_SIZE, base))

    def table(memory: MemoryRule) -> Table:
        eager = {dtype: entries(dtype, CaptureRule.EAGER, memory) for dtype in dtypes}
        graph = {dtype: entries(dtype, CaptureRule.GRAPH, memory) for dtype in dtypes}
        return Table(base, eager, graph)

    dtypes = dtypes_of(base.capabilities, order.op)
    ordinary, registered = table(MemoryRule.ORDINARY), table(MemoryRule.REGISTERED)
    return replace(ordinary, registered=None if registered == ordinary else registered)


def _holds(route: CommRoute, when: CaptureRule, memory: MemoryRule) -> bool:
    """Whether the route is for calls that are captured, or not, with tensors of that memory."""
    if route.backend == NATIVE and when is CaptureRule.GRAPH and memory is MemoryRule.REGISTERED:
        # After a capture SGLang's custom all_reduce hands its tensors to the peers by cudaIpcGetMemHandle, which
        # refuses memory that was mapped, as all registered memory is.
        return False
    return route.when in (CaptureRule.ALWAYS, when) and route.memory in (MemoryRule.ANY, memory)


def _carries(transport: Transport, op: str, dtype: torch.dtype) -> bool:
    capabilities = transport.capabilities
    return Operation(op) in capabilities.operations and dtype in dtypes_of(capabilities, op)
