"""The package build: an abi3 wheel from the source distribution, and a package without a C compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import sglang_fl

ROOT = Path(__file__).parents[2]
LIMIT_S = 240
SOURCES = ("setup.py", "MANIFEST.in", "pyproject.toml", "LICENSE", "README.md", "Makefile")
TREES = ("sglang_fl", "native_bindings", "csrc")


def build(tree: Path, hook: str, output: Path, path: str | None = None) -> Path:
    """Run one hook of the build backend in ``tree``, as pip does, with ``path`` as PATH; the built file."""
    output.mkdir()
    environment = {name: value for name, value in os.environ.items() if name not in ("CC", "CFLAGS", "LDSHARED")}
    if path is not None:
        environment["PATH"] = path
    command = [sys.executable, "-c", f"import setuptools.build_meta as backend; backend.{hook}({str(output)!r})"]
    done = subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = output.iterdir()
    return built


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources alone, without anything that was built in this checkout."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in SOURCES:
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy)
    for name in TREES:
        ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.o", "_flagcx_absent.txt")
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the unpacked source distribution, so that what that lacks is missed here."""
    folder = tmp_path_factory.mktemp("wheel")
    sdist = build(checkout, "build_sdist", folder / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (tree,) = (folder / "unpacked").iterdir()
    assert list(tree.rglob("*.so")) == []
    return build(tree, "build_wheel", folder / "wheel")


@pytest.fixture(scope="module")
def wheel_without_compiler(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built where PATH leads to no compiler."""
    folder = tmp_path_factory.mktemp("no-compiler")
    (folder / "bin").mkdir()
    tree = shutil.copytree(checkout, folder / "checkout")
    return build(tree, "build_wheel", folder / "wheel", path=str(folder / "bin"))


def install(wheel: Path, target: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def run(installed: Path, program: str) -> str:
    """Run ``program`` with the package in ``installed``, and no editable one, and return what it prints."""
    no_editable = "sys.meta_path[:] = [finder for finder in sys.meta_path if 'Editable' not in repr(finder)]"
    code = f"import sys; sys.path.insert(0, {str(installed)!r}); {no_editable}\n{program}"
    command = [sys.executable, "-I", "-c", code]
    done = subprocess.run(command, cwd=installed, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


OPEN = """
import sglang_fl
from sglang_fl.comm.backends.flagcx import FlagCXError, FlagCXLibrary
assert sglang_fl.__file__.startswith(sys.path[0])
try:
    FlagCXLibrary.open("/nonexistent")
except FlagCXError as error:
    print(error)
"""


def test_one_wheel_serves_all_pythons(wheel: Path) -> None:
    assert wheel.name.startswith(f"sglang_fl-{sglang_fl.__version__}-cp310-abi3-linux_")
    names = zipfile.ZipFile(wheel).namelist()
    assert "sglang_fl/_flagcx.abi3.so" in names
    assert not [name for name in names if name.startswith(("native_bindings", "csrc", "sglang_fl/_flagcx_absent"))]


def test_the_extension_needs_no_libflagcx(wheel: Path, tmp_path: Path) -> None:
    installed = install(wheel, tmp_path)
    needed = subprocess.run(
        ["readelf", "-dW", installed / "sglang_fl/_flagcx.abi3.so"], capture_output=True, text=True, check=True
    ).stdout
    assert "NEEDED" in needed
    assert "flagcx" not in needed.replace("_flagcx.abi3.so", "")
    assert "NOT_FOUND" in run(installed, OPEN)


def test_without_a_compiler_the_package_builds_and_says_why_flagcx_is_off(
    wheel_without_compiler: Path, tmp_path: Path
) -> None:
    names = zipfile.ZipFile(wheel_without_compiler).namelist()
    assert [name for name in names if name.endswith(".so")] == []
    text = run(install(wheel_without_compiler, tmp_path), OPEN)
    assert "NO_EXTENSION" in text
    assert "sglang_fl was built without it: " in text
    assert "install a C compiler and reinstall it" in text
    reason = (tmp_path / "sglang_fl" / "_flagcx_absent.txt").read_text().strip()
    assert reason
    assert reason in text


def test_a_failed_rebuild_leaves_no_old_extension(checkout: Path, tmp_path: Path) -> None:
    """Given an editable install, when its sources no longer compile, then FlagCX is off with the reason."""
    tree = shutil.copytree(checkout, tmp_path / "checkout")
    build(tree, "build_editable", tmp_path / "first")
    extension = tree / "sglang_fl" / "_flagcx.abi3.so"
    assert extension.exists()
    with (tree / "csrc" / "flagcx_shim" / "gate.c").open("a") as source:
        source.write("this is no C\n")

    build(tree, "build_editable", tmp_path / "second")

    assert list(tree.rglob("_flagcx*.so")) == []
    assert "sglang_fl was built without it: " in run(tree, OPEN)


def test_the_recorded_reason_wins_over_an_extension_of_an_earlier_build(wheel: Path, tmp_path: Path) -> None:
    installed = install(wheel, tmp_path)
    (installed / "sglang_fl" / "_flagcx_absent.txt").write_text("gate.c does not compile\n")
    assert "NO_EXTENSION" in (text := run(installed, OPEN))
    assert "sglang_fl was built without it: gate.c does not compile" in text


def test_a_rebuild_that_succeeds_removes_the_reason(checkout: Path, tmp_path: Path) -> None:
    tree = shutil.copytree(checkout, tmp_path / "checkout")
    (tree / "sglang_fl" / "_flagcx_absent.txt").write_text("no compiler\n")
    build(tree, "build_editable", tmp_path / "editable")
    assert "NOT_FOUND" in run(tree, OPEN)


def test_an_extension_of_another_version_is_refused(wheel: Path, tmp_path: Path) -> None:
    installed = install(wheel, tmp_path)
    package = installed / "sglang_fl" / "__init__.py"
    package.write_text(package.read_text().replace(f'"{sglang_fl.__version__}"', '"9.9.9"'))
    text = run(installed, OPEN)
    assert f"was built for sglang_fl {sglang_fl.__version__}, the package is 9.9.9; reinstall it" in text


def test_a_lost_extension_is_reported_with_the_remedy(wheel: Path, tmp_path: Path) -> None:
    installed = install(wheel, tmp_path)
    (installed / "sglang_fl" / "_flagcx.abi3.so").unlink()
    text = run(installed, OPEN)
    assert "No module named 'sglang_fl._flagcx'; reinstall it: pip install --force-reinstall" in text


def test_the_binding_loads_without_torch(wheel: Path, tmp_path: Path) -> None:
    program = f"{OPEN}\nprint('torch' in sys.modules)"
    assert run(install(wheel, tmp_path), program).splitlines()[-1] == "False"
