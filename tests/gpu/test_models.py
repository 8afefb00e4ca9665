"""Models at full size on one GPU, with random weights that matter; and the empty install, without NVIDIA's packages.

Each shape runs in SGLang alone and with layers 1 and 2 (one rank has nothing to communicate), and the tokens are equal
by the rule of :mod:`benchmarks.e2e.tokens`. Logs and records stay in pytest's folders (``--basetemp``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import sglang_fl
from benchmarks.e2e import shapes
from benchmarks.e2e.configurations import CONFIGURATIONS, NATIVE, Configuration
from benchmarks.e2e.requests import Sizes, answers
from benchmarks.e2e.servers import MeasuredServer, Site, install_plugin, used_memory_mib
from benchmarks.e2e.tokens import Answer, compare, largest_shift, weakness
from sglang_fl.comm.tools.record import write

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
PLUGIN_RUN = "layers-12"
READY_LIMIT_S = 240.0
# Weights, caches and graphs with --mem-fraction-static=0.6.
NEEDED_GIB = {"qwen3.6-27b": 110, "qwen3.6-35b-a3b": 130}
# What the vendor's install has and the empty one has not, by the beginnings of names in site-packages.
VENDOR_PACKAGES = ("flashinfer", "sgl_kernel", "sglang_kernel", "sglang_fl_kernel_standin")


@pytest.mark.parametrize("shape", NEEDED_GIB)
def test_a_shape_at_full_size_answers_as_sglang_alone(shape: str, tmp_path: Path) -> None:
    """Given a published shape, when it is served natively and with the plugin, then the tokens are equal."""
    total_gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    if total_gib < NEEDED_GIB[shape]:
        pytest.skip(f"needs a GPU with {NEEDED_GIB[shape]} GiB, this one has {total_gib:.0f}")
    record = tmp_path / "record.json"
    options = [f"--shape={shape}", f"--configurations={NATIVE},{PLUGIN_RUN}", "--starts=1", "--repeats=1"]
    command = [sys.executable, "-m", "benchmarks.e2e", *options, f"--out={tmp_path}", f"--json={record}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    found = json.loads(record.read_text())
    assert [start["configuration"] for start in found["starts"]] == [NATIVE, PLUGIN_RUN]
    bound = [line for line in found["starts"][1]["plugin"] if line.startswith("layer 2, fused operators: on")]
    assert bound, found["starts"][1]["plugin"]


EMPTY = Configuration("empty", "no flashinfer, no sgl_kernel", (2,), {"SGLANG_FL_DENY_VENDORS": "cuda"})


@dataclass
class EmptyServer(MeasuredServer):
    """A server of another Python than this one."""

    python: Path = Path(sys.executable)

    def command(self, node: int = 0) -> list[str]:
        """The exact command."""
        return [str(self.python), *super().command(node)[1:]]


def make_empty_install(folder: Path) -> Path:
    """A virtual environment of links to all that is installed here but VENDOR_PACKAGES; its Python.

    Then the stand-in, as docs/quick_start.md has it.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    asked = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
    installed = [Path(entry) for entry in sys.path if entry and any(Path(entry).glob("*.dist-info"))]
    # .pth files would lead back to what is left out.
    found = [each for entry in installed for each in entry.iterdir() if each.suffix != ".pth"]
    # An editable install is a .pth file.
    for each in [*found, Path(sglang_fl.__file__).parent]:
        link = packages / each.name
        if not each.name.startswith(VENDOR_PACKAGES) and not link.exists():
            link.symlink_to(each)
    subprocess.run([python, ROOT / "standin" / "install.py"], env=without_pythonpath(), check=True)
    return python


def without_pythonpath() -> dict[str, str]:
    """This process's variables, but those that lead Python to other packages."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def empty_server(site: Site, python: Path) -> EmptyServer:
    """A server of the empty install, not started yet."""
    made = site.server(EMPTY, EMPTY.name, READY_LIMIT_S, None)
    environment = {**made.environment, "PYTHONPATH": str(site.plugin), "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": None}
    return EmptyServer(
        made.model,
        made.folder,
        made.arguments,
        environment,
        ready_limit_s=READY_LIMIT_S,
        is_on_gpu=site.is_on_gpu,
        log_name=made.log_name,
        python=python,
    )


def ask(server: MeasuredServer, site: Site, configuration: Configuration, sizes: Sizes) -> tuple[list[Answer], Any]:
    """Start it; its answers, and the digests of its weights."""
    site.wait_until_free()
    with server:
        found = site.check(server, configuration)
        given = answers(server, sizes)
    assert not weakness(given), weakness(given)
    return given, {name: each["digest"] for name, each in found["reports"][0]["weights"].items()}


def compare_installs(shape: str, folder: Path, is_on_gpu: bool, sizes: Sizes) -> dict[str, Any]:
    """Serve ``shape`` in this install by SGLang alone and in the empty one with the plugin; how the answers differ."""
    python = make_empty_install(folder / "environment")
    memory = used_memory_mib() if is_on_gpu else ()
    model, plugin = shapes.write(shape, folder / "model"), install_plugin(folder / "plugin")
    site = Site(model, plugin, folder, 1, is_on_gpu, memory_mib=memory)
    native = CONFIGURATIONS[NATIVE]
    expected, weights = ask(site.server(native, NATIVE, READY_LIMIT_S, None), site, native, sizes)
    given, its_weights = ask(empty_server(site, python), site, EMPTY, sizes)
    assert its_weights == weights, "the two servers had different weights"
    differences = compare(expected, given)
    return {
        "shape": shape,
        "prompts": len(expected),
        "tokens": {NATIVE: [list(each.ids) for each in expected], EMPTY.name: [list(each.ids) for each in given]},
        "differences": [{**vars(each), "is_open": each.is_open} for each in differences],
        "largest_shift": largest_shift(expected, given),
    }


def test_the_empty_install_answers_as_the_full_one(tmp_path: Path) -> None:
    """Given neither flashinfer nor sgl_kernel and the vendor denied, when the shape is served, then it answers."""
    shape = "qwen2.5-0.5b"
    found = compare_installs(shape, tmp_path, True, Sizes(shapes.vocabulary_size(shape)))
    write(found, tmp_path / "record.json")
    python = tmp_path / "environment" / "bin" / "python"
    program = (
        "import importlib.util as u, sgl_kernel; print(u.find_spec('flashinfer'), sgl_kernel.__sglang_fl_standin__)"
    )
    told = subprocess.run([python, "-c", program], env=without_pythonpath(), capture_output=True, text=True, check=True)
    assert told.stdout == "None True\n"
    assert [each for each in found["differences"] if not each["is_open"]] == []
