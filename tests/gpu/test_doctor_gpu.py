"""The doctor on a GPU: what it says of the device is what torch says, and looking creates no context."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu

LIMIT_S = 180.0


def _examine(**variables: str | None) -> dict[str, Any]:
    changed = {**os.environ, "FLAGCX_PATH": None, "SGLANG_FL_DIST_BACKEND": None, **variables}
    environment = {name: value for name, value in changed.items() if value is not None}
    command = [sys.executable, "-m", "sglang_fl", "doctor", "--quick", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_the_device_is_told_as_torch_sees_it() -> None:
    """Given a GPU and no settings, then its name, torch's NCCL, and collectives that stay on NCCL."""
    report = _examine()
    device = {each["name"]: each["value"] for each in report["device"]}
    assert device["platform"] == "cuda" and device["devices"] == str(torch.cuda.device_count())
    assert device["GPU 0"] == torch.cuda.get_device_name(0)
    versions = {each["name"]: each["value"] for each in report["versions"]}
    assert versions["NCCL"] == ".".join(map(str, torch.cuda.nccl.version()))
    assert {each["chosen"] for each in report["collectives"]} == {"nccl"}


def test_flagcx_carries_where_it_is_asked_for() -> None:
    """Given FLAGCX_PATH with real FlagCX, then its file, the vendor's memory, and all collectives on it."""
    path = os.environ.get("FLAGCX_PATH")
    if not path:
        pytest.skip("needs a GPU and FLAGCX_PATH with real FlagCX")
    report = _examine(FLAGCX_PATH=path)
    (library,) = [each for each in report["versions"] if each["name"] == "FlagCX"]
    assert Path(library["value"]).is_file() and "device memory" in library["note"]
    assert {each["chosen"] for each in report["collectives"]} == {"flagcx"}


LOOKS = """
import torch
from sglang_fl.cli.doctor import choices, installation
for look in (installation.device, installation.settings, installation.layers, choices.collectives):
    look()
    assert not torch.cuda.is_initialized(), look
print("untouched")
"""


def test_looking_creates_no_context() -> None:
    """Given the looks that need no kernel library, then torch has initialised no device afterwards."""
    changed = {**os.environ, "FLAGCX_PATH": ""}
    done = subprocess.run([sys.executable, "-c", LOOKS], env=changed, capture_output=True, text=True, check=False)
    assert done.stdout.strip().endswith("untouched"), done.stdout + done.stderr
