"""Which device this process would run on, found without creating a context on any."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable


def _has_npu() -> bool:
    if importlib.util.find_spec("torch_npu") is None:
        return False
    import torch

    return hasattr(torch, "npu") and bool(torch.npu.is_available())


def _has_musa() -> bool:
    if importlib.util.find_spec("torch_musa") is None:
        return False
    import torch

    return hasattr(torch, "musa") and bool(torch.musa.is_available())


def _has_cuda() -> bool:
    import torch

    return torch.version.cuda is not None and torch.cuda.is_available()


# In the order in which they are looked for: a vendor's torch may also answer to cuda.
_DETECTORS: dict[str, Callable[[], bool]] = {"ascend": _has_npu, "musa": _has_musa, "cuda": _has_cuda}


def detect_platform() -> str | None:
    """``ascend``, ``musa``, ``cuda`` or ``cpu``; None for an accelerator that is not known here, or without torch.

    ``SGLANG_USE_CPU_ENGINE=1``, SGLang's own switch, means cpu whatever else is there.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return "cpu"
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    for name, is_there in _DETECTORS.items():
        if is_there():
            return name
    return "cpu" if torch.accelerator.current_accelerator(check_available=True) is None else None


def is_present(platform: str) -> bool:
    """Whether a device of ``platform`` can be used in this process; True for one that is not known here."""
    detector = _DETECTORS.get(platform)
    return detector is None or detector()
