"""The self-test of CommunicatorFL on two GPUs: every operation on FlagCX, NCCL and torch.distributed, also captured."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.gpu

_LIMIT_S = 120.0


@pytest.mark.parametrize("backend", ["flagcx", "nccl", "torch"])
def test_every_operation_is_right(backend: str) -> None:
    """Given two GPUs and FLAGCX_PATH with real FlagCX, when the self-test runs, then nothing is wrong or missing."""
    if torch.cuda.device_count() < 2 or not os.environ.get("FLAGCX_PATH"):
        pytest.skip("needs a GPU for each of two ranks, and FLAGCX_PATH with real FlagCX")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    test = ["-m", "sglang_fl.comm.selftest", "--quick", "--timeout=30", f"--backend={backend}"]
    done = subprocess.run([*launch, *test], capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing wrong" in done.stdout
