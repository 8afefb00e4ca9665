"""The NVIDIA backend: whether it is available, and that it calls sgl_kernel's operators as they are registered."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from sglang_fl_kernel_standin.modules import MARKER

from sglang_fl.dispatch.backends.vendor.cuda import availability, kernels, register_ops
from sglang_fl.dispatch.registry import OpRegistry
from sglang_fl.testing.operator_cases import cases
from sglang_fl.testing.sgl_kernel_operators import SCHEMAS
from tests.gpu.operator_implementations import must_refuse

_LIMIT_S = 120.0
_PROBE = """
import sys
hidden = {hidden!r}
class Hides:
    def __init__(self, finder): self.finder = finder
    def find_spec(self, name, *rest):
        return None if hidden and name.partition(".")[0] == hidden else self.finder.find_spec(name, *rest)
sys.meta_path[:] = [Hides(finder) for finder in sys.meta_path]
from sglang_fl.dispatch.backends.vendor.cuda import availability, register_ops
from sglang_fl.dispatch.registry import OpRegistry
platform = {platform!r}
if platform: availability.detect_platform = lambda: platform
registry = OpRegistry()
register_ops.register_builtins(registry)
impl = registry.implementations("silu_and_mul")[0]
answer = impl.availability()
assert "sgl_kernel" not in sys.modules, "asking imported it"
print(answer.available, answer.reason)
"""


def _probe(path: Path, hidden: str, platform: str) -> str:
    code = _PROBE.format(hidden=hidden, platform=platform)
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(path)!r})\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def with_package(tmp_path: Path) -> Path:
    """A folder with a package sgl_kernel that fails if it is imported."""
    package = tmp_path / "sgl_kernel"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported by a question')\n")
    return tmp_path


@pytest.mark.parametrize("platform", ["", "cuda"])
def test_the_stand_in_is_never_taken_for_the_real_one(tmp_path: Path, platform: str) -> None:
    """Given the stand-in, on a CPU and on a GPU, when the backend is asked, then it is not available, and says why."""
    answer = _probe(tmp_path, "", platform)
    assert answer.startswith("False") and "stand-in" in answer


def test_without_sgl_kernel(tmp_path: Path) -> None:
    """Given neither sgl_kernel nor its stand-in, when the backend is asked, then it says what to install."""
    answer = _probe(tmp_path, "sgl_kernel", "cuda")
    assert answer == "False sgl_kernel is not installed (pip install sglang-kernel)"


def test_with_sgl_kernel_on_another_device(with_package: Path) -> None:
    """Given sgl_kernel and no GPU, when the backend is asked, then it names the device that is there instead."""
    assert _probe(with_package, "", "") == "False sgl_kernel needs an NVIDIA GPU; this process runs on cpu"


def test_with_sgl_kernel_and_a_gpu(with_package: Path) -> None:
    """Given sgl_kernel and a GPU, when the backend is asked, then it is available, and nothing was imported."""
    assert _probe(with_package, "", "cuda") == "True"


def test_the_marker_of_the_stand_in_is_the_one_that_is_looked_for() -> None:
    """Given the stand-in's own marker, when compared with what the backend looks for, then they are one."""
    assert availability.STAND_IN_MARKER == MARKER


@pytest.mark.parametrize("op_name", register_ops.OFFERED)
def test_calls_are_as_registered_and_results_right(op_name: str) -> None:
    """Given operators with sgl_kernel's schemas, when every case runs, then calls are right, and refusals as listed."""
    command = [sys.executable, "-m", "sglang_fl.testing.sgl_kernel_operators", op_name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    registry = OpRegistry()
    register_ops.register_builtins(registry)
    (impl,) = registry.implementations(op_name)
    wanted = [str(case) for case in cases(op_name) if must_refuse(impl, case)]
    assert outcome["problems"] == []
    assert outcome["refused"] == wanted
    assert outcome["ran"] == len(cases(op_name)) - len(wanted) > 10


def test_the_argument_names_are_those_of_the_schemas() -> None:
    """Given the schemas, when compared with what the backend checks at the first call, then no operator differs."""
    for schema in SCHEMAS:
        name, _, rest = schema.partition("(")
        arguments = rest.partition(")")[0].split(", ")
        assert tuple(argument.split(" ")[-1] for argument in arguments) == kernels.ARGUMENTS[name], name
    assert len(SCHEMAS) == len(kernels.ARGUMENTS)


@pytest.mark.parametrize("op_name", register_ops.NOT_OFFERED)
def test_what_is_not_offered_says_why_and_comes_after_sglangs_own(op_name: str) -> None:
    """Given an operator without a right kernel, when explained, then the reason is there, and its priority is low."""
    registry = OpRegistry()
    register_ops.register_builtins(registry)
    (impl,) = registry.implementations(op_name)
    assert impl.availability().reason == register_ops.NOT_OFFERED[op_name]
    assert impl.priority < 90
