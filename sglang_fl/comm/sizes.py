"""Mode fastest: per operation the route that carries a call of its dtype and size, built once, alike on all ranks."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from sglang_fl.comm.agreement import Agreed, create_everywhere, first_refusal, local_refusal
from sglang_fl.comm.errors import AgreementError
from sglang_fl.comm.recorded import recorded
from sglang_fl.comm.recorder import Recorder
from sglang_fl.comm.types import Backend, Capabilities, GroupContext, Operation, Transport, Work
from sglang_fl.config import CaptureRule, CommMode, CommRouteOrder, CommSettings, closest
from sglang_fl.selection import Policy

NATIVE = "native"
_REDUCTIONS = frozenset({Operation.ALL_REDUCE, Operation.REDUCE_SCATTER})
ANY_SIZE = sys.maxsize
logger = logging.getLogger(__name__)

# For one dtype: (largest size in bytes, transport), in the order in which they are tried; the last takes any size.
Entries = tuple[tuple[int, Transport], ...]
Finder = Callable[[torch.Tensor], Transport]


@dataclass(frozen=True)
class Table:
    """The routes of one operation: by dtype, outside of a graph's capture and inside; ``other`` for other dtypes."""

    other: Transport
    eager: Mapping[torch.dtype, Entries] = field(default_factory=dict)
    graph: Mapping[torch.dtype, Entries] = field(default_factory=dict)

    def finder(self, is_capturing: Callable[[], bool]) -> Finder:
        """The look-up of a call's transport by the larger one of its tensors: a dictionary get, then comparisons."""
        eager = _finder(self.eager, self.other)
        if self.eager == self.graph:
            return eager
        graph = _finder(self.graph, self.other)

        def find(tensor: torch.Tensor) -> Transport:
            return graph(tensor) if is_capturing() else eager(tensor)

        return find


def _finder(by_dtype: Mapping[torch.dtype, Entries], other: Transport) -> Finder:
    # Each entry holds the next one, so that the first comparison mostly ends the search.
    chained = {dtype: _chained(entries) for dtype, entries in by_dtype.items()}
    get = chained.get
    unrouted = _chained(((ANY_SIZE, other),))

    def find(tensor: torch.Tensor) -> Transport:
        limit, transport, following = get(tensor.dtype, unrouted)
        size = tensor.nbytes
        while size > limit:
            limit, transport, following = following
        found: Transport = transport
        return found

    return find


def _chained(entries: Entries) -> Any:
    chain: Any = None
    for limit, transport in reversed(entries):
        chain = (limit, transport, chain)
    return chain


