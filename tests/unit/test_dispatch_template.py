"""A chip vendor follows docs/adding_a_chip.md: the operators' template in the tree and as an installed distribution."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import sglang_fl
from sglang_fl.dispatch import OpRegistry
from sglang_fl.dispatch.backends.vendor.template.register_ops import register_builtins
from sglang_fl.dispatch.ops import FLBackendBase

ROOT = Path(__file__).parents[2]
DOCS = ("docs/adding_a_chip.md", "docs/adding_a_chip_zh.md")
PLACES = {"operators-in-tree": "sglang_fl.dispatch.backends.vendor.acme", "operators-distribution": "acme_ops"}
LIMIT_S = 120.0  # against a hang

# The chip's library. A stand-in: it computes on the CPU, takes what its "documentation" says, and counts its calls.
STAND_IN_SDK = '''
"""A stand-in for a chip's kernels, on host memory."""
import os
import torch

calls = []

def device_count():
    return int(os.environ.get("ACME_DEVICES", "1"))

def silu_and_mul(output, x):
    calls.append("silu_and_mul")
    assert output.is_contiguous() and x.is_contiguous() and x.numel() == 2 * output.numel()
    gate, up = x.float().chunk(2, dim=-1)
    output.copy_(gate * torch.sigmoid(gate) * up)

def rms_norm(output, x, weight, epsilon):
    calls.append("rms_norm")
    assert output.is_contiguous() and x.is_contiguous() and weight.dtype == x.dtype
    wide = x.float()
    output.copy_(wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon) * weight.float())

def add_rms_norm(output, total, x, residual, weight, epsilon):
    calls.append("add_rms_norm")
    assert residual.is_contiguous()
    total.copy_(x.float() + residual.float())
    wide = x.float() + residual.float()
    output.copy_(wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon) * weight.float())

def rotate(x, cos, sin, interleaved):
    calls.append("rotate")
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == (x.shape[0], x.shape[2] // 2)
    wide, half = x.float(), x.shape[2] // 2
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else (wide[..., :half], wide[..., half:])
    cos, sin = cos[:, None], sin[:, None]
    rotated = (first * cos - second * sin, second * cos + first * sin)
    x.copy_(torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1))
