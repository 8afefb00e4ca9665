"""Registered memory for FlagCX: blocks as symmetric windows of the group's communicator."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import torch

from sglang_fl.comm.backends.flagcx.communicator import FlagCXCommunicator
from sglang_fl.comm.backends.flagcx.errors import FlagCXError
from sglang_fl.comm.errors import CommError
from sglang_fl.comm.graph_mixing import refuses_windows
from sglang_fl.comm.types import GroupContext


class WindowRegistrar:
    """See :class:`sglang_fl.comm.registered.Registrar`. The library finds a window by the address of a call's tensor.

    Blocks and windows are never given back: a graph that was captured may still use them, and taking a window back
    is collective.
    """

    needs_own_blocks = False

    def __init__(self, name: str, context: GroupContext, communicator: FlagCXCommunicator) -> None:
        self.name = name
        capabilities = communicator.library.capabilities
        refusal = refuses_windows(context.device.type)  # alike on all ranks, which have agreed on the variable
        self._refusal = refusal if capabilities.symmetric_windows else "this release of FlagCX has no windows"
        self.makes_blocks = not self._refusal and capabilities.allocates_memory
        self._context = replace(context, creation_ends_s=None)
        self._communicator = communicator

    def block(self, size: int) -> torch.Tensor:
        """See :meth:`Registrar.block`."""
        address, problem = 0, ""
        try:
            address = self._communicator.library.mem_alloc(size)
        except FlagCXError as error:
            problem = str(error)
        self._require_none(self._agree("allocate memory of FlagCX", problem))
        self._require_none(self._register(address, size))
        return _tensor_at(address, size, self._context.device)

    def adopt(self, address: int, size: int) -> str:
        """See :meth:`Registrar.adopt`."""
        if self._refusal:
            return self._refusal
        problems = self._register(address, size)
        if any(problems) and not all(problems):
            self._require_none(problems)
        return problems[0]

    def _register(self, address: int, size: int) -> list[str]:
        problem = ""
        try:
            self._communicator.window_register(address, size)
        except CommError as error:
            problem = str(error)
        return self._agree("register a window of FlagCX", problem)

    def _agree(self, stage: str, problem: str) -> list[str]:
        return self._context.exchange(stage, problem)

    def _require_none(self, problems: list[str]) -> None:
        for rank, problem in zip(self._context.ranks, problems, strict=True):
            if problem:
                raise CommError(f"{self.name}: global rank {rank} has no registered memory: {problem}")


def _tensor_at(address: int, size: int, device: torch.device) -> torch.Tensor:
    """``size`` bytes at ``address`` as a tensor, which does not own them."""
    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)
    return torch.as_tensor(_DeviceBytes(address, size), device=device)


class _DeviceBytes:
    """What torch takes for memory of a device. Source: Numba's ``__cuda_array_interface__``, version 3."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
