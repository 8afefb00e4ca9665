"""Every method of CommunicatorFL as a call with drawn arguments and an answer computed without communication."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from sglang_fl.comm.communicator import CommunicatorFL
from tests.distributed.matrix import SUMMED, Layout, Shape, blank, place, same, summed, surroundings_intact
from tests.distributed.random_data import Data, Drawn, draw

_SURROUNDINGS_LIMIT_BYTES = 64 * 1024  # beyond it the check costs more than it finds


@dataclass
class Call:
    """One call: ``rng`` draws the same on every rank, ``data`` has every rank's values."""

    communicator: CommunicatorFL
    rng: random.Random
    data: Data
    number: int

    @property
    def rank(self) -> int:
        """This rank within the group."""
        return self.communicator.rank_in_group

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return self.communicator.world_size

    def draw(self, parts: int = 1) -> Drawn:
        """dtype, layout and the shape of one part."""
        return draw(self.rng, parts)

    def bits(self, drawn: Drawn, rank: int, shape: Shape | None = None, part: int = 0) -> torch.Tensor:
        """What ``rank`` has for a call that only moves data."""
        return self.data.bits(drawn.shape if shape is None else shape, drawn.dtype, self._key(rank, part))

    def summands(self, drawn: Drawn, rank: int, shape: Shape | None = None, part: int = 0) -> torch.Tensor:
        """What ``rank`` has for a call that adds up, as int16."""
        return self.data.summands(drawn.shape if shape is None else shape, self._key(rank, part))

    def _key(self, rank: int, part: int) -> int:
        return (self.number * 8 + part) * 64 + self.communicator.ranks[rank]

    def split(self, rows: int) -> list[int]:
        """``rows`` divided among the ranks by chance, often with nothing for one of them."""
        cuts = sorted(self.rng.randint(0, rows) for _ in range(self.size - 1))
        return [end - start for start, end in zip([0, *cuts], [*cuts, rows], strict=True)]

    @contextmanager
    def reducing(self, drawn: Drawn) -> Iterator[None]:
        """A body that reduces: with a dtype without a sum it must raise TypeError, with any other it must not."""
        if drawn.dtype in SUMMED[self.communicator.backend]:
            yield
            return
        try:
            yield
        except TypeError as error:
            assert "has no sum for" in str(error) and str(drawn.dtype) in str(error), error
            return
        raise AssertionError(f"{drawn}: no TypeError")


