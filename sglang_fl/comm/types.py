"""What the communicator and its backends share: operations, a group's description, the transport interface."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from sglang_fl.comm.errors import CommError
from sglang_fl.comm.exchange import Creation, Exchange
from sglang_fl.comm.limits import checked_limit
from sglang_fl.selection import Availability, Kind

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from sglang_fl.comm.recorder import Recorder
    from sglang_fl.comm.registered import Registrar

MEETING_S = 0.5  # for ranks that come out of one step of a creation at its limit, to find out who is missing


class Operation(str, Enum):
    """What a transport may be able to do; the names are the field's."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    REDUCE = "reduce"
    BROADCAST = "broadcast"
    GATHER = "gather"
    SEND = "send"
    RECV = "recv"


def _unwatched(recorder: Recorder) -> None:
    """Nobody watches."""


@dataclass(frozen=True)
class GroupContext:
    """One rank's view of a group, as handed to a backend.

    Attributes:
        name: SGLang's unique name of the group, or one given by the caller; equal on all ranks.
        ranks: global ranks in group order.
        rank: this process's rank within the group.
        device: where the group's tensors live.
        device_group: torch.distributed group for tensors on ``device``.
        cpu_group: gloo group of the same ranks.
        timeout_s: limit for creation with all its steps, and later for each pair of ranks that begins to transfer,
            seconds.
        options: settings that a backend may need, such as ``flagcx_path``.
        shares_communicator: False for a group that is used at the same time as another one of the same ranks.
        records: whether its transports record their calls.
        operation_timeout_s: limit for each call once the group is made, seconds.
        creation_ends_s: when the creation under way must be done, as of ``time.monotonic()``; None outside of one.
        watch: called with each recorder before its first call, also with those that come with a first transfer.
        creation: the one under way, or by which the group was made; None for a group that is only described.

    Raises:
        ValueError: a limit is no number of seconds from a millisecond to a year.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    device: torch.device
    device_group: ProcessGroup
    cpu_group: ProcessGroup
    timeout_s: float = 120.0
    options: dict[str, str] = field(default_factory=dict)
    shares_communicator: bool = True
    records: bool = True
    operation_timeout_s: float = 600.0
    creation_ends_s: float | None = None
    watch: Callable[[Recorder], None] = field(default=_unwatched, compare=False)
    creation: Creation | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in ("timeout_s", "operation_timeout_s"):
            checked_limit(name, getattr(self, name))

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)

    def begun(self) -> GroupContext:
        """The same group at the beginning of its creation, from which ``timeout_s`` counts; as it is if begun."""
        if self.creation_ends_s is not None:
            return self
        creation = self.creation or Creation(self.name, self.ranks)
        return replace(self, creation_ends_s=time.monotonic() + self.timeout_s, creation=creation)

    def left_s(self) -> float:
        """What is left for the next step of the creation under way, seconds; always a moment, outside all of it."""
        if self.creation_ends_s is None:
            return self.timeout_s
        return max(MEETING_S, self.creation_ends_s - time.monotonic())

    def library_s(self) -> float:
        """As :meth:`left_s`, for a step of a library alone: leaves the ranks a moment to find out who was missing."""
        left_s = self.left_s()
        return max(left_s / 2, left_s - MEETING_S)

    def exchange(self, stage: str, value: Any) -> list[Any]:
        """Every rank's ``value`` in group order. All ranks of the group must call it.

        Raises:
            AgreementError: a rank did not arrive within what is left of the creation, its process has ended or it has
                left the creation with an error; names group, stage and that rank.
        """
        exchange = Exchange(self.name, self.ranks, self.rank, stage, self.left_s(), self.timeout_s, self.creation)
        return exchange.run(value)


@dataclass(frozen=True)
class Capabilities:
    """What a transport can do, as data.

    Attributes:
        operations: those it offers.
        reducible: dtypes that it can reduce.
        movable: dtypes that it moves as they are; others travel as bytes.
        device_types: ``torch.device`` types whose memory it takes.
    """

    operations: frozenset[Operation]
    reducible: frozenset[torch.dtype]
    movable: frozenset[torch.dtype]
    device_types: frozenset[str]


class Work(Protocol):
    """A transfer under way, as torch.distributed's ``Work``."""

    def wait(self) -> Any:
        """Block until the transfer is done."""

    def is_completed(self) -> bool:
        """Whether it is done."""