class SizedTransport(Transport):
    """Hands each call to the transport that its dtype and size ask for; what has no routes goes to ``base``."""

    def __init__(
        self,
        base: Transport,
        others: Sequence[Transport],
        tables: Mapping[Operation, Table],
        is_capturing: Callable[[], bool],
    ) -> None:
        self.name = base.name
        self.capabilities: Capabilities = base.capabilities
        self._base = base
        self._transports = (base, *others)
        self.extra_bytes = sum(transport.extra_bytes for transport in self._transports)
        unrouted = Table(base)
        self._of_all_reduce = tables.get(Operation.ALL_REDUCE, unrouted).finder(is_capturing)
        self._of_all_gather = tables.get(Operation.ALL_GATHER, unrouted).finder(is_capturing)
        self._of_reduce_scatter = tables.get(Operation.REDUCE_SCATTER, unrouted).finder(is_capturing)
        # Unrouted operations cost nothing more than before.
        for operation in Operation:
            if operation not in tables:
                setattr(self, operation.value, getattr(base, operation.value))

    def names(self) -> list[str]:
        """Of all that may carry a call, the group's backend first."""
        return [transport.name for transport in self._transports]

    def exceptions(self) -> dict[str, str]:
        """See :meth:`Transport.exceptions`; routes by size are not exceptions."""
        return self._base.exceptions()

    def recorders(self) -> tuple[Recorder, ...]:
        """See :meth:`Transport.recorders`: of all that may carry a call."""
        return tuple(recorder for transport in self._transports for recorder in transport.recorders())

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """See :meth:`Transport.all_reduce`."""
        self._of_all_reduce(tensor).all_reduce(tensor)

    def all_reduce_result(self, tensor: torch.Tensor) -> torch.Tensor:
        """See :meth:`Transport.all_reduce_result`."""
        return self._of_all_reduce(tensor).all_reduce_result(tensor)

    def all_reduce_new(self, tensor: torch.Tensor) -> torch.Tensor:
        """See :meth:`Transport.all_reduce_new`."""
        return self._of_all_reduce(tensor).all_reduce_new(tensor)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """See :meth:`Transport.all_gather`."""
        self._of_all_gather(output).all_gather(output, tensor)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """See :meth:`Transport.reduce_scatter`."""
        self._of_reduce_scatter(tensor).reduce_scatter(output, tensor)

    def reduce(self, tensor: torch.Tensor, dst: int) -> None:
        """See :meth:`Transport.reduce`."""
        self._base.reduce(tensor, dst)

    def broadcast(self, tensor: torch.Tensor, src: int) -> Work | None:
        """See :meth:`Transport.broadcast`."""
        return self._base.broadcast(tensor, src)

    def gather(self, output: torch.Tensor | None, tensor: torch.Tensor, dst: int) -> None:
        """See :meth:`Transport.gather`."""
        self._base.gather(output, tensor, dst)

    def send(self, tensor: torch.Tensor, dst: int) -> Work:
        """See :meth:`Transport.send`."""
        return self._base.send(tensor, dst)

    def recv(self, tensor: torch.Tensor, src: int) -> Work:
        """See :meth:`Transport.recv`."""
        return self._base.recv(tensor, src)

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        for transport in self._transports:
            transport.close()


def settings_to_agree_on(settings: CommSettings) -> dict[str, str]:
    """What of the settings decides whether and how routes are made, for ``also_equal`` of :func:`agree`."""
    if settings.mode is CommMode.ALL:
        return {"comm.mode": "all"}
    routes = "; ".join(f"{order.op}={'|'.join(map(str, order.routes))}" for order in settings.routes)
    return {"comm.mode": "fastest", "comm.routes": routes or "none"}


def add_routes(
    context: GroupContext,
    agreed: Agreed,
    orders: Sequence[CommRouteOrder],
    backends: Mapping[str, Backend],
    policy: Policy,
    native: Transport | None = None,
    wrap: Callable[[Transport], Transport] | None = None,
) -> tuple[Agreed, tuple[str, ...]]:
    """``agreed`` with the routes by size put before its transport, and in words what each operation's routes are.

    All ranks of the group must call it, with equal ``orders`` (:func:`settings_to_agree_on`). A route whose backend
    some rank cannot use is left out on all ranks, with the reason among the words.

    Args:
        context: the group.
        agreed: what its ranks agreed on, with a transport.
        orders: the routes of ``comm.routes``.
        backends: those of this process.
        policy: its vendor rules hold for routes as well; strict: a route that is left out is an error.
        native: the caller's own methods as a transport; None where it has none.
        wrap: applied to each transport before it becomes a route.

    Raises:
        AgreementError: no rank has a route's backend, or a route cannot be used and the policy is strict.
    """
    assert agreed.transport is not None
    named = dict.fromkeys(route.backend for order in orders for route in order.routes)
    wanted = [name for name in named if name != agreed.backend.name]
    views = context.exchange(
        "announce routes", {name: _refusal(name, context, backends, policy, native) for name in wanted}
    )
    _require_known(context, wanted, views, backends)
    transports: dict[str, Transport] = {agreed.backend.name: agreed.transport}
    notes = []
    for name in wanted:
        reason = first_refusal(context, [view[name] for view in views])
        transport = None
        if reason is None:
            if name == NATIVE and native is not None:
                transport, reason = recorded(context, native), ""
            else:
                transport, reason = create_everywhere(context, backends[name])
        if transport is None:
            notes.append(f"route {name} left out: {reason}")
            continue
        transport.restrict_to_common(context, f"compare what {name} offers")
        transports[name] = transport
    notes += _idle(orders, transports)
    if notes and policy.strict:
        raise AgreementError(
            f"group {context.name}: {'; '.join(notes)}. Strict mode allows no route to be left out: mend what the "
            f"reason names, or change SGLANG_FL_COMM_ROUTES."
        )
    if wrap is not None:
        transports = {name: wrap(transport) for name, transport in transports.items()}
    base = transports[agreed.backend.name]
    tables = {Operation(order.op): _table(order, transports, base) for order in orders}
    others = [transport for transport in transports.values() if transport is not base]
    routed = SizedTransport(base, others, tables, _capture_probe(context.device))
    kept = [_describe(order, transports, agreed.backend.name) for order in orders]
    return replace(agreed, transport=routed), (*kept, *notes)


