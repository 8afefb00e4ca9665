"""Whether torch_npu's operators can be used in this process, and why not, found without importing it."""

from __future__ import annotations

import importlib.util
import sys

from sglang_fl.devices import detect_platform
from sglang_fl.selection import Availability

MODULE = "torch_npu"
# The stand-in for tests carries it; it computes on the CPU and is never taken for the real one.
STAND_IN_MARKER = "__sglang_fl_standin__"


def torch_npu_availability() -> Availability:
    """Whether torch_npu is installed and this process runs on an Ascend NPU."""
    loaded = sys.modules.get(MODULE)
    if loaded is None and importlib.util.find_spec(MODULE) is None:
        return Availability.no("torch_npu is not installed (pip install torch_npu)")
    if getattr(loaded, STAND_IN_MARKER, False):
        return Availability.no("torch_npu is the stand-in for tests, which computes on the CPU")
    platform = detect_platform()
    if platform != "ascend":
        return Availability.no(f"torch_npu needs an Ascend NPU; this process runs on {platform or 'an unknown device'}")
    return Availability.yes()
