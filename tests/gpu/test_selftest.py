"""The self-test of CommunicatorFL on GPUs: every operation on FlagCX, NCCL and torch.distributed, also captured."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.places import Places, run_together

pytestmark = pytest.mark.gpu

# By whether ranks share a GPU, and wait for their turns.
_LIMIT_S = {False: 120.0, True: 300.0}


@pytest.mark.parametrize("backend", ["flagcx", "nccl", "torch"])
def test_every_operation_is_right(backend: str, two_places: Places, tmp_path: Path) -> None:
    """Given two ranks and FLAGCX_PATH with real FlagCX, when the self-test runs, then nothing is wrong or missing."""
    test = ["-m", "sglang_fl.comm.selftest", "--quick", "--timeout=30", f"--backend={backend}"]
    codes, said = run_together(two_places.torchruns(test), tmp_path, _LIMIT_S[two_places.is_shared])
    assert not any(codes), said
    assert "nothing wrong" in said
