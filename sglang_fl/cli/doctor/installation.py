"""What is installed and what it would run on: torch, the device, settings, FlagCX, the layers; in a child process."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from sglang_fl.cli.doctor import choices
from sglang_fl.cli.doctor.children import Part
from sglang_fl.cli.doctor.choices import process_settings
from sglang_fl.cli.doctor.report import Fact, Finding, Layer, Report, Setting
from sglang_fl.config import CommBackend

_SMI_LIMIT_S = 10.0
PLUGIN, PLATFORMS_GROUP = "sglang_fl", "sglang.srt.platforms"


def parts() -> list[Part]:
    """In this order; each is a :class:`Report` of its own."""
    return [
        ("torch and the device", device),
        ("the settings", settings),
        ("FlagCX", flagcx),
        ("the layers", layers),
        ("the fused operators", choices.operators),
        ("the collectives", choices.collectives),
    ]


def device() -> Report:
    """torch's build, the platform, the devices; no context is created on any."""
    import torch

    from sglang_fl.devices import detect_platform, is_present

    platform = detect_platform()
    build = next((f"{kind} {number}" for kind, number in _builds(torch.version).items() if number), "CPU only")
    report = Report(device=[Fact("torch is built for", build), Fact("platform", str(platform), "detected")])
    chosen = process_settings()
    wanted, source = chosen.system.platform, chosen.source("system.platform").where
    if wanted != platform:
        report.device[-1] = Fact("platform", str(wanted), f"from {source}; detected: {platform}")
        if wanted is not None and not is_present(wanted):
            found = f"{source} asks for the platform {wanted}, but torch finds no such device here"
            report.problems.append(Finding("device", found, "Unset it, or install the device's torch."))
    report.device += _devices(torch, platform)
    if torch.version.cuda is not None:
        number = int(torch._C._nccl_version())  # as torch.cuda.nccl.version takes it apart
        report.versions.append(Fact("NCCL", f"{number >> 32}.{number >> 16 & 0xFFFF}.{number & 0xFFFF}", "torch's"))
    else:
        report.versions.append(Fact("NCCL", "none", f"this torch is built for {build}"))
    return report


def _builds(version: Any) -> dict[str, str | None]:
    return {kind: getattr(version, name, None) for kind, name in (("CUDA", "cuda"), ("ROCm", "hip"), ("MUSA", "musa"))}


def _devices(torch: Any, platform: str | None) -> list[Fact]:
    if platform == "cuda":
        return [Fact("devices", str(torch.cuda.device_count()), "as this process sees them"), *_nvidia_names()]
    module = {"ascend": "npu", "musa": "musa"}.get(platform or "")
    if module is None:
        return [Fact("devices", "none", f"{len(os.sched_getaffinity(0))} processor cores")]
    return [Fact("devices", str(getattr(torch, module).device_count()), "as this process sees them")]


def _nvidia_names() -> list[Fact]:
    """From the driver's tool: torch would initialise the devices for it."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_SMI_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return [Fact("GPUs", "unknown", f"nvidia-smi does not say: {error}")]
    rows = [[part.strip() for part in line.split(",")] for line in done.stdout.strip().splitlines()]
    return [Fact(f"GPU {number}", row[0], f"driver {row[1]}, {row[2]}") for number, row in enumerate(rows)]


def settings() -> Report:
    """Every setting with its source, what is odd about them, and names in them that nobody knows."""
    from sglang_fl.plugin import ConfigurationError, check_files, unknown_vendors
    from sglang_fl.sglang_hooks.operators.layer import unknown_names

    chosen = process_settings()
    rows = [Setting(row.field, row.value, row.source.where) for row in chosen.rows()]
    texts = (*chosen.warnings, *unknown_vendors(chosen), *unknown_names(chosen))
    report = Report(settings=rows, warnings=[Finding("settings", text, "") for text in texts])
    try:
        check_files(chosen)
    except ConfigurationError as error:
        report.problems.append(Finding("settings", str(error), "A server ends on it: do what the message says."))
    report.add(_sglangs_variables(os.environ))
    return report


def _sglangs_variables(environment: Mapping[str, str]) -> Report:
    """SGLang's own two variables that decide whether the plugin and its platform are used."""
    report = Report()
    plugins = environment.get("SGLANG_PLUGINS", "").strip()
    if plugins and PLUGIN not in [name.strip() for name in plugins.split(",")]:
        found = f"SGLANG_PLUGINS={plugins} leaves the plugin out, so SGLang runs without it"
        report.warnings.append(Finding("hooks", found, f"Unset it, or add {PLUGIN} to it."))
    platform = environment.get("SGLANG_PLATFORM", "").strip()
    known = sorted(point.name for point in entry_points(group=PLATFORMS_GROUP))
    if platform and platform not in known:
        found = (
            f"SGLANG_PLATFORM={platform}: no platform of that name is installed, there is {', '.join(known) or 'none'}"
        )
        report.problems.append(Finding("settings", found, "Unset it, or correct the name: SGLang ends on it."))
    return report


def flagcx() -> Report:
    """Which library would be opened, and what of the API it has; a problem only where it was asked for."""
    from sglang_fl.comm.backends.flagcx import FlagCXError, FlagCXLibrary, ResultCode

    chosen = process_settings()
    path = chosen.comm.flagcx_path
    backend = chosen.comm.backend
    is_wanted = backend is CommBackend.FLAGCX or (path is not None and backend is CommBackend.AUTO)
    source = chosen.source("comm.flagcx_path" if path is not None else "comm.backend").where
    try:
        library = FlagCXLibrary.open("" if path is None else path)
    except FlagCXError as error:
        is_absent = path is None and error.code is ResultCode.NOT_LOADED
        reason = "FLAGCX_PATH is not set, and the loader's search path has no libflagcx.so" if is_absent else str(error)
        report = Report(versions=[Fact("FlagCX", "not usable" if is_wanted else "not found", reason)])
        if is_wanted:
            action = "Build or install FlagCX and let FLAGCX_PATH name its folder, or unset what asks for it."
            report.problems.append(
                Finding("FlagCX", f"{source} asks for FlagCX, which cannot be opened: {error}", action)
            )
        return report
    known = sum(1 for _ in library.capabilities.operations)
    missing = ", ".join(sorted(library.missing_symbols)) or "none"
    memory = f"{library.capabilities.vendor} {library.capabilities.memory.value} memory"
    symbols = Fact("FlagCX symbols", f"{known} operations, form {library.form.value}", f"missing: {missing}")
    return Report(versions=[Fact("FlagCX", library.path, memory), symbols])


def layers() -> Report:
    """Each layer as the settings alone decide it; the plugin's own words, where SGLang is there, replace these."""
    from sglang_fl.aten.layer import AtenError, before_import
    from sglang_fl.comm.policy import describe_order
    from sglang_fl.plugin import ATEN_LAYER, COMM_LAYER, OPS_LAYER
    from sglang_fl.sglang_hooks.operators.layer import off_reason

    chosen = process_settings()
    report = Report()
    try:
        aten = before_import(chosen, chosen.system.platform)
        report.layers.append(Layer(ATEN_LAYER, aten.is_on, aten.reason))
    except AtenError as error:
        report.layers.append(Layer(ATEN_LAYER, False, str(error)))
    off = off_reason(chosen)
    order = f"order {chosen.ops.prefer} first (from {chosen.source('ops.prefer').where})"
    report.layers.append(Layer(OPS_LAYER, not off, off or order))
    report.layers.append(Layer(COMM_LAYER, True, f"{describe_order(chosen)}, mode {chosen.comm.mode}"))
    return report
