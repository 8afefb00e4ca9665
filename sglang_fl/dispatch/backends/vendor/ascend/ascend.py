"""The backend's class: Ascend's name, its availability, and the operators that it offers."""

from __future__ import annotations

from sglang_fl.dispatch.backends import Backend
from sglang_fl.dispatch.backends.vendor.ascend.availability import torch_npu_availability
from sglang_fl.dispatch.backends.vendor.ascend.impl.activation import gelu_and_mul_ascend, silu_and_mul_ascend
from sglang_fl.dispatch.backends.vendor.ascend.impl.normalization import gemma_rms_norm_ascend, rms_norm_ascend
from sglang_fl.dispatch.backends.vendor.ascend.impl.rotary import mrotary_embedding_ascend, rotary_embedding_ascend
from sglang_fl.dispatch.backends.vendor.ascend.impl.topk import topk_ascend


class AscendBackend(Backend):
    """torch_npu, called as its published documentation says.

    It has not run on the chip: it was tested against a stand-in for torch_npu, on the CPU, that checks every call
    against the documented names, shapes and dtypes and computes the documented result.
    """

    @property
    def name(self) -> str:
        """``ascend``."""
        return "ascend"

    @property
    def vendor(self) -> str:
        """``ascend``, which settings may also call npu."""
        return "ascend"

    def is_available(self) -> bool:
        """Whether torch_npu can be used in this process; the reason is ``torch_npu_availability()``'s."""
        return torch_npu_availability().available

    silu_and_mul = staticmethod(silu_and_mul_ascend)
    gelu_and_mul = staticmethod(gelu_and_mul_ascend)
    rms_norm = staticmethod(rms_norm_ascend)
    gemma_rms_norm = staticmethod(gemma_rms_norm_ascend)
    rotary_embedding = staticmethod(rotary_embedding_ascend)
    mrotary_embedding = staticmethod(mrotary_embedding_ascend)
    topk = staticmethod(topk_ascend)
