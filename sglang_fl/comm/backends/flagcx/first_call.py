"""The first transfer between two ranks while one waits for the other: recorded, so that it is bounded and named.

Their communicators record their own calls, but do not exist before both ranks are there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_fl.comm.errors import CommError
from sglang_fl.comm.places import Place
from sglang_fl.comm.ring import CallRing
from sglang_fl.comm.types import GroupContext, Operation


class FirstCall:
    """One call, in a ring of its own.

    Attributes:
        limit_s: how long the peer is waited for, seconds.
        recorder: the ring; None where the group is not recorded.
    """

    def __init__(
        self, backend: str, context: GroupContext, operation: Operation, tensor: torch.Tensor, peer: int, place: Place
    ) -> None:
        """``tensor`` is sent to, or received from, ``peer``, a rank within the group; ``place``: the caller's."""
        self.limit_s = min(context.timeout_s, context.operation_timeout_s)
        self.recorder: CallRing | None = None
        self._shape = tensor.shape
        self._give_up: Callable[[CommError], None] | None = None
        if not context.records:
            return
        ranks = (context.ranks[context.rank], context.ranks[peer])
        source, destination = ranks if operation is Operation.SEND else reversed(ranks)
        # A host waits in it, wherever the tensors are.
        name = f"{context.name} {backend} {source}>{destination} first transfer"
        self.recorder = CallRing(name, (source, destination), torch.device("cpu"), interrupt=self._interrupt)
        self.recorder.limit_s = self.limit_s
        self._row = self.recorder.enter(operation.value, tensor.dtype, tensor.numel(), peer, place=place)

    def on_interrupt(self, give_up: Callable[[CommError], None]) -> None:
        """``give_up``, called from another thread once it is known that the peer will not come, ends the waiting."""
        self._give_up = give_up

    def _interrupt(self) -> bool:
        if self._give_up is None:
            return False
        self._give_up(self.failed(CommError("the wait for the first transfer was interrupted")))
        return True

    def met(self) -> None:
        """The peer is there."""
        if self.recorder is not None:
            self.recorder.leave(self._row)

    def failed(self, error: CommError) -> CommError:
        """What is to be raised for ``error``: CollectiveTimeout or PeerLost with the call and what became of the peer.

        ``error`` itself where the group is not recorded.
        """
        if self.recorder is None:
            return error
        told = self.recorder.failed(self._row, error, self._shape)
        return told if isinstance(told, CommError) else error
