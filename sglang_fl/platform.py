"""PlatformFL: what SGLang asks of a device, as data for each platform, answered with SGLang's own classes."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.platforms.device_mixin import DeviceCapability, PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

_POOL = "sglang.srt.mem_cache.memory_pool"
_NPU_POOL = "sglang.srt.hardware_backend.npu.memory_pool_npu"
_ALLOCATOR = "sglang.srt.mem_cache.allocator"
_RUNNER = "sglang.srt.model_executor"
_UTILS = "sglang.srt.utils.common"


@dataclass(frozen=True)
class PlatformData:
    """One platform; classes and functions as dotted names, so that only the one in use is imported.

    Attributes:
        device_type: ``torch.device`` type.
        dispatch_key: SGLang's ``forward_<key>`` for operators without a bridge.
        attention_backend: default where neither flag nor ATTENTION_BACKEND names one.
        distributed_backend: torch.distributed backend of the device groups.
        vendor_backend: the communication backend that is the vendor's own, so that nothing needs a hook.
        is_cuda_alike: the device answers to CUDA-like streams.
        graphs: device graphs are captured for decode.
        memory_capacity: SGLang's function that gives the device's memory in MiB.
        mha_pool, mla_pool, nsa_pool, allocator, paged_allocator, graph_runner, piecewise_backend: SGLang's classes.
    """

    device_type: str
    dispatch_key: str
    attention_backend: str
    distributed_backend: str
    vendor_backend: str | None
    is_cuda_alike: bool
    graphs: bool
    memory_capacity: str
    mha_pool: str = f"{_POOL}.MHATokenToKVPool"
    mla_pool: str = f"{_POOL}.MLATokenToKVPool"
    nsa_pool: str = f"{_POOL}.NSATokenToKVPool"
    allocator: str = f"{_ALLOCATOR}.TokenToKVPoolAllocator"
    paged_allocator: str = f"{_ALLOCATOR}.PagedTokenToKVPoolAllocator"
    graph_runner: str = f"{_RUNNER}.cuda_graph_runner.CudaGraphRunner"
    piecewise_backend: str = "sglang.srt.compilation.cuda_piecewise_backend.CUDAPiecewiseBackend"


PLATFORMS: dict[str, PlatformData] = {
    "cpu": PlatformData(
        device_type="cpu",
        dispatch_key="cpu",
        attention_backend="torch_native",
        distributed_backend="gloo",
        vendor_backend=None,
        is_cuda_alike=False,
        graphs=False,
        memory_capacity=f"{_UTILS}.get_cpu_memory_capacity",
        graph_runner=f"{_RUNNER}.cpu_graph_runner.CPUGraphRunner",
    ),
    "cuda": PlatformData(
        device_type="cuda",
        dispatch_key="cuda",
        attention_backend="triton",
        distributed_backend="nccl",
        vendor_backend="nccl",
        is_cuda_alike=True,
        graphs=True,
        memory_capacity=f"{_UTILS}.get_nvgpu_memory_capacity",
    ),
    "ascend": PlatformData(
        device_type="npu",
        dispatch_key="npu",
        attention_backend="ascend",
        distributed_backend="hccl",
        vendor_backend="hccl",
        is_cuda_alike=False,
        graphs=True,
        memory_capacity=f"{_UTILS}.get_npu_memory_capacity",
        mha_pool=f"{_NPU_POOL}.NPUMHATokenToKVPool",
        mla_pool=f"{_NPU_POOL}.NPUMLATokenToKVPool",
        nsa_pool=f"{_NPU_POOL}.NPUMLATokenToKVPool",
        allocator="sglang.srt.hardware_backend.npu.allocator_npu.NPUPagedTokenToKVPoolAllocator",
        paged_allocator="sglang.srt.hardware_backend.npu.allocator_npu.NPUPagedTokenToKVPoolAllocator",
        graph_runner="sglang.srt.hardware_backend.npu.graph_runner.npu_graph_runner.NPUGraphRunner",
        piecewise_backend="sglang.srt.compilation.npu_piecewise_backend.NPUPiecewiseBackend",
    ),
    "musa": PlatformData(
        device_type="musa",
        dispatch_key="musa",
        attention_backend="triton",
        distributed_backend="mccl",
        vendor_backend=None,
        is_cuda_alike=True,
        graphs=True,
        memory_capacity=f"{_UTILS}.get_mtgpu_memory_capacity",
    ),
}


# SGLang hands these to every platform's pool; its own classes take only what the device needs.
_DEVICE_SPECIFIC_ARGUMENTS = frozenset({"index_head_dim", "kv_cache_dim"})


def _resolve(dotted: str) -> Any:
    return pkgutil.resolve_name(dotted)


def _class(dotted: str) -> type:
    found: type = _resolve(dotted)
    return found


def _pool_class(dotted: str) -> type:
    pool = _class(dotted)
    unknown = _DEVICE_SPECIFIC_ARGUMENTS - inspect.signature(pool).parameters.keys()

    class Pool:
        """Creates SGLang's pool for the device."""

        def __new__(cls, *arguments: Any, **named: Any) -> Any:
            return pool(*arguments, **{name: value for name, value in named.items() if name not in unknown})

    return Pool if unknown else pool


