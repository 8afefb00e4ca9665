"""What the tests of layer 1 share: processes that have a flag_gems, and small packages of that name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_LIMIT_S = 180.0
# FlagGems asks for a GPU while it is imported; kernels are registered without one, and never run here.
PRETEND = """
import json, sys
from sglang_fl.testing.interpreted_flag_gems import pretend_a_hopper_gpu
pretend_a_hopper_gpu()
import torch
from sglang_fl.aten.layer import capturing, switch_on
from sglang_fl.config import load_settings
def owner(name):
    '''Where the CUDA kernel of an operator was registered.'''
    lines = torch._C._dispatch_dump(name).splitlines()
    return next((line for line in lines if line.startswith("CUDA: ")), "none")
"""


def run(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A Python process with ``variables`` on top of this one's."""
    environment = os.environ | variables
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False, env=environment)


def answer(done: subprocess.CompletedProcess[str]) -> Any:
    """What the process printed last, as JSON."""
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


SWITCH = """
from dataclasses import asdict
settings = load_settings()
first, second = switch_on(settings), switch_on(settings)
assert first is second
report = asdict(first)
def owners():
    return {name: owner("aten::" + name) for name in sys.argv[1:]}
report["owners"] = owners()
with capturing():
    report["in_graphs"] = owners()
report["afterwards"] = owners()
print(json.dumps(report))
"""


def is_flag_gems(owner: str) -> bool:
    """Whether the line of PyTorch's dispatch table names a registration from Python."""
    return "sglang_fl" in owner


# Stand-ins for versions that are not installed: only the form of what layer 1 touches.
REGISTER = """
def _register(lib, wanted):
    for key, function, *rest in _FULL_CONFIG:
        if function.__name__ in wanted and (not rest or rest[0] is None or rest[0]()): lib.impl(key, function, "CUDA")
def enable(lib=None, unused=None, registrar=None, record=False, once=False, path=None):
    _register(lib, {function.__name__ for _, function, *_ in _FULL_CONFIG} - set(unused))
def only_enable(lib=None, include=None, registrar=None, record=False, once=False, path=None):
    _register(lib, include)
"""
CONFIG = """
__version__ = {version!r}
def mul(a, b): return a
def cumsum(a, dim, *, dtype=None): return a
def never(a): return a
_FULL_CONFIG = (("mul.Tensor", mul), ("cumsum", cumsum{extra}), ("relu", never, lambda: False))
"""
DETECTOR = "class DeviceDetector:\n    vendor_name, name, dispatch_key = 'nvidia', 'cuda', 'CUDA'\n"


def write_version(folder: Path, version: str, detector: str, extra: str = "", more: str = "") -> None:
    """A package flag_gems with DeviceDetector in ``flag_gems.runtime.backend.<detector>``."""
    backend = folder / "flag_gems" / "runtime" / "backend"
    backend.mkdir(parents=True)
    (folder / "flag_gems" / "__init__.py").write_text(CONFIG.format(version=version, extra=extra) + REGISTER + more)
    (backend.parent / "__init__.py").touch()
    (backend / "__init__.py").touch()
    (backend / f"{detector}.py").write_text(DETECTOR)
