"""What SGLang 0.5.11 lacks to run several ranks on a CPU: its code takes CUDA for granted in these places."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from sglang_fl.sglang_hooks.registration import Hook

_SRT = "sglang.srt"
_COORDINATOR = f"{_SRT}.distributed.parallel_state.GroupCoordinator"
_ATTENTION_BACKEND = f"{_SRT}.layers.attention.base_attn_backend.AttentionBackend"
_library: Any = None  # torch.library.Library; its registrations live as long as it does


def hooks() -> list[Hook]:
    """The hooks for a CPU; also registers SGLang's collective operators for CPU tensors."""
    _register_collective_operators()
    return [
        Hook(f"{_COORDINATOR}.__init__", _without_device_communicators),
        Hook(f"{_SRT}.layers.dp_attention.memcpy_triton", _memcpy),
        Hook(f"{_SRT}.model_executor.forward_batch_info.ForwardBatch.prepare_mlp_sync_batch", _without_pinning),
        Hook(f"{_ATTENTION_BACKEND}.get_cuda_graph_seq_len_fill_value", _seq_len_fill_value),
    ]


def _without_device_communicators(
    original: Callable[..., None],
    self: Any,
    group_ranks: Any,
    local_rank: Any,
    torch_distributed_backend: Any,
    use_pynccl: Any,
    use_pymscclpp: Any,
    use_custom_allreduce: Any,
    use_torch_symm_mem_all_reduce: Any,
    use_hpu_communicator: Any,
    use_xpu_communicator: Any,
    use_npu_communicator: Any,
    use_message_queue_broadcaster: bool = False,
    group_name: Any = None,
    gloo_timeout: Any = timedelta(seconds=120 * 60),
    recovered_rank: bool = False,
) -> None:
    # PyNccl loads the libnccl that a CUDA build of torch brings and then rejects a CPU device.
    original(
        self,
        group_ranks,
        local_rank,
        torch_distributed_backend,
        use_pynccl=False,
        use_pymscclpp=False,
        use_custom_allreduce=False,
        use_torch_symm_mem_all_reduce=False,
        use_hpu_communicator=use_hpu_communicator,
        use_xpu_communicator=use_xpu_communicator,
        use_npu_communicator=use_npu_communicator,
        use_message_queue_broadcaster=use_message_queue_broadcaster,
        group_name=group_name,
        gloo_timeout=gloo_timeout,
        recovered_rank=recovered_rank,
    )


def _memcpy(
    original: Callable[..., None], dst: Any, src: Any, dim: int, offset: Any, sz: Any, offset_src: bool
) -> None:
    # The Triton kernel copies sz rows, at most as many elements as the smaller tensor has.
    rows, start = min(int(sz), len(dst), len(src)), int(offset)
    if offset_src:
        dst[:rows].copy_(src[start : start + rows])
    else:
        dst[start : start + rows].copy_(src[:rows])


def _seq_len_fill_value(original: Callable[..., int], self: Any) -> int:
    return 1  # as SGLang's Triton backend: a padded sequence attends to one token


def _without_pinning(original: Callable[..., Any], self: Any, model_runner: Any) -> Any:
    import torch

    # Not a torch.device: SGLang's call names pin_memory, which torch refuses without an accelerator.
    tensor = torch.tensor

    def unpinned(*arguments: Any, pin_memory: bool = False, **named: Any) -> Any:
        return tensor(*arguments, **named)

    torch.tensor = unpinned
    try:
        return original(self, model_runner)
    finally:
        torch.tensor = tensor


def _register_collective_operators() -> None:
    """SGLang registers its collectives as operators for accelerators only; the same bodies serve the CPU."""
    global _library
    import torch
    from sglang.srt.distributed import parallel_state

    if _library is not None:
        return

    def group(name: str) -> Any:
        found = parallel_state._groups[name]()
        if found is None:
            raise ValueError(f"group {name} is destroyed")
        return found

    _library = torch.library.Library("sglang", "IMPL", "CPU")  # type: ignore[no-untyped-call]  # torch has no types here
    _library.impl("inplace_all_reduce", lambda tensor, group_name: group(group_name)._all_reduce_in_place(tensor))
    _library.impl(
        "reg_all_gather_into_tensor",
        lambda output, input, group_name: group(group_name)._all_gather_into_tensor(output, input),
    )