def _require_live() -> None:
    # SGLang asks for a pool after it has made its groups. Were no hook applied at all, this alone would notice.
    from sglang_fl.plugin import require_live

    require_live()


class PlatformFL(SRTPlatform):
    """SGLang's out-of-tree platform; everything it answers is the data of one of :data:`PLATFORMS`.

    It exists so that SGLang runs where its own detection or its CUDA-only packages do not reach. What it
    hands back are SGLang's own classes for the device, and the real dispatch key, so that an operator
    without a bridge keeps the method that SGLang has for the device.
    """

    _enum = PlatformEnum.OOT

    def __init__(self) -> None:
        # SGLang creates the platform without arguments; the plugin has decided which it is.
        from sglang_fl.plugin import active_platform

        self.name = active_platform()
        self.data = PLATFORMS[self.name]
        self.device_name = self.data.device_type
        self.device_type = self.data.device_type

    def is_cuda_alike(self) -> bool:
        """Whether the device answers to CUDA-like streams."""
        return self.data.is_cuda_alike

    # What SGLang 0.5.11 consults.

    def get_device_total_memory(self, device_id: int = 0) -> int:
        """Bytes of memory of the device as SGLang's own function for it reports them; 0 where it cannot tell."""
        capacity_mib: Callable[[], float | None] = _resolve(self.data.memory_capacity)
        return int((capacity_mib() or 0) * 2**20)

    def get_current_memory_usage(self, device: Any = None) -> float:
        """Bytes in use on ``device``; SGLang asks only for device types that it does not know itself."""
        import torch

        module = torch.get_device_module(self.data.device_type)
        free, total = module.mem_get_info(device)
        return float(total - free)

    def get_default_attention_backend(self) -> str:
        """Attention backend where neither the flag nor ATTENTION_BACKEND names one."""
        return self.data.attention_backend

    def get_mha_kv_pool_cls(self) -> type:
        """SGLang's pool for multi-head attention on the device."""
        _require_live()
        return _class(self.data.mha_pool)

    def get_mla_kv_pool_cls(self) -> type:
        """SGLang's pool for multi-head latent attention on the device."""
        _require_live()
        return _pool_class(self.data.mla_pool)

    def get_nsa_kv_pool_cls(self) -> type:
        """SGLang's pool for DeepSeek's sparse attention on the device."""
        _require_live()
        return _pool_class(self.data.nsa_pool)

    def get_paged_allocator_cls(self) -> type:
        """An allocator that is SGLang's own choice for the page size it is created with."""
        plain, paged = _resolve(self.data.allocator), _resolve(self.data.paged_allocator)

        class Allocator:
            """Creates the allocator that SGLang uses without a platform: the plain one for pages of one token."""

            def __new__(cls, size: int, page_size: int, **arguments: Any) -> Any:
                if page_size == 1 and plain is not paged:
                    return plain(size, **arguments)
                return paged(size, page_size=page_size, **arguments)

        return Allocator

    def get_graph_runner_cls(self) -> type:
        """SGLang's runner of decode graphs on the device."""
        return _class(self.data.graph_runner)

    def get_piecewise_backend_cls(self) -> type:
        """SGLang's backend of piecewise graphs on the device."""
        return _class(self.data.piecewise_backend)

    def support_cuda_graph(self) -> bool:
        """Whether decode graphs are captured."""
        return self.data.graphs

    def support_piecewise_cuda_graph(self) -> bool:
        """Piecewise graphs stay on where they work: on CUDA devices."""
        return self.data.dispatch_key == "cuda"

    def get_dispatch_key_name(self) -> str:
        """SGLang's ``forward_<key>`` for operators without a bridge."""
        if self.data.dispatch_key != "cpu":
            return self.data.dispatch_key
        has_amx: bool = _resolve(f"{_UTILS}.cpu_has_amx_support")()
        return "cpu" if has_amx else "native"

    # What later versions of SGLang consult, and what 0.5.11 declares.

    def get_torch_distributed_backend_str(self) -> str:
        """torch.distributed backend of the device groups; communication is chosen per group above it."""
        return self.data.distributed_backend

    def is_pin_memory_available(self, device: Any = None) -> bool:
        """Whether host memory can be pinned for the device."""
        return self.data.device_type != "cpu"

    def get_device(self, local_rank: int = 0) -> Any:
        """The ``torch.device`` of a local rank."""
        import torch

        return torch.device("cpu") if self.name == "cpu" else torch.device(self.data.device_type, local_rank)

    def set_device(self, device: Any) -> None:
        """Make ``device`` current."""
        import torch

        torch.get_device_module(self.data.device_type).set_device(device)

    def get_device_capability(self, device_id: int = 0) -> DeviceCapability | None:
        """Compute capability of a CUDA device; None elsewhere."""
        import torch

        if self.data.device_type != "cuda":
            return None
        return DeviceCapability(*torch.cuda.get_device_capability(device_id))
