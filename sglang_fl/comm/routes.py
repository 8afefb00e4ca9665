"""Which transport carries which operation: the agreed one where it can, the reference elsewhere, alike on all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_fl.comm.recorder import Recorder
from sglang_fl.comm.types import Capabilities, GroupContext, Operation, Transport, Work


class RoutedTransport(Transport):
    """Each operation bound, once, to the transport that carries it; looking a route up costs nothing."""

    def __init__(self, primary: Transport, fallback: Transport) -> None:
        """``fallback`` carries what ``primary`` does not offer."""
        self.name = primary.name
        self._transports = (primary, fallback)
        self.extra_bytes = primary.extra_bytes
        self.registrar = primary.registrar
        offered = primary.capabilities.operations
        self.carriers = {op: (primary if op in offered else fallback) for op in Operation}
        self.capabilities = Capabilities(
            operations=offered | fallback.capabilities.operations,
            reducible=primary.capabilities.reducible,
            movable=primary.capabilities.movable & fallback.capabilities.movable,
            device_types=primary.capabilities.device_types,
        )
        for operation, carrier in self.carriers.items():
            setattr(self, operation.value, getattr(carrier, operation.value))

    def exceptions(self) -> dict[str, str]:
        """Operation to the name of its carrier, for those that another transport than the agreed one carries."""
        return {op.value: carrier.name for op, carrier in self.carriers.items() if carrier.name != self.name}

    def recorders(self) -> tuple[Recorder, ...]:
        """See :meth:`Transport.recorders`: of both."""
        return tuple(recorder for transport in self._transports for recorder in transport.recorders())

    # Bound in __init__ to the carrier's own methods; these only give the class its interface.

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """See :meth:`Transport.all_reduce`."""
        self.carriers[Operation.ALL_REDUCE].all_reduce(tensor)

    def all_reduce_result(self, tensor: torch.Tensor) -> torch.Tensor:
        """See :meth:`Transport.all_reduce_result`."""
        return self.carriers[Operation.ALL_REDUCE].all_reduce_result(tensor)

    def all_reduce_new(self, tensor: torch.Tensor) -> torch.Tensor:
        """See :meth:`Transport.all_reduce_new`."""
        return self.carriers[Operation.ALL_REDUCE].all_reduce_new(tensor)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """See :meth:`Transport.all_gather`."""
        self.carriers[Operation.ALL_GATHER].all_gather(output, tensor)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """See :meth:`Transport.reduce_scatter`."""
        self.carriers[Operation.REDUCE_SCATTER].reduce_scatter(output, tensor)

    def reduce(self, tensor: torch.Tensor, dst: int) -> None:
        """See :meth:`Transport.reduce`."""
        self.carriers[Operation.REDUCE].reduce(tensor, dst)

    def broadcast(self, tensor: torch.Tensor, src: int) -> Work | None:
        """See :meth:`Transport.broadcast`."""
        return self.carriers[Operation.BROADCAST].broadcast(tensor, src)

    def gather(self, output: torch.Tensor | None, tensor: torch.Tensor, dst: int) -> None:
        """See :meth:`Transport.gather`."""
        self.carriers[Operation.GATHER].gather(output, tensor, dst)

    def send(self, tensor: torch.Tensor, dst: int) -> Work:
        """See :meth:`Transport.send`."""
        return self.carriers[Operation.SEND].send(tensor, dst)

    def recv(self, tensor: torch.Tensor, src: int) -> Work:
        """See :meth:`Transport.recv`."""
        return self.carriers[Operation.RECV].recv(tensor, src)

    def close(self) -> None:
        """Close both."""
        for transport in self._transports:
            transport.close()


def routed(context: GroupContext, primary: Transport, fallback: Callable[[], Transport]) -> Transport:
    """``primary`` alone where it offers everything, else with what ``fallback`` creates for the rest.

    All ranks must call it; they create the fallback together or not at all.

    Raises:
        AgreementError: a rank did not arrive.
    """
    primary.restrict_to_common(context, "compare routes")
    if primary.capabilities.operations == frozenset(Operation):
        return primary
    return RoutedTransport(primary, fallback())
