"""The calls of a recorded transport: its hot operations once more, each noting first from where it was called.

Everything is bound in closures, and the place is noted in line: looking names up and one call more would cost what
noting costs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from sglang_fl.comm.backends.flagcx.communicator import FlagCXCommunicator
from sglang_fl.comm.backends.flagcx.types import FlagCXOperation, ReduceOp
from sglang_fl.comm.places import CallSite

_SUM = int(ReduceOp.SUM)


def hot_calls(
    communicator: FlagCXCommunicator, types: Mapping[torch.dtype, int], stream: Callable[[], int] | None
) -> dict[str, Callable[..., Any]]:
    """Method to function for the operations that SGLang calls in every layer; ``stream``: None for host memory."""
    parts = (communicator, types, stream)
    return {
        "all_reduce": _all_reduce(*parts),
        "all_reduce_new": _all_reduce_new(*parts),
        "all_gather": _all_gather(*parts),
        "reduce_scatter": _reduce_scatter(*parts),
    }


def _all_reduce(
    communicator: FlagCXCommunicator, types: Mapping[torch.dtype, int], stream: Callable[[], int] | None
) -> Callable[[torch.Tensor], None]:
    function, handle, settle = _bound(communicator, FlagCXOperation.ALL_REDUCE)
    site, frame_at = CallSite(), sys._getframe
    known, find = site.known, site.find

    def all_reduce(tensor: torch.Tensor) -> None:
        address = tensor.data_ptr()
        dtype = types[tensor.dtype]
        try:
            frame = frame_at(site.depth)
            code, place = known[frame.f_lasti]
            if code is not frame.f_code:
                place = find()
        except (KeyError, ValueError):
            place = find()
        raw = stream() if stream else 0
        result = function(handle, address, address, tensor.numel(), dtype, _SUM, raw, place)
        if result:
            settle(result, FlagCXOperation.ALL_REDUCE, dtype, _SUM, tensor.numel(), tensor.shape)

    return all_reduce


def _all_reduce_new(
    communicator: FlagCXCommunicator, types: Mapping[torch.dtype, int], stream: Callable[[], int] | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    function, handle, settle = _bound(communicator, FlagCXOperation.ALL_REDUCE)
    site, frame_at = CallSite(), sys._getframe
    known, find = site.known, site.find

    def all_reduce_new(tensor: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(tensor)
        dtype = types[tensor.dtype]
        try:
            frame = frame_at(site.depth)
            code, place = known[frame.f_lasti]
            if code is not frame.f_code:
                place = find()
        except (KeyError, ValueError):
            place = find()
        result = function(
            handle, tensor.data_ptr(), output.data_ptr(), tensor.numel(), dtype, _SUM, stream() if stream else 0, place
        )
        if result:
            settle(result, FlagCXOperation.ALL_REDUCE, dtype, _SUM, tensor.numel(), tensor.shape)
        return output

    return all_reduce_new


def _all_gather(
    communicator: FlagCXCommunicator, types: Mapping[torch.dtype, int], stream: Callable[[], int] | None
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    function, handle, settle = _bound(communicator, FlagCXOperation.ALL_GATHER)
    site, frame_at = CallSite(), sys._getframe
    known, find = site.known, site.find

    def all_gather(output: torch.Tensor, tensor: torch.Tensor) -> None:
        dtype = types[tensor.dtype]
        try:
            frame = frame_at(site.depth)
            code, place = known[frame.f_lasti]
            if code is not frame.f_code:
                place = find()
        except (KeyError, ValueError):
            place = find()
        result = function(
            handle, tensor.data_ptr(), output.data_ptr(), tensor.numel(), dtype, stream() if stream else 0, place
        )
        if result:
            settle(result, FlagCXOperation.ALL_GATHER, dtype, None, tensor.numel(), tensor.shape)

    return all_gather


def _reduce_scatter(
    communicator: FlagCXCommunicator, types: Mapping[torch.dtype, int], stream: Callable[[], int] | None
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    function, handle, settle = _bound(communicator, FlagCXOperation.REDUCE_SCATTER)
    site, frame_at = CallSite(), sys._getframe
    known, find = site.known, site.find

    def reduce_scatter(output: torch.Tensor, tensor: torch.Tensor) -> None:
        dtype = types[tensor.dtype]
        try:
            frame = frame_at(site.depth)
            code, place = known[frame.f_lasti]
            if code is not frame.f_code:
                place = find()
        except (KeyError, ValueError):
            place = find()
        result = function(
            handle, tensor.data_ptr(), output.data_ptr(), output.numel(), dtype, _SUM, stream() if stream else 0, place
        )
        if result:
            settle(result, FlagCXOperation.REDUCE_SCATTER, dtype, _SUM, output.numel(), tensor.shape)

    return reduce_scatter


def _bound(
    communicator: FlagCXCommunicator, operation: FlagCXOperation
) -> tuple[Callable[..., int], Any, Callable[..., None]]:
    function = getattr(communicator.library.native.lib, f"sglang_fl_flagcx_{operation.value}_from")
    return function, communicator.handle, communicator.settle
