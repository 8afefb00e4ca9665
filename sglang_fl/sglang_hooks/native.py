"""SGLang's own methods of a group as a transport: the route ``native`` of mode fastest."""

from __future__ import annotations

from collections.abc import Iterable
from threading import get_ident
from typing import Any

import torch

from sglang_fl.comm.route_table import NATIVE
from sglang_fl.comm.types import Capabilities, Operation, Transport, Work
from sglang_fl.sglang_hooks.registration import Hook, beneath

# What SGLang's custom all_reduce kernels and its NCCL wrapper both take; they check no dtype themselves.
DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})
METHODS = ("all_reduce", "_all_gather_into_tensor", "_reduce_scatter_tensor")


class NativeTransport(Transport):
    """Calls what lies beneath our hooks on one of SGLang's coordinators.

    SGLang's all_reduce calls other methods of the coordinator that are hooked; in a thread that is inside it, those
    hooks step aside (:func:`steps_aside`).
    """

    def __init__(self, coordinator: Any, hooks: Iterable[Hook]) -> None:
        self.name = NATIVE
        self.capabilities = Capabilities(
            operations=frozenset({Operation.ALL_REDUCE, Operation.ALL_GATHER, Operation.REDUCE_SCATTER}),
            reducible=DTYPES,
            movable=DTYPES,
            device_types=frozenset({torch.device(coordinator.device).type}),
        )
        self._coordinator = coordinator
        by_method = {hook.target.rpartition(".")[2]: hook for hook in hooks}
        originals = {method: beneath(by_method[method]) for method in METHODS}
        self._all_reduce = originals["all_reduce"]
        self._all_gather = originals["_all_gather_into_tensor"]
        self._reduce_scatter = originals["_reduce_scatter_tensor"]
        self._inside: set[int] = coordinator.fl_native_threads

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """See :meth:`Transport.all_reduce`.

        Through SGLang's all_reduce, whose result is right for each of the ways that it chooses from; its
        ``_all_reduce_in_place`` drops that of torch's symmetric memory.
        """
        result = self.all_reduce_result(tensor)
        if result is not tensor:
            tensor.copy_(result)

    def all_reduce_result(self, tensor: torch.Tensor) -> torch.Tensor:
        """See :meth:`Transport.all_reduce_result`: by SGLang's choice in place or in a new tensor."""
        thread = get_ident()
        self._inside.add(thread)
        try:
            result: torch.Tensor = self._all_reduce(self._coordinator, tensor)
        finally:
            self._inside.discard(thread)
        return result

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """See :meth:`Transport.all_gather`."""
        self._all_gather(self._coordinator, output, tensor)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """See :meth:`Transport.reduce_scatter`."""
        self._reduce_scatter(self._coordinator, output, tensor)

    def reduce(self, tensor: torch.Tensor, dst: int) -> None:
        """Not offered."""
        raise NotImplementedError

    def broadcast(self, tensor: torch.Tensor, src: int) -> Work | None:
        """Not offered."""
        raise NotImplementedError

    def gather(self, output: torch.Tensor | None, tensor: torch.Tensor, dst: int) -> None:
        """Not offered."""
        raise NotImplementedError

    def send(self, tensor: torch.Tensor, dst: int) -> Work:
        """Not offered."""
        raise NotImplementedError

    def recv(self, tensor: torch.Tensor, src: int) -> Work:
        """Not offered."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing: the methods are SGLang's."""
