"""Objects broadcast over a gloo group as torch.distributed does, pickled and with their length first, but bounded.

To pickle them and back is the caller's own code, and no part of the call.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from sglang_fl.comm.backends.torch_dist.waiting import Waiting


def packed(objects: Sequence[Any]) -> torch.Tensor:
    """``objects`` as uint8[bytes] on the CPU."""
    return torch.frombuffer(bytearray(pickle.dumps(list(objects))), dtype=torch.uint8)


def broadcast_packed(payload: torch.Tensor | None, src: int, waiting: Waiting) -> torch.Tensor:
    """The ``payload`` of global rank ``src``, of which the others have None. All ranks of the group must call it.

    Raises:
        CommError: not all came within the limit of ``waiting``, or one is gone.
    """
    length = torch.tensor([0 if payload is None else payload.numel()])
    waiting.run(dist.broadcast, length, src)
    if payload is None:
        payload = torch.empty(int(length.item()), dtype=torch.uint8)
    waiting.run(dist.broadcast, payload, src)
    return payload


def unpack_into(objects: list[Any], payload: torch.Tensor, src: int) -> None:
    """``objects`` receives what global rank ``src`` packed, in place.

    Raises:
        ValueError: that rank has another number of objects than this one.
    """
    received = pickle.loads(payload.numpy().tobytes())
    if len(received) != len(objects):
        raise ValueError(f"broadcast of objects: rank {src} sends {len(received)}, this rank has {len(objects)} places")
    objects[:] = received