def _written(output: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    same(output, expected, what)
    if expected.numel() * expected.element_size() <= _SURROUNDINGS_LIMIT_BYTES:
        surroundings_intact(output, what)


def _reduces_in_place(call: Call, method: Callable[[torch.Tensor], torch.Tensor]) -> None:
    drawn = call.draw()
    parts = [call.summands(drawn, rank) for rank in range(call.size)]
    tensor = place(parts[call.rank].to(drawn.dtype), drawn.layout)
    with call.reducing(drawn):
        assert method(tensor) is tensor
        _written(tensor, summed(parts, drawn.dtype), drawn)


def _all_reduce(call: Call) -> None:
    _reduces_in_place(call, call.communicator.all_reduce)


def _all_reduce_in_place(call: Call) -> None:
    _reduces_in_place(call, call.communicator.all_reduce_in_place)


def _all_reduce_new(call: Call) -> None:
    drawn = call.draw()
    parts = [call.summands(drawn, rank) for rank in range(call.size)]
    tensor = place(parts[call.rank].to(drawn.dtype), drawn.layout)
    with call.reducing(drawn):
        result = call.communicator.all_reduce_new(tensor)
        assert result is not tensor and result.is_contiguous()
        same(result, summed(parts, drawn.dtype), drawn)
        _written(tensor, parts[call.rank].to(drawn.dtype), drawn)


def _quant_all_reduce(call: Call) -> None:
    _reduces_in_place(call, call.communicator.quant_all_reduce)


def _fused_allreduce_rmsnorm(call: Call) -> None:
    tensor = torch.ones(2, 8)
    assert call.communicator.fused_allreduce_rmsnorm(tensor, tensor, tensor[0], 1e-6) is None


def _all_gather(call: Call) -> None:
    drawn = call.draw(call.size)
    parts = [call.bits(drawn, rank) for rank in range(call.size)]
    dim = call.rng.randrange(-len(drawn.shape), len(drawn.shape))
    gathered = call.communicator.all_gather(place(parts[call.rank], drawn.layout), dim=dim)
    same(gathered, torch.cat(parts, dim), f"{drawn} dim {dim}")


def _all_gather_list(call: Call) -> None:
    drawn = call.draw(call.size)
    parts = [call.bits(drawn, rank) for rank in range(call.size)]
    outputs = [blank(drawn.shape, drawn.dtype, call.rng.choice(list(Layout))) for _ in parts]
    returned = call.communicator.all_gather(place(parts[call.rank], drawn.layout), output_tensor_list=outputs)
    assert returned is None
    for output, part in zip(outputs, parts, strict=True):
        _written(output, part, drawn)


def _all_gather_into_tensor(call: Call) -> None:
    drawn = call.draw(call.size)
    stacked = torch.stack([call.bits(drawn, rank) for rank in range(call.size)])
    output = blank((call.size, *drawn.shape), drawn.dtype, call.rng.choice(list(Layout)))
    tensor = place(stacked[call.rank], drawn.layout)
    if call.rng.random() < 0.25:  # in place
        tensor = output[call.rank].copy_(tensor)
    assert call.communicator.all_gather_into_tensor(output, tensor) is output
    _written(output, stacked, drawn)


def _cp_all_gather_into_tensor_async(call: Call) -> None:
    drawn = call.draw(call.size)
    stacked = torch.stack([call.bits(drawn, rank) for rank in range(call.size)])
    output = blank((call.size, *drawn.shape), drawn.dtype, call.rng.choice(list(Layout)))
    call.communicator.cp_all_gather_into_tensor_async(output, place(stacked[call.rank], drawn.layout), None)
    _written(output, stacked, drawn)


def _gather_rows(call: Call, inputs: int) -> None:
    drawn = call.draw(inputs)
    even = call.rng.random() < 0.25
    sizes = [drawn.shape[0]] * call.size if even else call.split(drawn.shape[0])
    parts = [
        [call.bits(drawn, rank, (rows, *drawn.shape[1:]), number) for rank, rows in enumerate(sizes)]
        for number in range(inputs)
    ]
    tensors = [place(part[call.rank], drawn.layout) for part in parts]
    given: Any = tensors if inputs > 1 else tensors[0]
    gathered = call.communicator.all_gatherv(given, None if even else sizes)
    assert isinstance(gathered, list) and len(gathered) == inputs
    for result, part in zip(gathered, parts, strict=True):
        same(result, torch.cat(part), f"{drawn} rows {sizes}")


def _all_gatherv(call: Call) -> None:
    _gather_rows(call, 1)


def _all_gatherv_list(call: Call) -> None:
    _gather_rows(call, call.rng.randint(2, 3))


def _reduce_scatter(call: Call) -> None:
    drawn = call.draw(call.size)
    rows = call.split(drawn.shape[0] * call.size) if call.rng.random() < 0.5 else [drawn.shape[0]] * call.size
    shapes: list[Shape] = [(count, *drawn.shape[1:]) for count in rows]
    numbers = [
        [call.summands(drawn, rank, shape, part) for part, shape in enumerate(shapes)] for rank in range(call.size)
    ]
    inputs = [place(part.to(drawn.dtype), drawn.layout) for part in numbers[call.rank]]
    output = blank(shapes[call.rank], drawn.dtype, call.rng.choice(list(Layout)))
    with call.reducing(drawn):
        assert call.communicator.reduce_scatter(output, inputs) is output
        _written(output, summed([row[call.rank] for row in numbers], drawn.dtype), drawn)


def _reduce_scatter_tensor(call: Call) -> None:
    drawn = call.draw(call.size)
    numbers = [call.summands(drawn, rank, (call.size, *drawn.shape)) for rank in range(call.size)]
    tensor = place(numbers[call.rank].to(drawn.dtype), drawn.layout)
    output = blank(drawn.shape, drawn.dtype, call.rng.choice(list(Layout)))
    if call.rng.random() < 0.25:  # in place
        output = tensor[call.rank]
    with call.reducing(drawn):
        assert call.communicator.reduce_scatter_tensor(output, tensor) is output
        same(output, summed([row[call.rank] for row in numbers], drawn.dtype), drawn)


def _reduce_scatterv(call: Call) -> None:
    drawn = call.draw()
    even = call.rng.random() < 0.25
    rows = drawn.shape[0] // call.size * call.size if even else drawn.shape[0]
    sizes = [rows // call.size] * call.size if even else call.split(rows)
    numbers = [call.summands(drawn, rank, (rows, *drawn.shape[1:])) for rank in range(call.size)]
    tensor = place(numbers[call.rank].to(drawn.dtype), drawn.layout)
    shape = (sizes[call.rank], *drawn.shape[1:])
    output = blank(shape, drawn.dtype, drawn.layout) if call.rng.random() < 0.5 else None
    start = sum(sizes[: call.rank])
    with call.reducing(drawn):
        result = call.communicator.reduce_scatterv(tensor, output, None if even else sizes)
        assert output is None or result is output
        same(result, summed(numbers, drawn.dtype)[start : start + sizes[call.rank]], f"{drawn} rows {sizes}")


def _gather(call: Call) -> None:
    drawn = call.draw(call.size)
    parts = [call.bits(drawn, rank) for rank in range(call.size)]
    dim = call.rng.randrange(-len(drawn.shape), len(drawn.shape))
    dst = call.rng.randrange(call.size)
    gathered = call.communicator.gather(place(parts[call.rank], drawn.layout), dst, dim)
    if call.rank == dst:
        same(gathered, torch.cat(parts, dim), f"{drawn} dim {dim}")
    else:
        assert gathered is None


def _broadcast(call: Call) -> None:
    drawn, src = call.draw(), call.rng.randrange(call.size)
    tensor = place(call.bits(drawn, call.rank), drawn.layout)
    assert call.communicator.broadcast(tensor, src) is tensor
    _written(tensor, call.bits(drawn, src), f"{drawn} from {src}")


def _objects(call: Call, rank: int) -> list[Any]:
    return [call.number, {"rank": rank, "text": "x" * (call.number % 700)}, None]


def _broadcast_object_list(call: Call) -> None:
    src = call.rng.randrange(call.size)
    objects = _objects(call, call.rank)
    assert call.communicator.broadcast_object_list(objects, src) is objects
    assert objects == _objects(call, src)


def _peers(call: Call) -> tuple[int | None, int | None]:
    """Whom this rank sends to and receives from: round a ring, or one rank alone to another."""
    if call.rng.random() < 0.5:
        distance = call.rng.randrange(1, call.size)
        return (call.rank + distance) % call.size, (call.rank - distance) % call.size
    src, dst = call.rng.sample(range(call.size), 2)
    return (dst if call.rank == src else None), (src if call.rank == dst else None)


def _send_recv(call: Call) -> None:
    drawn = call.draw()
    dst, src = _peers(call)
    if dst is not None:
        tensor = place(call.bits(drawn, call.rank), drawn.layout)
        call.communicator.send(tensor, dst)
        tensor.zero_()
    if src is not None:
        received = call.communicator.recv(torch.Size(drawn.shape), drawn.dtype, src)
        same(received, call.bits(drawn, src), f"{drawn} from {src}")


def _dictionary(call: Call, drawn: Sequence[Drawn], rank: int) -> dict[str, Any]:
    content: dict[str, Any] = {"number": call.number, "objects": _objects(call, rank)}
    for part, entry in enumerate(drawn):
        content[f"tensor {part}"] = place(call.bits(entry, rank, None, part), entry.layout)
    content["rank"] = rank
    return content


def _same_dictionary(actual: dict[str, Any] | None, expected: dict[str, Any]) -> None:
    assert actual is not None and list(actual) == list(expected)
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            same(actual[key], value, key)
        else:
            assert actual[key] == value, key


def _broadcast_tensor_dict(call: Call) -> None:
    drawn = [call.draw(3) for _ in range(call.rng.randint(0, 3))]
    src = call.rng.randrange(call.size)
    given = _dictionary(call, drawn, src) if call.rank == src else None
    _same_dictionary(call.communicator.broadcast_tensor_dict(given, src), _dictionary(call, drawn, src))


def _hand_on_dictionary(call: Call, async_send: bool) -> None:
    drawn = [call.draw(3) for _ in range(call.rng.randint(0, 3))]
    dst, src = _peers(call)
    works: list[Any] = []
    if dst is not None:
        content = _dictionary(call, drawn, call.rank)
        works = call.communicator.send_tensor_dict(content, dst, async_send=async_send)
        assert bool(works) == async_send
        if not async_send:
            for part in range(len(drawn)):
                content[f"tensor {part}"].zero_()
        del content
    if src is not None:
        _same_dictionary(call.communicator.recv_tensor_dict(src), _dictionary(call, drawn, src))
    for work in works:
        work.work.wait()


def _send_tensor_dict(call: Call) -> None:
    _hand_on_dictionary(call, async_send=False)


def _send_tensor_dict_async(call: Call) -> None:
    _hand_on_dictionary(call, async_send=True)


def _barrier(call: Call) -> None:
    call.communicator.barrier()


def _graph_capture(call: Call) -> None:
    with call.communicator.graph_capture():
        _all_reduce(call)


def _destroy(call: Call) -> None:
    context = call.communicator.context
    second = CommunicatorFL(
        cpu_group=context.cpu_group,
        device_group=context.device_group,
        device=context.device,
        ranks=context.ranks,
        name=f"{context.name} again",
        timeout_s=context.timeout_s,
    )
    _all_reduce(Call(second, call.rng, call.data, call.number))
    second.destroy()
    second.destroy()


@dataclass(frozen=True)
class RandomOperation:
    """A call with drawn arguments and the methods of CommunicatorFL that it exercises."""

    run: Callable[[Call], None]
    methods: tuple[str, ...]

    @property
    def name(self) -> str:
        """For reports."""
        return self.run.__name__.lstrip("_")


OPERATIONS = (
    RandomOperation(_all_reduce, ("all_reduce",)),
    RandomOperation(_all_reduce_in_place, ("all_reduce_in_place",)),
    RandomOperation(_all_reduce_new, ("all_reduce_new",)),
    RandomOperation(_quant_all_reduce, ("quant_all_reduce",)),
    RandomOperation(_fused_allreduce_rmsnorm, ("fused_allreduce_rmsnorm",)),
    RandomOperation(_all_gather, ("all_gather",)),
    RandomOperation(_all_gather_list, ("all_gather",)),
    RandomOperation(_all_gather_into_tensor, ("all_gather_into_tensor",)),
    RandomOperation(_cp_all_gather_into_tensor_async, ("cp_all_gather_into_tensor_async",)),
    RandomOperation(_all_gatherv, ("all_gatherv",)),
    RandomOperation(_all_gatherv_list, ("all_gatherv",)),
    RandomOperation(_reduce_scatter, ("reduce_scatter",)),
    RandomOperation(_reduce_scatter_tensor, ("reduce_scatter_tensor",)),
    RandomOperation(_reduce_scatterv, ("reduce_scatterv",)),
    RandomOperation(_gather, ("gather",)),
    RandomOperation(_broadcast, ("broadcast",)),
    RandomOperation(_broadcast_object_list, ("broadcast_object_list",)),
    RandomOperation(_send_recv, ("send", "recv")),
    RandomOperation(_broadcast_tensor_dict, ("broadcast_tensor_dict",)),
    RandomOperation(_send_tensor_dict, ("send_tensor_dict", "recv_tensor_dict")),
    RandomOperation(_send_tensor_dict_async, ("send_tensor_dict", "recv_tensor_dict")),
    RandomOperation(_barrier, ("barrier",)),
    RandomOperation(_graph_capture, ("graph_capture",)),
    RandomOperation(_destroy, ("destroy",)),
)
