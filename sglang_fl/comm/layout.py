"""Shapes and bytes that the collectives share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch

from sglang_fl.comm.types import Transport


class NamedGroup(Protocol):
    """What an error needs to know of a group."""

    name: str
    world_size: int


def as_movable(transport: Transport, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` (contiguous) in a dtype that ``transport`` moves: itself, or its bytes as uint8, flat.

    Raises:
        TypeError: its memory does not hold its values, as torch's lazily negated and conjugated views.
    """
    if tensor.is_neg() or tensor.is_conj():
        raise TypeError(
            "a lazily negated or conjugated view cannot be sent; call resolve_neg() or resolve_conj() first"
        )
    if tensor.dtype in transport.capabilities.movable:
        return tensor
    # Not view(-1): a contiguous tensor of one element may have any stride.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def normalized_dim(method: str, dim: int, tensor: torch.Tensor) -> int:
    """``dim`` counted from the front.

    Raises:
        ValueError: ``tensor`` has no such dimension.
    """
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"{method}: dim={dim} is none of the dimensions of shape {tuple(tensor.shape)}")
    return dim % tensor.dim()


def gather_to_dim(gathered: torch.Tensor, dim: int) -> torch.Tensor:
    """(world_size, *shape) to the concatenation of the world_size parts along ``dim`` of ``shape``."""
    shape = list(gathered.shape[1:])
    shape[dim] *= gathered.shape[0]
    return gathered.movedim(0, dim).reshape(shape)


def split_rows(tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Views of ``sizes[0]``, ``sizes[1]``, ... rows of ``tensor``, one after the other."""
    ends = list(accumulate(sizes))
    return [tensor[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def check_sizes(method: str, group: NamedGroup, large: torch.Tensor, small: torch.Tensor) -> None:
    """``large`` must have world_size times the elements of ``small``, and the same dtype.

    Raises:
        ValueError: it has not.
    """
    if large.numel() == small.numel() * group.world_size and large.dtype == small.dtype:
        return
    raise ValueError(
        f"{method}, group {group.name}: {small.numel()} elements of {small.dtype} on each of "
        f"{group.world_size} ranks do not fit {large.numel()} elements of {large.dtype}"
    )
