"""Broadcasts, and what two ranks of a group hand each other."""

from __future__ import annotations

from typing import Any

import torch

from sglang_fl.comm import tensor_dict as tensor_dicts
from sglang_fl.comm.core import GroupCore
from sglang_fl.comm.layout import as_movable
from sglang_fl.comm.point_to_point import P2PWork, size_bytes
from sglang_fl.comm.types import Transport


class Transfers(GroupCore):
    """Broadcasts are called by every rank of the group, in the same order; sends and receives by their two ranks."""

    def broadcast(self, input_: torch.Tensor, src: int = 0) -> torch.Tensor:
        """``input_`` receives rank ``src``'s, in place; returns ``input_``."""
        self.counts["broadcast"] += 1
        self._check_rank("broadcast", "src", src)
        if self.world_size == 1:
            return input_
        transport = self._host if input_.is_cpu else self._device
        staged = input_.contiguous()
        work = transport.broadcast(as_movable(transport, staged), src)
        if work is not None:
            work.wait()
        # The source is only read: its elements may share memory, as an expanded tensor's do.
        return input_ if staged is input_ or src == self.rank_in_group else input_.copy_(staged)

    def broadcast_tensor_dict(self, tensor_dict: dict[str, Any] | None = None, src: int = 0) -> dict[str, Any] | None:
        """Every rank receives rank ``src``'s dictionary; other values than tensors travel pickled."""
        self.counts["broadcast_tensor_dict"] += 1
        self._check_rank("broadcast_tensor_dict", "src", src)
        return tensor_dicts.broadcast(self, tensor_dict, src)

    def broadcast_object_list(self, obj_list: list[Any], src: int = 0) -> list[Any]:
        """Every rank's ``obj_list`` receives rank ``src``'s objects, in place; pickled, over the CPU group."""
        self.counts["broadcast_object_list"] += 1
        self._check_rank("broadcast_object_list", "src", src)
        if self.world_size > 1:
            self._broadcast_objects(obj_list, src)
        return obj_list

    def send(self, tensor: torch.Tensor, dst: int | None = None) -> None:
        """Send to ``dst`` (the next rank if left out), which must call :meth:`recv`; does not wait for it.

        ``tensor`` may be changed or dropped as soon as this returns. Call ``destroy``, which waits for what is
        under way, before the groups are destroyed.

        Raises:
            CollectiveTimeout: the sends under way made no room within the limit; or, as PeerLost, what an earlier call
                of the group ended with.
            CommError: the group is destroyed, or an earlier send failed.
        """
        self.counts["send"] += 1
        dst = (self.rank_in_group + 1) % self.world_size if dst is None else dst
        self._check_peer("send", "dst", dst)
        self.send_held(tensor, dst)

    def recv(self, size: torch.Size, dtype: torch.dtype, src: int | None = None) -> torch.Tensor:
        """A new tensor of ``size`` and ``dtype`` on the group's device, from ``src`` (the previous rank)."""
        self.counts["recv"] += 1
        src = (self.rank_in_group - 1) % self.world_size if src is None else src
        self._check_peer("recv", "src", src)
        tensor = torch.empty(size, dtype=dtype, device=self.device)
        self.recv_into(tensor, src)
        return tensor

    def send_tensor_dict(
        self,
        tensor_dict: dict[str, Any],
        dst: int | None = None,
        all_gather_group: Any = None,
        async_send: bool = False,
    ) -> Any:
        """Send a dictionary to ``dst`` (the next rank if left out), which must call :meth:`recv_tensor_dict`.

        Never waits for the receiver. With ``all_gather_group`` (of SGLang or of this class) each of its
        ranks sends its share of a tensor whose elements it can divide.

        Returns:
            With ``async_send`` the works to wait on before a tensor is changed; without, an empty list.
            In a group of one rank, the dictionary, as SGLang does.
        """
        self.counts["send_tensor_dict"] += 1
        if self.world_size == 1:
            return tensor_dict
        dst = (self.rank_in_group + 1) % self.world_size if dst is None else dst
        self._check_peer("send_tensor_dict", "dst", dst)
        return tensor_dicts.send(self, tensor_dict, dst, all_gather_group, async_send)

    def recv_tensor_dict(self, src: int | None = None, all_gather_group: Any = None) -> dict[str, Any] | None:
        """The dictionary that ``src`` (the previous rank) sends; None in a group of one rank."""
        self.counts["recv_tensor_dict"] += 1
        if self.world_size == 1:
            return None
        src = (self.rank_in_group - 1) % self.world_size if src is None else src
        self._check_peer("recv_tensor_dict", "src", src)
        return tensor_dicts.receive(self, src, all_gather_group)

    def broadcast_objects(self, objects: list[Any], src: int) -> None:
        """As :meth:`broadcast_object_list`, uncounted: part of another method."""
        self._broadcast_objects(objects, src)

    def isend(self, tensor: torch.Tensor, dst: int) -> P2PWork:
        """Start to send; the returned work holds the buffer that is read until it is done.

        One that is dropped without a wait is held, on host memory, until it is received, as by :meth:`send`.
        """
        self._require_usable()
        if not tensor.is_cpu:
            return _start_send(self._device, tensor.contiguous(), dst)
        return self._start_owned(self._host, tensor.contiguous(), dst)

    def send_held(self, tensor: torch.Tensor, dst: int) -> None:
        """Send a copy of ``tensor``, held until it is done, and return at once."""
        self._require_usable()
        transport = self._host if tensor.is_cpu else self._device

        def begin() -> P2PWork:
            return _start_send(transport, tensor.clone(memory_format=torch.contiguous_format), dst)

        self._sends.start(size_bytes(tensor), self.ranks[dst], begin)

    def recv_into(self, tensor: torch.Tensor, src: int) -> None:
        """Receive into ``tensor``, which must be contiguous."""
        self._require_usable()
        transport = self._host if tensor.is_cpu else self._device
        transport.recv(as_movable(transport, tensor), src).wait()

    def isend_object_part(self, tensor: torch.Tensor, dst: int) -> P2PWork:
        """As :meth:`isend`, for metadata: always over the CPU group."""
        self._require_usable()
        return self._start_owned(self._metadata, tensor, dst)

    def _start_owned(self, transport: Transport, tensor: torch.Tensor, dst: int) -> P2PWork:
        return self._sends.own(size_bytes(tensor), self.ranks[dst], lambda: _start_send(transport, tensor, dst))

    def send_object_part(self, tensor: torch.Tensor, dst: int) -> None:
        """As :meth:`send_held`, for metadata; ``tensor`` is the callee's from now on."""
        self._require_usable()
        self._sends.start(size_bytes(tensor), self.ranks[dst], lambda: _start_send(self._metadata, tensor, dst))

    def recv_object_part(self, tensor: torch.Tensor, src: int) -> None:
        """As :meth:`recv_into`, for metadata."""
        self._require_usable()
        self._metadata.recv(tensor, src).wait()


def _start_send(transport: Transport, tensor: torch.Tensor, dst: int) -> P2PWork:
    payload = as_movable(transport, tensor)
    return P2PWork(transport.send(payload, dst), payload)
