"""The two hosts, a model, and an environment without settings; each is made once a session."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_fl.config.fields import FIELD_BY_VARIABLE
from sglang_fl.testing.hosts import Host, two_hosts
from sglang_fl.testing.tiny_model import write_tiny_model

ROOT = Path(__file__).parents[2]
Hosts = tuple[Host, Host]


@pytest.fixture(scope="session", autouse=True)
def _no_settings() -> Iterator[None]:
    """A developer's own settings must not decide a test."""
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ:
            if name.startswith("SGLANG_") or name in FIELD_BY_VARIABLE:
                patch.delenv(name)
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="session")
def hosts() -> Iterator[Hosts]:
    """Two hosts that see each other and nobody else."""
    with two_hosts() as made:
        yield made


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen2."""
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def hostcx() -> Path:
    """The hostcx library laid out as a FLAGCX_PATH; built if it is not there yet."""
    command = ["make", "-s", "-C", str(ROOT / "csrc/hostcx"), f"OUT={ROOT / 'build/hostcx'}"]
    subprocess.run(command, check=True, capture_output=True)
    return ROOT / "build/hostcx"
