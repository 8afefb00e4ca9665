"""What a run was made on, in the form of the project's benchmark records: machine, devices, versions, command."""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from sglang_fl import __version__
from sglang_fl.comm.errors import CommError
from sglang_fl.comm.graph_mixing import LIBRARIES, nccl_version

PACKAGES = ("sglang", "torch", "triton", "flag_gems", "cffi")


def describe_versions() -> dict[str, str]:
    """Python, this package, and the packages that a result may depend on, where they are installed."""
    versions = {"python": platform.python_version(), "sglang_fl": __version__}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.version.cuda is not None and torch.cuda.is_available():
        variable = LIBRARIES["cuda"].variable
        value = os.environ.get(variable)  # set before NCCL begins, so what it has read
        versions["nccl"] = ".".join(map(str, nccl_version())) + (f" ({variable}={value})" if value else "")
    return versions


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory and kernel; no name of the machine."""
    cpu = _value_of("/proc/cpuinfo", "model name")
    memory_kib = int(_value_of("/proc/meminfo", "MemTotal").split()[0])
    return {
        "cpu": cpu or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_kib / 2**20, 1),
        "kernel": platform.release(),
    }


def describe_device(device: torch.device) -> str:
    """The device's name as its torch gives it, such as NVIDIA H200."""
    if device.type == "cpu":
        return "cpu"
    return str(torch.get_device_module(device).get_device_name(device))


def record(devices: Sequence[str], rows: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Everything about one run; ``devices``: of each rank. The commit is that of the installed version: none here."""
    return {
        "kind": "comm",
        "machine": describe_machine(),
        "gpu": [name for name in devices if name != "cpu"],
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": "",
        "versions": describe_versions(),
        "command": " ".join(["python -m", _module(), *sys.argv[1:]]),
        **more,
        "rows": list(rows),
    }


def require_writable(option: str, path: Path | None) -> None:
    """Found out before the run, not after it, by opening the file; one that was there keeps its content.

    Raises:
        CommError: ``path`` is a folder, or its folder is not there or cannot be written to.
    """
    if path is None:
        return
    is_new = not os.path.lexists(path)
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666))
        if is_new:
            path.unlink(missing_ok=True)  # other ranks try it as well
    except OSError as error:
        raise CommError(
            f"{option} {path} cannot be written: {error.strerror}; name a file in a folder that is there and can be"
        ) from error


def write(content: dict[str, Any], path: Path) -> None:
    """Write one record; its folder is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _module() -> str:
    specification = getattr(sys.modules["__main__"], "__spec__", None)
    return specification.name if specification is not None else Path(sys.argv[0]).name


def _value_of(path: str, name: str) -> str:
    for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith(name):
            return line.split(":", 1)[1].strip()
    return ""
