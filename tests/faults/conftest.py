"""How often each case of the matrix runs: ``python -m pytest tests/faults --runs 20``."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--runs``."""
    parser.addoption("--runs", type=int, default=1, help="how often each case of the fault matrix runs")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a run, so that a miss says which."""
    if "turn" in metafunc.fixturenames:
        metafunc.parametrize("turn", range(metafunc.config.getoption("--runs", default=1)))


@pytest.fixture(scope="session")
def hostcx() -> Path:
    """The hostcx library laid out as a FLAGCX_PATH; built if it is not there yet."""
    command = ["make", "-s", "-C", str(ROOT / "csrc/hostcx"), f"OUT={ROOT / 'build/hostcx'}"]
    subprocess.run(command, check=True, capture_output=True)
    return ROOT / "build/hostcx"
