"""Whether sgl_kernel's kernels can be used in this process, and why not, found without importing it."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec

from sglang_fl.devices import detect_platform
from sglang_fl.selection import Availability

MODULE = "sgl_kernel"
# This project's own module that lets SGLang import without the real one: it holds no kernels.
STAND_IN = "sglang_fl_kernel_standin"
STAND_IN_MARKER = "__sglang_fl_standin__"


def sgl_kernel_availability() -> Availability:
    """Whether the real sgl_kernel is installed and this process runs on an NVIDIA GPU."""
    spec = _spec()
    if spec is None:
        return Availability.no("sgl_kernel is not installed (pip install sglang-kernel)")
    if type(spec.loader).__module__.partition(".")[0] == STAND_IN:
        return Availability.no("sgl_kernel is the stand-in that lets SGLang import without it, and holds no kernels")
    platform = detect_platform()
    if platform != "cuda":
        return Availability.no(
            f"sgl_kernel needs an NVIDIA GPU; this process runs on {platform or 'an unknown device'}"
        )
    return Availability.yes()


def _spec() -> ModuleSpec | None:
    loaded = sys.modules.get(MODULE)
    return importlib.util.find_spec(MODULE) if loaded is None else loaded.__spec__
