"""The backends that run here: torch.distributed over gloo, and FlagCX's API over host memory."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def hostcx() -> Path:
    """The hostcx library laid out as a FLAGCX_PATH; built if it is not there yet."""
    command = ["make", "-s", "-C", str(ROOT / "csrc/hostcx"), f"OUT={ROOT / 'build/hostcx'}"]
    subprocess.run(command, check=True, capture_output=True)
    return ROOT / "build/hostcx"


@pytest.fixture(params=["torch", "flagcx"])
def backend(request: pytest.FixtureRequest, hostcx: Path) -> dict[str, str]:
    """The environment that selects one backend."""
    return {"SGLANG_FL_DIST_BACKEND": request.param, "FLAGCX_PATH": str(hostcx)}
