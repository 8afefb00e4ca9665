"""torch_npu's functions by name, imported at first use."""

from __future__ import annotations

import importlib
from typing import Any

from sglang_fl.dispatch.backends.vendor.ascend.availability import MODULE
from sglang_fl.dispatch.types import NotSupportedError

# What is called here, each as its page in "Ascend Extension for PyTorch, custom APIs" (7.0 to 7.3) describes it.
NAMES = (
    *("npu_swiglu", "npu_geglu", "npu_rms_norm", "npu_add_rms_norm", "npu_gemma_rms_norm", "npu_rotary_mul"),
    *("npu_mrope", "npu_moe_gating_top_k_softmax", "npu_moe_gating_top_k"),
)


class NpuFunctions:
    """``functions.npu_swiglu`` is that function, looked up on first use; afterwards it is one attribute."""

    def __getattr__(self, name: str) -> Any:
        """Look ``name`` up; only called while it is not known.

        Raises:
            NotSupportedError: torch_npu does not import, or has no such function.
        """
        if name not in NAMES:
            raise AttributeError(name)
        try:
            function = getattr(importlib.import_module(MODULE), name)
        except (
            Exception,
            SystemExit,
        ) as error:  # third-party code: whatever it raises is one reason, and it is reported
            raise NotSupportedError(f"torch_npu.{name}: {type(error).__name__}: {error}") from error
        setattr(self, name, function)
        return function


functions = NpuFunctions()
