"""Installs the stand-in into the running interpreter if that has no real sgl_kernel, and says what it does.

Usage: ``python standin/install.py``. Exit code 0: a real sgl_kernel or the stand-in is in place; 1: what is
installed as the real one is damaged, or the installation failed.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path

MODULE_NAME = "sgl_kernel"
STAND_IN = "sglang-fl-kernel-standin"
STAND_IN_PACKAGE = "sglang_fl_kernel_standin"
# The current name and the old one; both install the module sgl_kernel.
REAL_DISTRIBUTIONS = ("sglang-kernel", "sgl-kernel")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


@dataclass(frozen=True)
class Outcome:
    """What there is to say, and the exit code."""

    text: str
    exit_code: int = 0


def _distribution(name: str) -> metadata.Distribution | None:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None


def _real_spec() -> ModuleSpec | None:
    """Where ``import sgl_kernel`` would lead without the stand-in."""
    finders = (finder for finder in sys.meta_path if getattr(finder, "__module__", "") != STAND_IN_PACKAGE)
    specs = (finder.find_spec(MODULE_NAME, None) for finder in finders)
    return next((spec for spec in specs if spec is not None), None)


def _missing_files(distribution: metadata.Distribution) -> list[str]:
    """Files of the module that the distribution's RECORD lists and that are gone.

    Read here, because ``Distribution.files`` leaves out what is gone from Python 3.12 on.
    """
    recorded = [row[0] for row in csv.reader((distribution.read_text("RECORD") or "").splitlines()) if row]
    of_module = (name for name in recorded if name.startswith(f"{MODULE_NAME}/"))
    return [name for name in of_module if not Path(str(distribution.locate_file(name))).exists()]


def _inspect_real(real: metadata.Distribution, stand_in: metadata.Distribution | None) -> Outcome:
    name, label = real.metadata["Name"], f"{real.metadata['Name']} {real.version}"
    missing = _missing_files(real)
    if missing or _real_spec() is None:
        what = f"{len(missing)} of its files are gone, the first is {missing[0]}" if missing else "it has no module"
        return Outcome(
            f"{label} is installed but damaged: {what}. Reinstall it: pip install --force-reinstall --no-deps "
            f'"{name}=={real.version}"; or remove it: pip uninstall {name}',
            exit_code=1,
        )
    if stand_in is not None:
        return Outcome(
            f"{label} is installed and in use. The stand-in beside it is not needed: pip uninstall {STAND_IN}"
        )
    return Outcome(f"{label} is installed; the stand-in is not needed")


def _inspect_undistributed(spec: ModuleSpec) -> Outcome:
    """A module that no known distribution brought: somebody's own build, or the remains of one."""
    if spec.origin is None:
        folders = ", ".join(spec.submodule_search_locations or ())
        return Outcome(
            f"{folders} has no __init__.py, so it is no usable {MODULE_NAME}, but hides the stand-in. "
            "It is probably left over from an uninstalled one: remove that folder and run this again",
            exit_code=1,
        )
    return Outcome(f"{MODULE_NAME} is there already, from {spec.origin}; the stand-in is not needed")


def _install() -> Outcome:
    print(f"no real {MODULE_NAME} is installed for {sys.executable}: installing {STAND_IN}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        # pip builds in place; a copy keeps the source folder free of build products, and these of old files.
        source = shutil.copytree(Path(__file__).parent, Path(temporary) / "standin")
        flags = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--force-reinstall")
        installed = subprocess.run([*PIP, "install", *flags, str(source)], check=False)
    if installed.returncode:
        return Outcome(f"pip could not install {STAND_IN}; its own message stands above", exit_code=1)
    check = f"import {MODULE_NAME}; assert {MODULE_NAME}.__sglang_fl_standin__"
    # A new process, because the .pth file works at its start; isolated, to see what is installed and no more.
    if subprocess.run([sys.executable, "-I", "-c", check], check=False).returncode:
        return Outcome(f"{STAND_IN} is installed, but `{check}` fails", exit_code=1)
    return Outcome(
        f"installed {STAND_IN}: SGLang can import {MODULE_NAME}, but it holds no kernels. "
        f"A real {MODULE_NAME} installed later takes precedence"
    )


def main() -> int:
    """Decide, act, print; returns the exit code."""
    real = next(filter(None, map(_distribution, REAL_DISTRIBUTIONS)), None)
    spec = _real_spec()
    if real is not None:
        outcome = _inspect_real(real, _distribution(STAND_IN))
    elif spec is not None:
        outcome = _inspect_undistributed(spec)
    else:
        outcome = _install()
    print(outcome.text, file=sys.stderr if outcome.exit_code else sys.stdout)
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main())
