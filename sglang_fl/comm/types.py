"""What the communicator and its backends share: operations, a group's description, the transport interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from sglang_fl.selection import Availability, Kind

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


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
        timeout_s: limit for each step of creation, seconds.
        options: settings that a backend may need, such as ``flagcx_path``.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    device: torch.device
    device_group: ProcessGroup
    cpu_group: ProcessGroup
    timeout_s: float = 120.0
    options: dict[str, str] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)


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

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum ``tensor`` over the ranks, in place."""

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
    def gather(self, outputs: list[torch.Tensor] | None, tensor: torch.Tensor, dst: int) -> None:
        """On rank ``dst``, ``outputs[r]`` receives rank r's ``tensor``; elsewhere ``outputs`` is None."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, dst: int) -> Work:
        """Start to send; ``tensor`` must stay alive and unchanged until the work is done."""

    @abstractmethod
    def recv(self, tensor: torch.Tensor, src: int) -> Work:
        """Start to receive into ``tensor``."""

    @abstractmethod
    def close(self) -> None:
        """Give up what was created for the group. Local, idempotent."""


class Backend(ABC):
    """A way to carry collectives; stateless, one object a process."""

    name: str
    kind: Kind
    vendor: str = ""

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
