"""torch.distributed (gloo) behind the binding's methods: what the matrix expects must be what it gives."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from sglang_fl.comm.backends.flagcx import DataType, ReduceOp
from sglang_fl.testing.ranks import RankContext

from .data import ELEMENT_TYPES, ElementType

_TORCH_OPS = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.PROD: dist.ReduceOp.PRODUCT,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.AVG: dist.ReduceOp.AVG,
}
_ELEMENTS = {element.data_type: element for element in ELEMENT_TYPES}


def is_supported(element: ElementType, op: ReduceOp | None, world_size: int) -> bool:
    """Whether gloo reduces this dtype, and to the same bits.

    It knows neither uint32 nor uint64 nor averages of integers, and it rounds the half types at every step.
    """
    if op is None:
        return True
    if element.data_type in {DataType.UINT32, DataType.UINT64}:
        return False
    if not element.is_float:
        return op is not ReduceOp.AVG
    rounds_once = element.size > 2 or world_size == 2
    return rounds_once or op not in {ReduceOp.SUM, ReduceOp.AVG}


def _tensor(address: int, count: int, data_type: int) -> torch.Tensor:
    element = _ELEMENTS[DataType(data_type)]
    if not count or not address:
        return torch.empty(0, dtype=element.torch_dtype)
    memory = (ctypes.c_uint8 * (count * element.size)).from_address(address)
    return torch.frombuffer(memory, dtype=element.torch_dtype)


def _bytes(address: int, count: int, data_type: int) -> torch.Tensor:
    return _tensor(address, count * _ELEMENTS[DataType(data_type)].size, DataType.UINT8)


class TorchCommunicator:
    """The default process group with the methods of FlagCXCommunicator, over addresses in host memory."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._pending: list[dist.Work] = []

    def all_reduce(self, send: int, receive: int, count: int, dtype: int, op: ReduceOp, stream: int) -> None:
        result = _tensor(receive, count, dtype).copy_(_tensor(send, count, dtype))
        dist.all_reduce(result, _TORCH_OPS[op])

    def reduce(self, send: int, receive: int, count: int, dtype: int, op: ReduceOp, root: int, stream: int) -> None:
        result = _tensor(send, count, dtype).clone()  # gloo leaves partial results on the other ranks
        dist.reduce(result, root, _TORCH_OPS[op])
        if self.rank == root:
            _tensor(receive, count, dtype).copy_(result)

    def reduce_scatter(self, send: int, receive: int, count: int, dtype: int, op: ReduceOp, stream: int) -> None:
        result = torch.empty_like(_tensor(receive, count, dtype))
        dist.reduce_scatter_tensor(result, _tensor(send, count * self.world_size, dtype), _TORCH_OPS[op])
        _tensor(receive, count, dtype).copy_(result)

    def all_gather(self, send: int, receive: int, count: int, dtype: int, stream: int) -> None:
        dist.all_gather_into_tensor(_bytes(receive, count * self.world_size, dtype), _bytes(send, count, dtype).clone())

    def broadcast(self, send: int, receive: int, count: int, dtype: int, root: int, stream: int) -> None:
        result = _bytes(receive, count, dtype)
        if self.rank == root:
            result.copy_(_bytes(send, count, dtype))
        dist.broadcast(result, root)

    def gather(self, send: int, receive: int, count: int, dtype: int, root: int, stream: int) -> None:
        blocks = None
        if self.rank == root:
            blocks = list(_bytes(receive, count * self.world_size, dtype).chunk(self.world_size))
        dist.gather(_bytes(send, count, dtype).clone(), blocks, root)

    def scatter(self, send: int, receive: int, count: int, dtype: int, root: int, stream: int) -> None:
        blocks = None
        if self.rank == root:
            blocks = list(_bytes(send, count * self.world_size, dtype).clone().chunk(self.world_size))
        dist.scatter(_bytes(receive, count, dtype), blocks, root)

    def all_to_all(self, send: int, receive: int, count: int, dtype: int, stream: int) -> None:
        total = count * self.world_size
        dist.all_to_all_single(_bytes(receive, total, dtype), _bytes(send, total, dtype))

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        yield
        for work in self._pending:
            work.wait()
        self._pending.clear()

    def send(self, buffer: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self._pending.append(dist.isend(_bytes(buffer, count, dtype), peer))

    def recv(self, buffer: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self._pending.append(dist.irecv(_bytes(buffer, count, dtype), peer))


@dataclass
class TorchSession:
    """Stands where a :class:`Session` of a library stands."""

    context: RankContext
    stream: int = 0

    def __post_init__(self) -> None:
        self.rank = self.context.rank
        self.world_size = self.context.world_size
        self.next_rank = (self.rank + 1) % self.world_size
        self.previous_rank = (self.rank - 1) % self.world_size
        self.device = torch.device("cpu")
        self.communicator = TorchCommunicator()

    def synchronize(self) -> None:
        """Everything here has been waited for."""
