"""What a table was measured on, so that its numbers can be compared with others."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def describe(gems_version: str, shapes: dict[str, str]) -> dict[str, str]:
    """FlagGems' version, card, torch and Triton of this process, and the recording's model, SGLang and device."""
    import torch

    return {
        "flag_gems": gems_version,
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "model": shapes.get("model", "unknown"),
        "sglang": shapes.get("sglang", "unknown"),
        "recorded_on": shapes.get("device", "unknown"),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
