"""Whether FlagGems is available, and why not: one process for each state of the machine, none of which has a GPU."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_fl.dispatch.backends.flaggems import register_ops
from sglang_fl.dispatch.backends.flaggems.impl.normalization import LARGEST_ROW, supports_norm
from sglang_fl.dispatch.backends.flaggems.impl.topk import topk_flaggems
from sglang_fl.dispatch.backends.flaggems.kernels import KERNELS, OPERATOR_KERNELS
from sglang_fl.dispatch.registry import OpRegistry
from sglang_fl.dispatch.types import NotSupportedError

_LIMIT_S = 120.0
_PROBE = """
import sys
sys.path.insert(0, {path!r})
class Hides:
    def __init__(self, finder): self.finder = finder
    def find_spec(self, name, path=None, target=None):
        # What the machine has of FlagGems does not count, only what the test wrote.
        spec = self.finder.find_spec(name, path, target)
        if name.partition(".")[0] in {hidden!r} and spec is not None and not str(spec.origin).startswith({path!r}):
            return None
        return spec
sys.meta_path[:] = [Hides(finder) for finder in sys.meta_path]
import torch
from sglang_fl.dispatch.backends.flaggems import availability, register_ops
from sglang_fl.dispatch.registry import OpRegistry
if {platform!r}:
    availability.detect_platform = lambda: {platform!r}
    torch.accelerator.current_accelerator = lambda *_: torch.device({device!r})
registry = OpRegistry()
register_ops.register_builtins(registry)
assert "flag_gems" not in sys.modules, "registering imported it"
for op_name in {operators!r}:
    answer = registry.implementations(op_name)[0].availability()
    print(answer.available, answer.reason)
print("imported" if "flag_gems" in sys.modules else "not imported")
"""

_DETECTOR = """
class DeviceDetector:
    vendor_name, name = {vendor!r}, {device!r}
