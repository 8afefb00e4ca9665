"""Mode fastest: per operation the route that carries a call of its dtype and size, built once, alike on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from sglang_fl.comm.agreement import Agreed, create_everywhere, first_refusal, local_refusal
from sglang_fl.comm.errors import AgreementError, CommError
from sglang_fl.comm.graph_mixing import refuses_windows
from sglang_fl.comm.recorded import recorded
from sglang_fl.comm.recorder import Recorder
from sglang_fl.comm.registered import CALL_OPTION, STAGING_OPTION, RegisteredMemory, Registrar
from sglang_fl.comm.route_table import NATIVE, Table, dtypes_of, orders_for, table_of
from sglang_fl.comm.types import Backend, Capabilities, GroupContext, Operation, Transport, Work
from sglang_fl.config import CommMode, CommRoute, CommRouteOrder, CommSettings, MemoryRule, closest
from sglang_fl.selection import Policy

if TYPE_CHECKING:
    from sglang_fl.comm.communicator import CommunicatorFL

logger = logging.getLogger(__name__)


class SizedTransport(Transport):
    """Hands each call to the transport that its dtype and size ask for; what has no routes goes to ``base``."""

    def __init__(
        self,
        base: Transport,
        others: Sequence[Transport],
        tables: Mapping[Operation, Table],
        is_capturing: Callable[[], bool],
        more: Routes | None = None,
    ) -> None:
        """``more``: makes the routes that only registered memory takes, once somebody wants some."""
        self.name = base.name
        self.memory: RegisteredMemory | None = None
        self._more = more
        self._is_capturing = is_capturing
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

    def with_memory(self) -> RegisteredMemory:
        """The group's registered memory, with the routes that it takes. All ranks must call it the first time.

        Raises:
            CommError: no transport makes any; AgreementError: as :func:`add_routes`.
        """
        if self.memory is None:
            if self._more is None:
                raise CommError(f"{self.name}: this transport is closed, or was made without routes")
            memory = self._more.make_memory()
            base, others, tables = self._more.parts()
            self._transports = (base, *others)
            self.extra_bytes = sum(transport.extra_bytes for transport in self._transports)
            if Operation.ALL_REDUCE in tables:
                self._of_all_reduce = tables[Operation.ALL_REDUCE].finder(self._is_capturing, memory)
            self.memory = memory
        return self.memory

    def registrars(self) -> list[Registrar]:
        """Those of all transports that are made."""
        return [] if self._more is None else self._more.registrars()

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
        self._more = None
        memory, self.memory = self.memory, None
        if memory is not None:
            memory.close()
        for transport in self._transports:
            transport.close()


# Of groups without routes; those with routes keep their own.
_memories: WeakKeyDictionary[CommunicatorFL, RegisteredMemory] = WeakKeyDictionary()
_destroyed: WeakKeyDictionary[CommunicatorFL, str] = WeakKeyDictionary()  # with what is said of it


def registered_memory(communicator: CommunicatorFL) -> RegisteredMemory:
    """The registered memory of a communicator: in mode fastest with the routes that it takes, else of its backend.

    All ranks of the group must call it, outside of a capture: the first time it makes the routes that only registered
    memory takes.

    Raises:
        CommError: neither the backend nor a route makes registered memory, or the group is destroyed.
        AgreementError: a rank did not arrive, or a route cannot be used and the policy is strict.
    """
    if communicator in _destroyed:
        raise CommError(_destroyed[communicator])
    transport = communicator.agreed.transport
    if isinstance(transport, SizedTransport):
        return transport.with_memory()
    memory = _memories.get(communicator)
    if memory is None:
        registrar = None if transport is None else transport.registrar
        if registrar is None or not registrar.makes_blocks:
            refusal = "" if registrar is None else refuses_windows(communicator.device.type)
            raise CommError(
                f"group {communicator.name}: {communicator.backend} makes no registered memory"
                f"{f', since {refusal}' if refusal else ''}. Choose FlagCX with "
                f"SGLANG_FL_DIST_BACKEND=flagcx, or set SGLANG_FL_COMM_MODE=fastest and a route that does, such as "
                f"SGLANG_FL_COMM_ROUTES='all_reduce=symm_two_shot@registered'."
            )
        memory = _memories[communicator] = RegisteredMemory(communicator.context, [registrar])
    return memory


def end_memory(communicator: CommunicatorFL) -> None:
    """Hand out no more registered memory of a communicator that is destroyed. Local; what was handed out stays.

    What its transport's end does not give up as well is the caller's as long as it likes: a graph may use it.
    """
    reason = f"group {communicator.name} is destroyed; make a new one"
    _destroyed[communicator] = reason
    transport = communicator.agreed.transport
    memory = transport.memory if isinstance(transport, SizedTransport) else _memories.get(communicator)
    if memory is not None:
        memory.refuse(reason)


def adopt_block(communicator: CommunicatorFL, address: int, size: int) -> list[str] | None:
    """Register memory that somebody else allocated, with every transport that can; why others of those cannot.

    All ranks of the group must call it, for memory that they allocated alike. It stays registered for the process's
    life. None where no transport of the group registers memory of others.

    Raises:
        CommError: it is registered on some ranks only; the group must not be used any more.
    """
    transport = communicator.agreed.transport
    if isinstance(transport, SizedTransport):
        registrars = transport.registrars()
    else:
        registrars = [] if transport is None or transport.registrar is None else [transport.registrar]
    able = [registrar for registrar in registrars if not registrar.needs_own_blocks]
    if not able:
        return None
    reasons = {registrar.name: registrar.adopt(address, size) for registrar in able}
    return [f"{name}: {reason}" for name, reason in reasons.items() if reason]


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
    some rank cannot use is left out on all ranks, with the reason among the words; one for groups of other numbers of
    ranks is neither made nor named.

    Args:
        context: the group.
        agreed: what its ranks agreed on, with a transport.
        orders: the routes of ``comm.routes``, for groups of every number of ranks.
        backends: those of this process.
        policy: its vendor rules hold for routes as well; strict: a route that is left out is an error.
        native: the caller's own methods as a transport; None where it has none.
        wrap: applied to each transport before it becomes a route.

    Raises:
        AgreementError: no rank has a route's backend, or a route cannot be used and the policy is strict.
    """
    assert agreed.transport is not None
    orders = orders_for(context.world_size, orders)
    routes = Routes(context, orders, backends, policy, native, wrap, agreed.backend.name)
    routes.put(agreed.backend.name, agreed.transport)
    now = [name for name in routes.named if _takes_ordinary(name, orders)]
    notes = routes.add(now, is_first=True)
    base, others, tables = routes.parts()
    routed = SizedTransport(base, others, tables, _capture_probe(context.device), routes)
    return replace(agreed, transport=routed), (*routes.in_words(), *notes)