_UNKNOWN = "no such backend is installed"


def _refusal(
    name: str, context: GroupContext, backends: Mapping[str, Backend], policy: Policy, native: Transport | None
) -> str:
    if name == NATIVE:
        return "" if native is not None else "there are no methods of SGLang's own here"
    if name not in backends:
        return _UNKNOWN
    return local_refusal(context, backends[name], policy)


def _require_known(
    context: GroupContext, names: Sequence[str], views: Sequence[Mapping[str, str]], backends: Mapping[str, Backend]
) -> None:
    for name in names:
        if any(view[name] != _UNKNOWN for view in views):
            continue
        known = [*sorted(backends), NATIVE]
        suggestion = closest(name, known)
        meant = f" Did you mean {suggestion}?" if suggestion else ""
        raise AgreementError(
            f"group {context.name}: comm.routes names {name!r}, which no rank has; there are "
            f"{', '.join(known)}.{meant} Correct SGLANG_FL_COMM_ROUTES."
        )


def _idle(orders: Sequence[CommRouteOrder], transports: Mapping[str, Transport]) -> list[str]:
    """A note for each route whose transport cannot carry its operation on all ranks in any dtype."""
    notes = []
    for order in orders:
        for name in dict.fromkeys(route.backend for route in order.routes if route.backend in transports):
            capabilities = transports[name].capabilities
            if Operation(order.op) not in capabilities.operations or not _dtypes(capabilities, order.op):
                notes.append(f"route {name} of {order.op} left out: not every rank's {name} offers it")
    return notes


def _dtypes(capabilities: Capabilities, op: str) -> frozenset[torch.dtype]:
    return capabilities.reducible if Operation(op) in _REDUCTIONS else capabilities.movable


def _table(order: CommRouteOrder, transports: Mapping[str, Transport], base: Transport) -> Table:
    def entries(dtype: torch.dtype, forbidden: CaptureRule) -> Entries:
        found = []
        for route in order.routes:
            transport = transports.get(route.backend)
            if transport is None or route.when is forbidden or not _carries(transport, order.op, dtype):
                continue
            found.append((ANY_SIZE if route.max_bytes is None else route.max_bytes, transport))
        return (*found, (ANY_SIZE, base))

    dtypes = _dtypes(base.capabilities, order.op)
    eager = {dtype: entries(dtype, CaptureRule.GRAPH) for dtype in dtypes}
    graph = {dtype: entries(dtype, CaptureRule.EAGER) for dtype in dtypes}
    return Table(base, eager, graph)


def _carries(transport: Transport, op: str, dtype: torch.dtype) -> bool:
    capabilities = transport.capabilities
    return Operation(op) in capabilities.operations and dtype in _dtypes(capabilities, op)


def _describe(order: CommRouteOrder, transports: Mapping[str, Transport], base: str) -> str:
    kept = [
        str(route)
        for route in order.routes
        if route.backend in transports and Operation(order.op) in transports[route.backend].capabilities.operations
    ]
    return f"{order.op} by size: {'|'.join([*kept, f'else {base}'])}"


def _capture_probe(device: torch.device) -> Callable[[], bool]:
    if device.type == "cpu":
        return _never
    probe: Callable[[], bool] = getattr(torch.get_device_module(device), "is_current_stream_capturing", _never)
    return probe


def _never() -> bool:
    return False
