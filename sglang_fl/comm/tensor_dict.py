"""The tensor-dict protocol: a pickled list of keys with metadata over the CPU group, then each tensor."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sglang_fl.comm.point_to_point import P2PWork

if TYPE_CHECKING:
    from sglang_fl.comm.transfers import Transfers


class TensorMetadata(NamedTuple):
    """What the receiver needs to allocate a tensor; the device's index is the receiver's own."""

    device_type: str
    dtype: torch.dtype
    size: torch.Size


def split(tensor_dict: dict[str, Any]) -> tuple[list[tuple[str, Any]], list[torch.Tensor]]:
    """Keys with values or metadata, and the tensors in the same order."""
    if not isinstance(tensor_dict, dict):
        raise TypeError(f"a dictionary is needed, got {type(tensor_dict).__name__}")
    entries: list[tuple[str, Any]] = []
    tensors: list[torch.Tensor] = []
    for key, value in tensor_dict.items():
        if isinstance(value, torch.Tensor):
            entries.append((key, TensorMetadata(value.device.type, value.dtype, value.size())))
            tensors.append(value)
        else:
            entries.append((key, value))
    return entries, tensors


def broadcast(communicator: Transfers, tensor_dict: dict[str, Any] | None, src: int) -> dict[str, Any] | None:
    """See :meth:`CommunicatorFL.broadcast_tensor_dict`."""
    if communicator.world_size == 1:
        return tensor_dict
    is_source = communicator.rank_in_group == src
    entries: list[tuple[str, Any]] | None = None
    if is_source:
        entries, _ = split(tensor_dict)  # type: ignore[arg-type]  # None is the TypeError that split raises
    entries = _broadcast_object(communicator, entries, src)
    result: dict[str, Any] = {}
    for key, value in entries:
        if not isinstance(value, TensorMetadata):
            result[key] = value
            continue
        tensor = tensor_dict[key] if is_source and tensor_dict else _allocate(communicator, value)
        if tensor.numel():
            communicator.broadcast(tensor, src)
        result[key] = tensor
    return tensor_dict if is_source else result


def send(
    communicator: Transfers,
    tensor_dict: dict[str, Any],
    dst: int,
    all_gather_group: Any,
    async_send: bool,
) -> list[P2PWork]:
    """See :meth:`CommunicatorFL.send_tensor_dict`."""
    entries, tensors = split(tensor_dict)
    works = _send_object(communicator, entries, dst, async_send)
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        part = _share(tensor, all_gather_group)
        if async_send:
            works.append(communicator.isend(part, dst))
        else:
            communicator.send_held(part, dst)
    return works


def receive(communicator: Transfers, src: int, all_gather_group: Any) -> dict[str, Any]:
    """See :meth:`CommunicatorFL.recv_tensor_dict`."""
    result: dict[str, Any] = {}
    for key, value in _receive_object(communicator, src):
        result[key] = (
            _receive_tensor(communicator, value, src, all_gather_group) if isinstance(value, TensorMetadata) else value
        )
    return result


def _receive_tensor(communicator: Transfers, metadata: TensorMetadata, src: int, all_gather_group: Any) -> torch.Tensor:
    tensor = _allocate(communicator, metadata)
    if tensor.numel() == 0:
        return tensor
    if not _is_shared(tensor, all_gather_group):
        communicator.recv_into(tensor, src)
        return tensor
    part = _share(tensor, all_gather_group)
    communicator.recv_into(part, src)
    gathered: torch.Tensor = all_gather_group.all_gather(part, dim=0)
    return gathered.reshape(metadata.size)


def _is_shared(tensor: torch.Tensor, all_gather_group: Any) -> bool:
    return all_gather_group is not None and tensor.numel() % all_gather_group.world_size == 0


def _share(tensor: torch.Tensor, all_gather_group: Any) -> torch.Tensor:
    if not _is_shared(tensor, all_gather_group):
        return tensor
    share: torch.Tensor = tensor.reshape(all_gather_group.world_size, -1)[all_gather_group.rank_in_group]
    return share


def _allocate(communicator: Transfers, metadata: TensorMetadata) -> torch.Tensor:
    own = communicator.device
    device = own if own.type == metadata.device_type else torch.device(metadata.device_type)
    return torch.empty(metadata.size, dtype=metadata.dtype, device=device)


# Objects travel as SGLang's do: a length, then the pickle, both over the CPU group.


def _broadcast_object(communicator: Transfers, value: Any, src: int) -> Any:
    box = [value]
    communicator.broadcast_objects(box, src)
    return box[0]


def _send_object(communicator: Transfers, value: Any, dst: int, async_send: bool) -> list[P2PWork]:
    pickled = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    length = torch.tensor([pickled.numel()], dtype=torch.long)
    if async_send:
        return [communicator.isend_object_part(part, dst) for part in (length, pickled)]
    for part in (length, pickled):
        communicator.send_object_part(part, dst)
    return []


def _receive_object(communicator: Transfers, src: int) -> Any:
    length = torch.empty(1, dtype=torch.long)
    communicator.recv_object_part(length, src)
    pickled = torch.empty(int(length.item()), dtype=torch.uint8)
    communicator.recv_object_part(pickled, src)
    return pickle.loads(pickled.numpy().tobytes())


__all__ = ["TensorMetadata", "broadcast", "receive", "send", "split"]
