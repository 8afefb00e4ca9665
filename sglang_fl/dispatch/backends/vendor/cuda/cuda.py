"""The backend's class: NVIDIA's name, its availability, and the operators that it offers."""

from __future__ import annotations

from sglang_fl.dispatch.backends import Backend
from sglang_fl.dispatch.backends.vendor.cuda.availability import sgl_kernel_availability
from sglang_fl.dispatch.backends.vendor.cuda.impl.activation import gelu_and_mul_cuda, silu_and_mul_cuda
from sglang_fl.dispatch.backends.vendor.cuda.impl.normalization import gemma_rms_norm_cuda, rms_norm_cuda
from sglang_fl.dispatch.backends.vendor.cuda.impl.rotary import rotary_embedding_cuda
from sglang_fl.dispatch.backends.vendor.cuda.impl.topk import topk_cuda


class CudaBackend(Backend):
    """sgl_kernel. An operator is the function itself, so that a call has no method between."""

    @property
    def name(self) -> str:
        """``cuda``."""
        return "cuda"

    @property
    def vendor(self) -> str:
        """``nvidia``, which settings may also call cuda."""
        return "nvidia"

    def is_available(self) -> bool:
        """Whether sgl_kernel can be used in this process; the reason is ``sgl_kernel_availability()``'s."""
        return sgl_kernel_availability().available

    silu_and_mul = staticmethod(silu_and_mul_cuda)
    gelu_and_mul = staticmethod(gelu_and_mul_cuda)
    rms_norm = staticmethod(rms_norm_cuda)
    gemma_rms_norm = staticmethod(gemma_rms_norm_cuda)
    rotary_embedding = staticmethod(rotary_embedding_cuda)
    topk = staticmethod(topk_cuda)
