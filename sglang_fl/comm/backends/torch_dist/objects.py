"""Objects broadcast over a gloo group as torch.distributed does, pickled and with their length first, but bounded."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist

from sglang_fl.comm.backends.torch_dist.waiting import Waiting


def broadcast_objects(objects: list[Any], src: int, group: dist.ProcessGroup, waiting: Waiting) -> None:
    """``objects`` receives those of global rank ``src``, in place. All ranks of ``group`` must call it.

    Raises:
        CommError: not all came within the limit of ``waiting``, or one is gone.
        ValueError: the source has another number of objects than this rank.
    """
    is_source = dist.get_rank() == src
    payload = torch.empty(0, dtype=torch.uint8)
    if is_source:
        payload = torch.frombuffer(bytearray(pickle.dumps(objects)), dtype=torch.uint8)
    length = torch.tensor([payload.numel()])
    waiting.finish(dist.broadcast(length, src, group=group, async_op=True))
    if not is_source:
        payload = torch.empty(int(length.item()), dtype=torch.uint8)
    waiting.finish(dist.broadcast(payload, src, group=group, async_op=True))
    if is_source:
        return
    received = pickle.loads(payload.numpy().tobytes())
    if len(received) != len(objects):
        raise ValueError(f"broadcast of objects: rank {src} sends {len(received)}, this rank has {len(objects)} places")
    objects[:] = received