class Transport(ABC):
    """One backend, created for one group. All tensors are contiguous and on the group's device.

    ``src``, ``dst`` and ``peer`` are ranks within the group. Every rank of the group must call each collective.
    """

    name: str
    capabilities: Capabilities
    # Memory that creating it took where the group's tensors live, bytes; set by who created it.
    extra_bytes: int = 0
    # What makes memory registered for it; None where it knows of none.
    registrar: Registrar | None = None

    def restrict(self, operations: frozenset[Operation]) -> None:
        """Offer no more than ``operations``: what a peer lacks cannot be used here either."""
        self.capabilities = replace(self.capabilities, operations=self.capabilities.operations & operations)

    def restrict_to_common(self, context: GroupContext, stage: str) -> None:
        """Offer what every rank's transport offers, operations and dtypes. All ranks of the group must call it.

        Raises:
            AgreementError: a rank did not arrive.
        """
        own = self.capabilities
        views = context.exchange(stage, (own.operations, own.reducible, own.movable))
        operations, reducible, movable = (frozenset.intersection(*parts) for parts in zip(*views, strict=True))
        self.capabilities = replace(own, operations=operations, reducible=reducible, movable=movable)

    def exceptions(self) -> dict[str, str]:
        """Operation to the name of what carries it, where that is another transport."""
        return {}

    def recorders(self) -> tuple[Recorder, ...]:
        """What records its calls; more may come with the first transfer between two ranks."""
        return ()

    def transfer_stream(self, operation: Operation, peer: int) -> int | None:
        """Raw handle of the stream that is behind each such transfer with ``peer``; None where the caller's will be."""
        return None

    def interrupt(self) -> bool:
        """Make a call that another thread waits in end with a CommError soon; False if that cannot be done. Local."""
        return False

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum ``tensor`` over the ranks, in place."""

    def all_reduce_result(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in ``tensor`` or in a new one; ``tensor`` is given up."""
        self.all_reduce(tensor)
        return tensor

    def all_reduce_new(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks in a new tensor; ``tensor`` stays as it is."""
        return self.all_reduce_result(tensor.clone())

    @abstractmethod
    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """``output`` (world_size * numel elements) receives every rank's ``tensor`` in rank order."""

    @abstractmethod
    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """``output`` receives this rank's share of the sum of ``tensor`` (world_size * numel elements)."""

    @abstractmethod
    def reduce(self, tensor: torch.Tensor, dst: int) -> None:
        """On rank ``dst``, ``tensor`` receives the sum over the ranks; elsewhere its content is lost."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, src: int) -> Work | None:
        """``tensor`` receives rank ``src``'s; a returned work must be waited on before it is used."""

    @abstractmethod
    def gather(self, output: torch.Tensor | None, tensor: torch.Tensor, dst: int) -> None:
        """On rank ``dst``, ``output`` receives every rank's ``tensor`` in rank order; elsewhere it is None."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, dst: int) -> Work:
        """Start to send; ``tensor`` must stay alive and unchanged until the work is done."""

    @abstractmethod
    def recv(self, tensor: torch.Tensor, src: int) -> Work:
        """Start to receive into ``tensor``."""

    @abstractmethod
    def close(self) -> None:
        """Give up what was created for the group. Local, idempotent."""


class _EveryDtype(frozenset[Any]):
    def __contains__(self, dtype: object) -> bool:
        return True


class ClosedTransport(Transport):
    """What a destroyed group has: every call is an error."""

    def __init__(self, group: str, was: Transport) -> None:
        """``was``: what the group had; reports still tell of it."""
        every = _EveryDtype()
        self.name = was.name
        self.capabilities = Capabilities(frozenset(Operation), every, every, frozenset())
        self.extra_bytes = was.extra_bytes
        self._group = group
        self._exceptions = was.exceptions()

    def exceptions(self) -> dict[str, str]:
        """As they were."""
        return self._exceptions

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise CommError(f"group {self._group} is destroyed; make a new one")

    all_reduce = all_reduce_result = all_reduce_new = all_gather = reduce_scatter = _refuse
    reduce = broadcast = gather = send = recv = _refuse

    def close(self) -> None:
        """Nothing is left to give up."""


class Backend(ABC):
    """A way to carry collectives; stateless, one object a process.

    Attributes:
        name: unique; in reports.
        kind: which of the three.
        vendor: of kind VENDOR, the canonical name in lower case; in allow, deny and per-operator settings.
        is_native: a caller whose own methods run on the same library, as SGLang's on NCCL, may keep those instead.
        is_route_only: it carries a few operations and is named in routes; a kind in an order does not stand for it.
    """

    name: str
    kind: Kind
    vendor: str = ""
    is_native: bool = False
    is_route_only: bool = False

    @abstractmethod
    def probe(self, context: GroupContext) -> Availability:
        """Whether this rank could create a transport for the group; local, without side effects."""

    @abstractmethod
    def create(self, context: GroupContext) -> Transport:
        """Create the group's transport; all ranks of the group call it together.

        Raises:
            CommError: with the stage that failed.
        """


class BackendRegistry:
    """Where ``register_comm(registry)`` of a backend's folder or distribution puts its backends."""

    def __init__(self) -> None:
        self.backends: dict[str, Backend] = {}
        self.failures: dict[str, str] = {}

    def register(self, backend: Backend) -> None:
        """Add ``backend``; a second one of the same name is an error of the one that comes later."""
        if backend.name in self.backends:
            raise ValueError(f"a communication backend named {backend.name!r} is already registered")
        self.backends[backend.name] = backend


RegisterFunction = Callable[[BackendRegistry], None]
Sizes = Sequence[int]
