"""Files and folders of the working directory that Python imports in place of what is installed."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Iterable
from pathlib import Path

from sglang_fl.cli.doctor.report import Finding, Report

# Looked for by name, because the one that lies here may break everything before anything could be looked at.
_NAMES = ("sglang_fl", "sglang", "torch", "triton", "flag_gems", "sgl_kernel", "torch_npu", "torch_musa")


def of_names(folder: Path, paths: Iterable[str], names: Iterable[str] = _NAMES) -> Report:
    """What ``python -m`` in ``folder`` would import from there instead of from where it is installed.

    Args:
        folder: the working directory.
        paths: the module path of this process.
        names: top-level modules.
    """
    elsewhere = _elsewhere(folder, paths)
    report = Report()
    for name in names:
        here = importlib.machinery.PathFinder.find_spec(name, [str(folder)])
        installed = importlib.machinery.PathFinder.find_spec(name, elsewhere)
        if here is None or installed is None or installed.origin is None:
            continue  # what is not installed anywhere else is meant
        if here.origin is None:  # a folder without __init__.py, which Python takes only where there is nothing else
            text = f"{folder} holds a folder {name} without __init__.py; Python still uses {installed.origin}"
            report.warnings.append(Finding("versions", text, "Nothing need be done."))
        elif Path(here.origin).resolve() != Path(installed.origin).resolve():
            report.problems.append(_hidden(folder, name, here.origin, installed.origin))
    return report


def of_loaded(folder: Path, paths: Iterable[str]) -> Report:
    """What this process has imported from ``folder``: some of SGLang's dependencies try modules that may be absent."""
    elsewhere = _elsewhere(folder, paths)
    report = Report()
    for name, module in list(sys.modules.items()):
        origin = getattr(module, "__file__", None)
        if "." in name or name in _NAMES or not origin or not _lies_in(folder, origin):
            continue
        installed = importlib.machinery.PathFinder.find_spec(name, elsewhere)
        if installed is not None and installed.origin is not None:
            report.problems.append(_hidden(folder, name, origin, installed.origin))
            continue
        text = f"SGLang, started in {folder}, imports {origin}, which is not installed anywhere"
        report.warnings.append(
            Finding("versions", text, f"If it is not meant, rename that {name}, or change the folder.")
        )
    return report


def _hidden(folder: Path, name: str, here: str, installed: str) -> Finding:
    text = f"python -m, in {folder}, imports {here} instead of the installed {installed}"
    return Finding(
        "versions",
        text,
        f"Change to another folder, or rename that {name}; the command sglang-fl does not look there.",
    )


def _elsewhere(folder: Path, paths: Iterable[str]) -> list[str]:
    return [path for path in paths if path and Path(path).resolve() != folder.resolve()]


def _lies_in(folder: Path, origin: str) -> bool:
    path = Path(origin)
    return (path.parent.parent if path.name == "__init__.py" else path.parent).resolve() == folder.resolve()
