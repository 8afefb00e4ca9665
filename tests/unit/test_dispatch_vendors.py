"""Backends of vendors who never saw this project's documents: the public recipe's, and one of vllm-plugin-FL."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sglang_fl

VENDORS = Path(__file__).parent / "vendor"
LIMIT_S = 120.0  # against a hang

PROCESS = """
import json, sys
from types import SimpleNamespace
import torch
from sglang_fl.dispatch import BackendImplKind, OpImpl, SelectionPolicy, call_op, explain, get_manager, policy_context

manager = get_manager()
found = {
    "chosen": {name: manager.select(name).chosen.impl_id for name in ("silu_and_mul", "rms_norm", "rotary_embedding")},
    "broken": [broken.reason for broken in manager.broken],
    "warnings": manager.warnings(),
    "ours": all(type(impl) is OpImpl and type(impl.kind) is BackendImplKind
                for impl in manager.registry.all_implementations()),
    "explain": explain("silu_and_mul"),
    "sglang": "sglang" in sys.modules,
}
layer = SimpleNamespace(weight=torch.rand(8), variance_epsilon=1e-6)
x, positions, angles = torch.randn(3, 8), torch.arange(3), torch.randn(5, 2)
heads = x.view(3, 2, 4)
CALLS = {
    "silu_and_mul": ((x,), {}),
    "rms_norm": ((x, x), {}),
    "rotary_embedding": ((heads, heads, angles.cos(), angles.sin(), positions), {"inplace": False}),
}
for name, (arguments, named) in CALLS.items():
    own = call_op(name, layer, *(each.clone() for each in arguments), **named)
    with policy_context(SelectionPolicy(prefer="reference")):
        expected = call_op(name, layer, *(each.clone() for each in arguments), **named)
    torch.testing.assert_close(own, expected)
if "vllm_chip" in sys.argv:
    found["attention"] = call_op("attention_backend")
    half = call_op("silu_and_mul", layer, x.half())
    found["half"] = str(half.dtype)
print(json.dumps(found))
"""


def outcome(path: list[Path], *arguments: str, **variables: str) -> dict[str, Any]:
    """What :data:`PROCESS` found in a fresh interpreter that sees these folders first, and no setting of ours."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    environment = {**clean, "PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-c", PROCESS, *arguments]
    done = subprocess.run(
        command, cwd=path[0], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def install(folder: Path, package: str) -> None:
    """Install one of the vendors' packages as a distribution: its files, and metadata with an entry point."""
    shutil.copytree(VENDORS / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    information = folder / f"{package}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        f"[sglang_fl.ops]\n{package} = {package}.register_ops:register_builtins\n"
    )


@pytest.fixture
def libraries(tmp_path: Path) -> Path:
    """A folder with the chip's library and the stand-in for vllm-plugin-FL, which are on the vendor's machine."""
    folder = tmp_path / "libraries"
    folder.mkdir()
    shutil.copy(VENDORS / "my_chip_sdk.py", folder)
    shutil.copytree(VENDORS / "vllm_fl", folder / "vllm_fl", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.mark.parametrize("place", ["tree", "distribution"])
def test_a_backend_of_the_public_recipe_works_unchanged(place: str, tmp_path: Path, libraries: Path) -> None:
    """Given the recipe's files, in the tree or installed, when the process starts, then they are chosen before the
    reference, their numbers are the reference's, and SGLang was never imported."""
    root = tmp_path / "root"
    root.mkdir()
    if place == "tree":
        source = Path(sglang_fl.__file__).parent
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, root / "sglang_fl", ignore=ignored)
        shutil.copytree(VENDORS / "my_chip", root / "sglang_fl/dispatch/backends/vendor/my_chip", ignore=ignored)
    else:
        install(root, "my_chip")
    found = outcome([root, libraries])
    assert found["chosen"] == dict.fromkeys(("silu_and_mul", "rms_norm", "rotary_embedding"), "vendor.my_chip")
    assert (found["broken"], found["warnings"], found["sglang"]) == ([], [], False)
    absent = outcome([root, libraries], MY_CHIP_DEVICES="0")
    assert set(absent["chosen"].values()) == {"reference"}
    assert "  passed over vendor.my_chip  its is_available says no" in absent["explain"]


def test_a_backend_of_vllm_plugin_fl_works_unchanged(tmp_path: Path, libraries: Path) -> None:
    """Given a distribution whose descriptors are another plugin's, when the process starts, then they are ours, chosen
    and right; a dtype that it does not do goes to the next; its own operator can be called, and is told as unknown."""
    root = tmp_path / "root"
    root.mkdir()
    install(root, "vllm_chip")
    found = outcome([root, libraries], "vllm_chip")
    assert found["chosen"]["silu_and_mul"] == "vendor.vllm_chip"
    assert found["chosen"]["rms_norm"] == "reference"
    assert found["ours"]
    assert found["attention"] == "vllm_chip.attention"
    assert found["half"] == "torch.float16"
    (warning,) = found["warnings"]
    assert warning.startswith("vendor.vllm_chip registers the operator 'attention_backend', which sglang_fl does not")
