"""AROUND hooks on GroupCoordinator: each has the signature of what it wraps and hands the call to CommunicatorFL.

A group without a communicator (one rank, or the vendor's own route was agreed on) keeps SGLang's own method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import get_ident
from typing import Any

import torch

from sglang_fl.comm import compiled
from sglang_fl.comm.audit import HookClock, audited_hook
from sglang_fl.comm.layout import gather_to_dim, normalized_dim
from sglang_fl.comm.ledger import Ledger
from sglang_fl.sglang_hooks.registration import Hook

COORDINATOR = "sglang.srt.distributed.parallel_state.GroupCoordinator"
Original = Callable[..., Any]


def _all_reduce(original: Original, self: Any, input_: Any) -> Any:
    communicator = self.fl_communicator
    return original(self, input_) if communicator is None else communicator.all_reduce(input_)


def _all_reduce_in_place(original: Original, self: Any, input_: Any) -> Any:
    communicator = self.fl_communicator
    # A thread that is inside SGLang's own all_reduce, as the route native, comes here from within it.
    if communicator is None or (self.fl_native_threads and get_ident() in self.fl_native_threads):
        return original(self, input_)
    communicator.all_reduce_in_place(input_)
    return None


def _quant_all_reduce(original: Original, self: Any, input_: Any) -> Any:
    communicator = self.fl_communicator
    return original(self, input_) if communicator is None else communicator.all_reduce(input_)


def _all_gather(original: Original, self: Any, input_: Any, dim: int = -1, output_tensor_list: Any = None) -> Any:
    communicator = self.fl_communicator
    if communicator is None:
        return original(self, input_, dim, output_tensor_list)
    return communicator.all_gather(input_, dim, output_tensor_list)


def _all_gather_into_tensor(original: Original, self: Any, output: Any, input: Any) -> Any:
    communicator = self.fl_communicator
    if communicator is None:
        return original(self, output, input)
    communicator.all_gather_into_tensor(output, input)
    return None


def _cp_all_gather_into_tensor_async(original: Original, self: Any, output: Any, input: Any, stream: Any) -> Any:
    communicator = self.fl_communicator
    if communicator is None:
        return original(self, output, input, stream)
    return communicator.cp_all_gather_into_tensor_async(output, input, stream)


def _fused_allreduce_rmsnorm(
    original: Original, self: Any, input_: Any, residual_inp_: Any, weight_: Any, eps: float
) -> Any:
    communicator = self.fl_communicator
    if communicator is None:
        return original(self, input_, residual_inp_, weight_, eps)
    return communicator.fused_allreduce_rmsnorm(input_, residual_inp_, weight_, eps)


def _broadcast_object_list(original: Original, self: Any, obj_list: Any, src: int = 0, group: Any = None) -> Any:
    communicator = self.fl_communicator
    if communicator is None:
        return original(self, obj_list, src, group)
    # SGLang ignores the group as well.
    return communicator.broadcast_object_list(obj_list, src)


def _barrier(original: Original, self: Any) -> Any:
    communicator = self.fl_communicator
    return original(self) if communicator is None else communicator.barrier()


def _all_gatherv(original: Original, self: Any, input_: Any, sizes: Any = None) -> Any:
    communicator = self.fl_communicator
    return original(self, input_, sizes) if communicator is None else communicator.all_gatherv(input_, sizes)


def _reduce_scatter_tensor(original: Original, self: Any, output: Any, input: Any) -> Any:
    communicator = self.fl_communicator
    if communicator is None:
        return original(self, output, input)
    return communicator.reduce_scatter_tensor(output, input)


def _public_reduce_scatter_tensor(original: Original, self: Any, output: Any, input: Any) -> Any:
    communicator = self.fl_communicator
    if communicator is None:
        return original(self, output, input)
    communicator.reduce_scatter_tensor(output, input)
    return None


def _reduce_scatter(original: Original, self: Any, output: Any, input_list: Any) -> Any:
    communicator = self.fl_communicator
    if communicator is None:
        return original(self, output, input_list)
    return communicator.reduce_scatter(output, input_list)


def _reduce_scatterv(original: Original, self: Any, input_: Any, output: Any = None, sizes: Any = None) -> Any:
    communicator = self.fl_communicator
    if communicator is None:
        return original(self, input_, output, sizes)
    return communicator.reduce_scatterv(input_, output, sizes)


def _gather(original: Original, self: Any, input_: Any, dst: int = 0, dim: int = -1) -> Any:
    communicator = self.fl_communicator
    return original(self, input_, dst, dim) if communicator is None else communicator.gather(input_, dst, dim)


def _broadcast(original: Original, self: Any, input_: Any, src: int = 0) -> Any:
    communicator = self.fl_communicator
    return original(self, input_, src) if communicator is None else communicator.broadcast(input_, src)


def _broadcast_tensor_dict(
    original: Original,
    self: Any,
    tensor_dict: Any = None,
    src: int = 0,
    group: Any = None,
    metadata_group: Any = None,
) -> Any:
    communicator = self.fl_communicator
    if communicator is None:
        return original(self, tensor_dict, src, group, metadata_group)
    # SGLang replaces both group arguments by the coordinator's own groups as well.
    return communicator.broadcast_tensor_dict(tensor_dict, src)


def _send(original: Original, self: Any, tensor: Any, dst: Any = None) -> Any:
    communicator = self.fl_communicator
    return original(self, tensor, dst) if communicator is None else communicator.send(tensor, dst)


def _recv(original: Original, self: Any, size: Any, dtype: Any, src: Any = None) -> Any:
    communicator = self.fl_communicator
    return original(self, size, dtype, src) if communicator is None else communicator.recv(size, dtype, src)


def _send_tensor_dict(
    original: Original,
    self: Any,
    tensor_dict: Any,
    dst: Any = None,
    all_gather_group: Any = None,
    async_send: bool = False,
) -> Any:
    communicator = self.fl_communicator
    if communicator is None:
        return original(self, tensor_dict, dst, all_gather_group, async_send)
    return communicator.send_tensor_dict(tensor_dict, dst, all_gather_group, async_send)


def _recv_tensor_dict(original: Original, self: Any, src: Any = None, all_gather_group: Any = None) -> Any:
    communicator = self.fl_communicator
    if communicator is None:
        return original(self, src, all_gather_group)
    return communicator.recv_tensor_dict(src, all_gather_group)


def _destroy(original: Original, self: Any) -> Any:
    communicator, self.fl_communicator = self.fl_communicator, None
    if communicator is not None:
        communicator.destroy()
    return original(self)


_METHODS: dict[str, Callable[..., Any]] = {
    "all_reduce": _all_reduce,
    "_all_reduce_in_place": _all_reduce_in_place,
    "quant_all_reduce": _quant_all_reduce,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "_all_gather_into_tensor": _all_gather_into_tensor,
    "cp_all_gather_into_tensor_async": _cp_all_gather_into_tensor_async,
    "fused_allreduce_rmsnorm": _fused_allreduce_rmsnorm,
    "broadcast_object_list": _broadcast_object_list,
    "barrier": _barrier,
    "all_gatherv": _all_gatherv,
    "reduce_scatter_tensor": _public_reduce_scatter_tensor,
    "_reduce_scatter_tensor": _reduce_scatter_tensor,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatterv": _reduce_scatterv,
    "gather": _gather,
    "broadcast": _broadcast,
    "broadcast_tensor_dict": _broadcast_tensor_dict,
    "send": _send,
    "recv": _recv,
    "send_tensor_dict": _send_tensor_dict,
    "recv_tensor_dict": _recv_tensor_dict,
    "destroy": _destroy,
}

METHOD_HOOKS: tuple[Hook, ...] = tuple(
    Hook(f"{COORDINATOR}.{method}", function) for method, function in _METHODS.items()
)


# What Dynamo traces in the place of a hook.
def _traced_all_reduce(original: Original, self: Any, input_: Any) -> Any:
    communicator = self.fl_communicator
    return original(self, input_) if communicator is None else compiled.all_reduce(communicator, input_)


def _traced_all_gather(
    original: Original, self: Any, input_: Any, dim: int = -1, output_tensor_list: Any = None
) -> Any:
    if self.fl_communicator is None or self.world_size == 1:
        return original(self, input_, dim, output_tensor_list)
    # SGLang's own has ways for CPU tensors and for lists that leave its operators out.
    dim = normalized_dim("all_gather", dim, input_)
    output = torch.empty((self.world_size, *input_.shape), dtype=input_.dtype, device=input_.device)
    self.all_gather_into_tensor(output, input_)
    if output_tensor_list is None:
        return gather_to_dim(output, dim)
    for rank, part in enumerate(output_tensor_list):
        part.copy_(output[rank].view(part.shape))
    return None


def _traced_all_gather_into_tensor(original: Original, self: Any, output: Any, input: Any) -> Any:
    communicator = self.fl_communicator
    if communicator is None:
        return original(self, output, input)
    return compiled.all_gather_into_tensor(communicator, output, input)


def _traced_reduce_scatter_tensor(original: Original, self: Any, output: Any, input: Any) -> Any:
    communicator = self.fl_communicator
    if communicator is None:
        return original(self, output, input)
    return compiled.reduce_scatter_tensor(communicator, output, input)


_TRACED: dict[str, Callable[..., Any]] = {
    "all_reduce": _traced_all_reduce,
    "quant_all_reduce": _traced_all_reduce,
    "all_gather": _traced_all_gather,
    "all_gather_into_tensor": _traced_all_gather_into_tensor,
    "reduce_scatter_tensor": _traced_reduce_scatter_tensor,
}


def let_dynamo_trace(hooks: Iterable[Hook]) -> None:
    """Keep Dynamo out of our hooks and the audit; what it traces instead has the same effect when the graph runs."""
    compiled.register()
    for hook in hooks:
        method = hook.target.rpartition(".")[2]
        # What is not in the table is traced as it is without an audit.
        traced = _TRACED.get(method, _METHODS[method])
        if traced is not hook.function:
            compiled.trace_as(hook.function, traced)


def audited_hooks(clock: HookClock, ledger: Ledger) -> tuple[Hook, ...]:
    """The same hooks, each counting its time and booking its calls."""
    return tuple(
        Hook(f"{COORDINATOR}.{method}", audited_hook(function, method, clock, ledger))
        for method, function in _METHODS.items()
    )


def prepare() -> None:
    """Give the class the attributes that the hooks read, for groups that never get a communicator."""
    from sglang.srt.distributed.parallel_state import GroupCoordinator

    GroupCoordinator.fl_communicator = None
    GroupCoordinator.fl_native_threads = frozenset()