"""
_KERNEL = "class _Kernel:\n    def __init__(self, *names): self.arg_names, self.fn = list(names), print\n"


@dataclass(frozen=True)
class Machine:
    """One state: what is installed, on which device, and what must be answered for an operator.

    Attributes:
        name: for the test's id.
        files: below flag_gems, path to text; without any, FlagGems is absent.
        platform: what this process runs on; "" for what it really is, a CPU.
        device: torch's device of that platform.
        available: the answer.
        reason: part of it.
        imported: whether flag_gems is imported afterwards.
        triton: whether Triton is there.
        operator: which is asked about; topk is the one that needs kernels of FlagGems.
    """

    name: str
    files: dict[str, str] = field(default_factory=dict)
    platform: str = "cuda"
    device: str = "cuda"
    available: bool = False
    reason: str = ""
    imported: bool = True
    triton: bool = True
    operator: str = "topk"


def _gems(
    detector_at: str = "", vendor: str = "nvidia", device: str = "cuda", kernels: tuple[str, ...] = tuple(KERNELS)
) -> dict[str, str]:
    files = {f"{name}__init__.py": "" for name in ("", "runtime/", "runtime/backend/", "fused/", "ops/")}
    if detector_at:
        files[f"runtime/backend/{detector_at}.py"] = _DETECTOR.format(vendor=vendor, device=device)
    for kernel in (KERNELS[name] for name in kernels):
        text = f"{_KERNEL}{kernel.name} = _Kernel{kernel.parameters!r}\n"
        files[f"fused/{kernel.module.rpartition('.')[2]}.py"] = text
    return files


_SOFTMAX = KERNELS["topk_softmax"].name
_OTHER_PARAMETERS = {"fused/topk_softmax.py": f"{_KERNEL}{_SOFTMAX} = _Kernel('input_ptr', 'output_ptr', 'M')\n"}
_NO_SOFTMAX = _gems("device", kernels=("grouped_topk",))

MACHINES = (
    Machine("absent", reason="flag_gems is not installed", imported=False),
    Machine("a CPU, torch without CUDA", _gems("device"), "", reason="runs on the CPU", imported=False),
    Machine("no triton", _gems("device"), reason="triton", imported=False, triton=False),
    Machine(
        "broken",
        {"__init__.py": "raise RuntimeError('No device were detected')"},
        reason="RuntimeError: No device",
        imported=False,
    ),
    Machine(
        "one that ends the process", {"__init__.py": "raise SystemExit(3)"}, reason="SystemExit: 3", imported=False
    ),
    Machine("detector where 5.0.2 has it", _gems("device"), available=True),
    Machine("detector where later ones have it", _gems("device_finder"), available=True),
    Machine("no detector", _gems(), reason="no DeviceDetector in any of"),
    Machine("set up for another chip", _gems("device", "ascend", "npu"), reason="set up for ascend (npu); torch runs"),
    Machine("a chip not tried", _gems("device", "metax", "cuda"), reason="tried on nvidia only, and this is metax"),
    Machine("no such kernel", _NO_SOFTMAX, reason="has no flag_gems.fused.topk_softmax"),
    Machine("an operator that needs no such kernel", _NO_SOFTMAX, available=True, operator="silu_and_mul"),
    Machine(
        "other parameters", {**_gems("device"), **_OTHER_PARAMETERS}, reason="takes input_ptr, output_ptr, M; calls"
    ),
)


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_the_answer_and_its_reason(machine: Machine, tmp_path: Path) -> None:
    """Given a machine in that state, when the operator is asked, then the answer names what is missing."""
    for name, text in machine.files.items():
        path = tmp_path / "flag_gems" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    code = _PROBE.format(
        path=str(tmp_path),
        hidden=("flag_gems",) if machine.triton else ("flag_gems", "triton"),
        platform=machine.platform,
        device=machine.device,
        operators=(machine.operator,),
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    answer, imported = done.stdout.splitlines()[-2:]
    assert answer.startswith(str(machine.available))
    assert machine.reason in answer
    assert imported == ("imported" if machine.imported else "not imported")


def test_what_is_not_offered_is_there_with_its_reason() -> None:
    """Given operators that FlagGems has no right kernel for, when they are asked, then the reason is printed."""
    registry = OpRegistry()
    register_ops.register_builtins(registry)
    for op_name, reason in register_ops.NOT_OFFERED.items():
        (impl,) = registry.implementations(op_name)
        assert impl.availability().reason == reason
        with pytest.raises(NotSupportedError):
            impl.fn(None)
    offered = set(registry.operators()) - set(register_ops.NOT_OFFERED)
    assert offered == set(OPERATOR_KERNELS)


def test_layers_that_the_norm_is_wrong_for() -> None:
    """Given weights that the kernel cannot take, when the layer is asked about, then each has a reason."""
    assert supports_norm(SimpleNamespace(weight=torch.ones(5120))) == ""
    assert "no weight" in supports_norm(SimpleNamespace())
    assert "one dimension" in supports_norm(SimpleNamespace(weight=torch.ones(4, 8)))
    assert "contiguous" in supports_norm(SimpleNamespace(weight=torch.ones(8)[::2]))
    assert "largest" in supports_norm(SimpleNamespace(weight=torch.ones(LARGEST_ROW + 1)))


@pytest.mark.parametrize(
    ("top_k", "options"),
    [
        (8, {"num_expert_group": 4, "topk_group": 2}),
        (6, {"scoring_func": "sigmoid"}),
        (8, {"scoring_func": "tanh"}),
        (64, {}),
        (8, {"scoring_func": "sigmoid", "num_expert_group": 128, "correction_bias": torch.zeros(128)}),
    ],
)
def test_gates_that_flag_gems_is_wrong_for(top_k: int, options: dict[str, object]) -> None:
    """Given a gate outside of what FlagGems' kernels do, when it is called, then it is refused before any kernel."""
    with pytest.raises(NotSupportedError, match="topk: "):
        topk_flaggems(None, torch.zeros(3, 128), top_k, **options)  # type: ignore[arg-type]
