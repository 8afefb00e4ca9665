"""Whether FlagGems can be used in this process, and why not; nothing of it is imported before someone asks."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import Any

import torch

from sglang_fl.devices import detect_platform
from sglang_fl.dispatch.backends.flaggems.kernels import KERNELS, OPERATOR_KERNELS, KernelMissing, load
from sglang_fl.selection import Availability

# FlagGems up to 5.0.2 and later ones keep DeviceDetector in different modules.
DETECTOR_MODULES = ("flag_gems.runtime.backend.device", "flag_gems.runtime.backend.device_finder")


@cache
def flag_gems_availability() -> Availability:
    """Whether FlagGems is installed, imports, and works on this process's device.

    Importing it costs seconds, runs the vendors' query commands where nothing else tells the chip, and on NVIDIA
    initialises CUDA for the current device: so the cheap questions come first.
    """
    if importlib.util.find_spec("flag_gems") is None:
        return Availability.no("flag_gems is not installed (pip install flag_gems)")
    if detect_platform() == "cpu":
        return Availability.no("this process runs on the CPU, for which FlagGems has no device")
    if importlib.util.find_spec("triton") is None:
        return Availability.no("flag_gems is installed, but triton, which its kernels are written in, is not")
    try:
        importlib.import_module("flag_gems")
        device = _detector()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - third-party code; the reason is kept and reported
        return Availability.no(f"importing flag_gems failed with {type(error).__name__}: {error}")
    if device is None:
        return Availability.no(f"FlagGems has no DeviceDetector in any of {', '.join(DETECTOR_MODULES)}")
    return _device_fits(device)


def _detector() -> Any:
    for name in DETECTOR_MODULES:
        if importlib.util.find_spec(name) is None:
            continue
        detector = getattr(importlib.import_module(name), "DeviceDetector", None)
        if detector is not None:
            return detector()
    return None


def _device_fits(device: Any) -> Availability:
    here = torch.accelerator.current_accelerator()
    found = here.type if here is not None else "cpu"
    if device.name != found:
        return Availability.no(f"FlagGems was set up for {device.vendor_name} ({device.name}); torch runs on {found}")
    if device.vendor_name != "nvidia":
        return Availability.no(
            f"FlagOS' kernels are launched here with parameters that were tried on nvidia only, "
            f"and this is {device.vendor_name}"
        )
    return Availability.yes()


@cache
def operator_availability(op_name: str) -> Availability:
    """Whether FlagGems works here and has the kernels that operator ``op_name`` needs."""
    everything = flag_gems_availability()
    if not everything.available:
        return everything
    try:
        for name in OPERATOR_KERNELS[op_name]:
            load(KERNELS[name])
    except KernelMissing as error:
        return Availability.no(str(error))
    return Availability.yes()