@dataclass
class Routes:
    """How the routes of one group are made: those for ordinary memory at once, the others when they are wanted.

    The fields are the arguments of :func:`add_routes`, ``orders`` those for this number of ranks; ``base`` is the name
    of the group's backend.
    """

    context: GroupContext
    orders: Sequence[CommRouteOrder]
    backends: Mapping[str, Backend]
    policy: Policy
    native: Transport | None
    wrap: Callable[[Transport], Transport] | None
    base: str
    _carriers: dict[str, Transport] = field(default_factory=dict)
    _registrars: list[Registrar] = field(default_factory=list)

    @property
    def named(self) -> list[str]:
        """Every backend of the routes but the group's own."""
        names = dict.fromkeys(route.backend for order in self.orders for route in order.routes)
        return [name for name in names if name != self.base]

    def put(self, name: str, transport: Transport) -> None:
        """Let ``transport`` carry what its routes say."""
        if transport.registrar is not None:
            self._registrars.append(transport.registrar)
        self._carriers[name] = transport if self.wrap is None else self.wrap(transport)

    def add(self, names: Sequence[str], is_first: bool) -> list[str]:
        """Create the transports of ``names``; why some are left out. All ranks must call it.

        The first time it also looks whether the names of all routes are known.

        Raises:
            AgreementError: no rank has one of them, or one is left out and the policy is strict.
        """
        context = self.context
        asked = self.named if is_first else list(names)
        views = context.exchange("announce routes", {name: self._refusal(name) for name in asked})
        _require_known(context, asked, views, self.backends)
        notes = []
        for name in names:
            reason = first_refusal(context, [view[name] for view in views])
            transport = None
            if reason is None:
                if name == NATIVE and self.native is not None:
                    transport, reason = recorded(context, self.native), ""
                else:
                    with_limits = _with_limits(context, name, self.orders)
                    transport, reason = create_everywhere(with_limits, self.backends[name])
            if transport is None:
                notes.append(f"route {name} left out: {reason}")
                continue
            transport.restrict_to_common(context, f"compare what {name} offers")
            self.put(name, transport)
        added = {name: each for name, each in self._carriers.items() if is_first or name in names}
        notes += _idle(self.orders, added)
        if notes and self.policy.strict:
            raise AgreementError(
                f"group {context.name}: {'; '.join(notes)}. Strict mode allows no route to be left out: mend what the "
                f"reason names, or change SGLANG_FL_COMM_ROUTES."
            )
        return notes

    def make_memory(self) -> RegisteredMemory:
        """The group's registered memory, and the transports of the routes that only it takes. All ranks must call it.

        Raises:
            CommError: no transport makes any; with what was left out.
            AgreementError: as :meth:`add`.
        """
        self.context = replace(self.context, creation_ends_s=None).begun()
        later = [name for name in self.named if not _takes_ordinary(name, self.orders)]
        notes = self.add(later, is_first=False)
        registrars = self.registrars()
        if not any(registrar.makes_blocks for registrar in registrars):
            reasons = "".join(f"; {note}" for note in notes)
            raise CommError(
                f"group {self.context.name}: none of its routes makes registered memory{reasons}. Give it one that "
                f"does, such as SGLANG_FL_COMM_ROUTES='all_reduce=symm_two_shot@registered'."
            )
        if notes and self.context.rank == 0:
            logger.warning("group %s: %s", self.context.name, "; ".join(notes))
        return RegisteredMemory(self.context, registrars)

    def registrars(self) -> list[Registrar]:
        """First those that make the blocks for all, since they can take no others."""
        return sorted(self._registrars, key=lambda registrar: not registrar.needs_own_blocks)

    def parts(self) -> tuple[Transport, list[Transport], dict[Operation, Table]]:
        """The group's transport, the others, and the tables over all of them."""
        base = self._carriers[self.base]
        others = [transport for transport in self._carriers.values() if transport is not base]
        return base, others, {Operation(order.op): table_of(order, self._carriers, base) for order in self.orders}

    def in_words(self) -> list[str]:
        """What each operation's routes are, also those that are made later."""
        return [_describe(order, self._carriers, self.base) for order in self.orders]

    def _refusal(self, name: str) -> str:
        if name == NATIVE:
            return "" if self.native is not None else "there are no methods of SGLang's own here"
        if name not in self.backends:
            return _UNKNOWN
        return local_refusal(self.context, self.backends[name], self.policy)