'''

# What is asked in a fresh process: who is chosen under each policy, and whether the numbers are the reference's.
PROCESS = """
import json, sys
from types import SimpleNamespace
import torch
from sglang_fl.config import load_settings
from sglang_fl.dispatch import SelectionPolicy, call_op, configure, explain, get_manager, policy_context
from sglang_fl.selection import SelectionError

CASES = json.loads(sys.argv[1])
OPERATORS = ("silu_and_mul", "rms_norm", "rotary_embedding", "topk")
manager = get_manager()

def chosen(operator):
    try:
        return manager.select(operator).chosen.payload
    except SelectionError as error:
        return str(error)

def outcome(variables):
    configure(load_settings(variables))
    found = {operator: chosen(operator) for operator in OPERATORS}
    return {operator: impl if isinstance(impl, str) else impl.impl_id for operator, impl in found.items()}

def copy(tensor):
    storage = tensor.untyped_storage().clone()
    return tensor.new_empty(0).set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

def both(operator, obj, *tensors, **named):
    results = []
    for order in (("vendor:acme",), ("reference",)):
        given = [copy(tensor) for tensor in tensors]
        with policy_context(SelectionPolicy(per_op_order={operator: order}, strict=True)):
            results.append(call_op(operator, obj, *given, **named))
        hands_over = named.get("inplace") or (operator == "rms_norm" and len(given) == 2)
        kept = given[2:] if hands_over else given
        assert all(torch.equal(one, other) for one, other in zip(kept, tensors[len(given) - len(kept):])), operator
        if named.get("inplace"):
            assert results[-1][0] is given[0] and results[-1][1] is given[1]
    # The chip computes in float32; what is rounded on the way in the reference differs by so much.
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[tensors[0].dtype]
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)

def compare():
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        layer = SimpleNamespace(weight=torch.rand(64).to(dtype), variance_epsilon=1e-6)
        for tokens in (0, 1, 7):
            x = torch.randn(tokens, 128).to(dtype)
            both("silu_and_mul", layer, x)
            both("silu_and_mul", layer, x[:, ::2])
            both("rms_norm", layer, x[:, ::2])
            both("rms_norm", layer, x[:, :64], x[:, 64:])
            angles = torch.randn(32, 8)
            positions = torch.arange(tokens) * 3
            heads = x.view(tokens, 8, 16)
            for interleaved in (False, True):
                for inplace in (False, True):
                    both("rotary_embedding", layer, heads[:, :6], heads[:, 6:], angles.cos(), angles.sin(), positions,
                         rotary_interleaved=interleaved, inplace=inplace)

def refuses():
    layer = SimpleNamespace(weight=torch.rand(64), variance_epsilon=1e-6)
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    before = len(acme_sdk.calls)
    with policy_context(SelectionPolicy(prefer="vendor")):
        return [str(call_op("rms_norm", layer, x).dtype), len(acme_sdk.calls) - before]

found = {name: outcome(variables) for name, variables in CASES.items()}
configure(load_settings({}))
found["explain"] = explain("rms_norm")
found["broken"] = [broken.reason for broken in manager.broken]
found["module"] = [i.fn.__module__ for i in manager.registry.implementations("rms_norm") if i.impl_id == "vendor.acme"]
if "acme" in found["module"][0] and len(sys.argv) > 2:
    compare()
    import acme_sdk
    found["calls"] = {name: acme_sdk.calls.count(name) for name in set(acme_sdk.calls)}
    found["refuses"] = refuses()
print(json.dumps(found))
"""

CASES: dict[str, dict[str, str]] = {
    "default": {},
    "vendors": {"SGLANG_FL_PREFER": "vendor"},
    "by name": {"SGLANG_FL_PER_OP": "rms_norm=vendor:acme|reference"},
    "strict": {"SGLANG_FL_PER_OP": "rms_norm=vendor:acme|reference", "SGLANG_FL_STRICT": "1"},
    "allowed": {"SGLANG_FL_PREFER": "vendor", "SGLANG_FL_ALLOW_VENDORS": "acme"},
    "denied": {"SGLANG_FL_PREFER": "vendor", "SGLANG_FL_DENY_VENDORS": "acme"},
    "not allowed": {"SGLANG_FL_PREFER": "vendor", "SGLANG_FL_ALLOW_VENDORS": "cuda"},
    "alone": {"SGLANG_FL_PER_OP": "rms_norm=vendor:acme"},
}


def block(document: str, name: str) -> str:
    """The block of code that a reader of ``document`` copies."""
    text = (ROOT / document).read_text(encoding="utf-8")
    found = re.search(rf"<!-- {name} -->\n```\w+\n(.*?)```", text, re.DOTALL)
    assert found, f"{document} has no block marked {name}"
    return found[1]


def run(checkout: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that sees the checkout first, without any setting of ours."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    path = os.pathsep.join([str(checkout), str(checkout / "installed")])
    environment = {**clean, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def outcomes(checkout: Path, *arguments: str, **variables: str) -> dict[str, Any]:
    """What :data:`PROCESS` found."""
    done = run(checkout, "-c", PROCESS, *arguments, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module", params=PLACES)
def added(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A checkout to which the document's commands have added acme, and the module that its operators are then in."""
    folder = tmp_path_factory.mktemp("checkout")
    source = Path(sglang_fl.__file__).parent
    shutil.copytree(source, folder / "sglang_fl", ignore=shutil.ignore_patterns("__pycache__"))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PIP_TARGET": str(folder / "installed")}
    commands = ["bash", "-euc", block(DOCS[0], request.param)]
    done = subprocess.run(commands, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "acme_sdk.py").write_text(STAND_IN_SDK)
    yield folder, PLACES[request.param]
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", [*PLACES, "operators-compare"])
def test_both_documents_give_the_same_code(name: str) -> None:
    """Given the English and the Chinese document, then a reader of either copies the same."""
    assert block(DOCS[0], name) == block(DOCS[1], name)


@pytest.mark.parametrize("document", DOCS)
def test_the_document_has_every_operator(document: str) -> None:
    """Given the base class, then the table of signatures has each operator with its parameters."""
    rows = dict(re.findall(r"^\| `(\w+)` \| `fn\(obj, (.*?)\) -> ", (ROOT / document).read_text(), flags=re.MULTILINE))
    operators = [name for name, member in vars(FLBackendBase).items() if callable(member)]
    operators = [name for name in operators if not name.startswith("_") and name not in ("name", "is_available")]
    assert set(rows) == set(operators)
    for name, parameters in rows.items():
        code = vars(FLBackendBase)[name].__code__
        names = code.co_varnames[2 : code.co_argcount + code.co_kwonlyargcount]
        assert re.findall(r"(\w+)(?:=[^,]+)?(?:, |$)", parameters) == list(names), name


def test_the_template_is_never_available_and_says_why() -> None:
    """Given the template as it is, when it registers, then each operator's reason is that its library is missing."""
    registry = OpRegistry()
    register_builtins(registry)
    implementations = registry.all_implementations()
    assert [impl.op_name for impl in implementations] == ["silu_and_mul", "rms_norm", "rotary_embedding"]
    for impl in implementations:
        assert (impl.impl_id, impl.vendor) == ("vendor.template", "template")
        assert (impl.is_available(), impl.availability().reason) == (False, "my_chip_sdk is not installed")


def test_a_copied_template_is_a_backend(added: tuple[Path, str]) -> None:
    """Given the template copied as the document says, then each policy chooses it or not, its numbers are the
    reference's, its library did the work, and what it refuses gets the next implementation."""
    checkout, package = added
    found = outcomes(checkout, json.dumps(CASES), "compare")
    acme = {"silu_and_mul": "vendor.acme", "rms_norm": "vendor.acme", "rotary_embedding": "vendor.acme"}
    for name in ("default", "vendors", "allowed"):
        assert found[name] == {**acme, "topk": "reference"}, name
    for name in ("by name", "strict", "alone"):
        assert found[name]["rms_norm"] == "vendor.acme", name
    for name in ("denied", "not allowed"):
        assert set(found[name].values()) == {"reference"}, name
    assert found["module"] == [f"{package}.acme"]
    assert found["broken"] == []
    assert "  chosen      vendor.acme" in found["explain"]
    # Three dtypes; of three numbers of tokens, the library is not asked for none.
    assert found["calls"] == {"silu_and_mul": 12, "rms_norm": 6, "add_rms_norm": 6, "rotate": 48}
    assert found["refuses"] == ["torch.bfloat16", 0]


@pytest.mark.parametrize(
    ("devices", "reason"),
    [("0", "acme_sdk sees 0 devices"), ("none", "its is_available raised ValueError: invalid literal for int()")],
)
def test_a_chip_that_is_not_there_says_so(added: tuple[Path, str], devices: str, reason: str) -> None:
    """Given no device, or a driver that raises, then the reference is used, strict fails, and each says why."""
    checkout, _ = added
    found = outcomes(checkout, json.dumps(CASES), ACME_DEVICES=devices)
    assert set(found["vendors"].values()) == {"reference"}
    assert found["strict"]["rms_norm"].startswith("No available implementation for rms_norm: strict mode")
    assert found["alone"]["rms_norm"].startswith("No available implementation for rms_norm")
    for text in (found["strict"]["rms_norm"], found["alone"]["rms_norm"], found["explain"]):
        assert reason in text


def test_without_its_library_it_says_so(added: tuple[Path, str]) -> None:
    """Given a host without the chip's library, then that is the reason."""
    checkout, _ = added
    library, aside = checkout / "acme_sdk.py", checkout / "aside"
    library.rename(aside)
    try:
        found = outcomes(checkout, json.dumps({}))
    finally:
        aside.rename(library)
    assert "acme_sdk is not installed" in found["explain"]


def test_the_documents_comparison_passes_and_can_fail(added: tuple[Path, str]) -> None:
    """Given the document's Python with the stand-in's device, then it passes; with a wrong library, it does not."""
    checkout, _ = added
    code = block(DOCS[0], "operators-compare")
    assert code.count('device = "acme"') == 1
    code = code.replace('device = "acme"', 'device = "cpu"')
    done = run(checkout, "-c", code)
    assert done.returncode == 0, done.stderr
    library = checkout / "acme_sdk.py"
    library.write_text(STAND_IN_SDK.replace("total.copy_(x.float() + residual.float())", "total.copy_(x)"))
    try:
        wrong = run(checkout, "-c", code)
    finally:
        library.write_text(STAND_IN_SDK)
    assert wrong.returncode == 1
    assert "Tensor-likes are not close" in wrong.stderr


BROKEN: Mapping[str, str] = {
    "missing": "import a_module_that_nobody_has",
    "half": """
        from sglang_fl.dispatch import BackendImplKind, OpImpl
        def register_builtins(registry):
            registry.register_impl(OpImpl("rms_norm", "vendor.half", BackendImplKind.VENDOR, print, vendor="half"))
            raise OSError("the driver is too old")
        """,
    "taken": """
        from sglang_fl.dispatch import BackendImplKind, OpImpl
        def register_builtins(registry):
            registry.register_impl(OpImpl("rms_norm", "reference", BackendImplKind.REFERENCE, print))
        """,
}


def test_broken_neighbours_cost_only_themselves(added: tuple[Path, str]) -> None:
    """Given backends that fail to import, to finish registering, or that take another's id, then acme and the built-in
    ones work on, nothing of theirs is left, and each failure stands in the report."""
    checkout, _ = added
    folders = [checkout / "sglang_fl/dispatch/backends/vendor" / name for name in BROKEN]
    for folder, text in zip(folders, BROKEN.values(), strict=True):
        folder.mkdir()
        (folder / "__init__.py").touch()
        (folder / "register_ops.py").write_text(textwrap.dedent(text))
    try:
        found = outcomes(checkout, json.dumps(CASES))
    finally:
        for folder in folders:
            shutil.rmtree(folder)
    assert found["vendors"]["rms_norm"] == "vendor.acme"
    assert found["denied"]["rms_norm"] == "reference"
    half, missing, taken = sorted(found["broken"])
    assert "half.register_ops: OSError: the driver is too old" in half
    assert "No module named 'a_module_that_nobody_has'" in missing
    assert "rms_norm has an implementation reference already" in taken
    assert "passed over vendor.half" not in found["explain"]
    assert "  passed over half" in found["explain"]
