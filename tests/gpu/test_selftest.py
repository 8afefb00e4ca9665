"""The self-test of CommunicatorFL on GPUs: every operation on FlagCX, NCCL and torch.distributed, also captured."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests.gpu.places import Places

pytestmark = pytest.mark.gpu

_LIMIT_S = 120.0
_SHARED_LIMIT_S = 300.0


def _run(stand: Places, arguments: list[str], folder: Path) -> tuple[list[int], str]:
    """Exit codes by host, and what all said."""
    logs, processes = [], []
    for host, (command, environment) in enumerate(stand.torchruns(arguments)):
        logs.append(folder / f"host-{host}")
        with logs[-1].open("w") as log:
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    until_s = time.monotonic() + (_SHARED_LIMIT_S if stand.is_shared else _LIMIT_S)
    try:
        codes = [process.wait(max(0.0, until_s - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.terminate()  # torchrun ends its ranks
            process.wait()
        said = "\n".join(log.read_text(errors="replace") for log in logs)
        print(said)
    return codes, said


@pytest.mark.parametrize("backend", ["flagcx", "nccl", "torch"])
def test_every_operation_is_right(backend: str, two_places: Places, tmp_path: Path) -> None:
    """Given two ranks and FLAGCX_PATH with real FlagCX, when the self-test runs, then nothing is wrong or missing."""
    test = ["-m", "sglang_fl.comm.selftest", "--quick", "--timeout=30", f"--backend={backend}"]
    codes, said = _run(two_places, test, tmp_path)
    assert not any(codes), said
    assert "nothing wrong" in said