_UNKNOWN = "no such backend is installed"


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
            if Operation(order.op) not in capabilities.operations or not dtypes_of(capabilities, order.op):
                notes.append(f"route {name} of {order.op} left out: not every rank's {name} offers it")
    return notes


def _with_limits(context: GroupContext, name: str, orders: Sequence[CommRouteOrder]) -> GroupContext:
    """The context for the backend of a route, told what its calls have at most, all and those on ordinary memory."""
    routes = _routes_of(name, orders)
    ordinary = [route for route in routes if route.memory is not MemoryRule.REGISTERED]
    options = dict(context.options)
    for option, asked in ((CALL_OPTION, routes), (STAGING_OPTION, ordinary)):
        limits = [route.max_bytes for route in asked]
        if None not in limits:
            options[option] = str(max((limit for limit in limits if limit is not None), default=0))
    return replace(context, options=options)


def _takes_ordinary(name: str, orders: Sequence[CommRouteOrder]) -> bool:
    return any(route.memory is not MemoryRule.REGISTERED for route in _routes_of(name, orders))


def _routes_of(name: str, orders: Sequence[CommRouteOrder]) -> list[CommRoute]:
    return [route for order in orders for route in order.routes if route.backend == name]


def _describe(order: CommRouteOrder, transports: Mapping[str, Transport], base: str) -> str:
    kept = [str(route) for route in order.routes if _is_kept(route, order.op, transports)]
    return f"{order.op} by size: {'|'.join([*kept, f'else {base}'])}"


def _is_kept(route: CommRoute, op: str, transports: Mapping[str, Transport]) -> bool:
    if route.backend not in transports:
        return route.memory is MemoryRule.REGISTERED
    return Operation(op) in transports[route.backend].capabilities.operations


def _capture_probe(device: torch.device) -> Callable[[], bool]:
    if device.type == "cpu":
        return _never
    probe: Callable[[], bool] = getattr(torch.get_device_module(device), "is_current_stream_capturing", _never)
    return probe


def _never() -> bool:
    return False
