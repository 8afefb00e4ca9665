"""Where the ranks of a test stand: on a GPU each, or, on a machine with fewer, all on GPU 0 as hosts of their own.

NCCL takes two ranks on one GPU for a mistake only if they are on the same host, and what it takes for a host is what
NCCL_HOSTID says. Ranks with different ids talk through the network, here the loopback interface: the kernels, the proxy
threads and the sockets are the real ones. Not so NVLink, memory of a peer, and times: the GPU gives its ranks turns.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sglang_fl.comm.communicator import CommunicatorFL
from sglang_fl.testing.ranks import RankContext, run_ranks

# Of ranks that share a GPU; FlagCX reads a host id and an interface of its own.
_THROUGH_THE_NETWORK = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "FLAGCX_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
}


def are_shared(world_size: int) -> bool:
    """Whether this machine has fewer GPUs than ``world_size`` ranks."""
    return torch.cuda.device_count() < world_size


def how(world_size: int) -> str:
    """The same in words, for the names of tests."""
    return "hosts-on-one-GPU" if are_shared(world_size) else "a-GPU-each"


@dataclass(frozen=True)
class Places:
    """Where each of ``world_size`` ranks stands."""

    world_size: int
    is_shared: bool

    def environment(self, rank: int) -> dict[str, str]:
        """What its process needs on top of what all have; LOCAL_RANK is the number of its GPU."""
        if not self.is_shared:
            return {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(self.world_size)}
        host = f"{socket.gethostname()}-{rank}"
        ids = {"NCCL_HOSTID": host, "FLAGCX_HOSTID": host}
        return {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **ids, **_THROUGH_THE_NETWORK}

    def torchruns(self, arguments: Sequence[str]) -> list[tuple[list[str], dict[str, str]]]:
        """Commands that together run ``arguments`` on each rank, with their whole environments: one for each host."""
        hosts = self.world_size if self.is_shared else 1
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        sizes = [f"--nnodes={hosts}", f"--nproc-per-node={self.world_size // hosts}", "--local-addr=127.0.0.1"]
        launch = ["-m", "torch.distributed.run", *sizes, "--master-addr=127.0.0.1", f"--master-port={port}"]
        return [
            ([sys.executable, *launch, f"--node-rank={host}", *arguments], {**os.environ, **self.environment(host)})
            for host in range(hosts)
        ]


def run_on(
    stand: Places, function: Callable[..., object], backend: str, *arguments: object, timeout_s: float
) -> list[object]:
    """Run ``function`` on each rank, on ``backend``; what each returned."""

    def environment(rank: int) -> dict[str, str]:
        return {"SGLANG_FL_DIST_BACKEND": backend, **stand.environment(rank)}

    return run_ranks(function, stand.world_size, *arguments, timeout_s=timeout_s, env=environment, start_method="spawn")


def communicator_of_all(context: RankContext, name: str, timeout_s: float = 60.0) -> CommunicatorFL:
    """A communicator of all ranks on this rank's GPU, on the backend that :func:`run_on` chose."""
    device = torch.device("cuda", context.local_rank)
    torch.cuda.set_device(device)
    ranks = list(range(context.world_size))
    communicator = CommunicatorFL(
        cpu_group=dist.new_group(ranks, backend="gloo"),
        device_group=dist.new_group(ranks, backend="nccl"),
        device=device,
        ranks=ranks,
        name=name,
        timeout_s=timeout_s,
    )
    assert communicator.backend == os.environ["SGLANG_FL_DIST_BACKEND"]
    return communicator


def run_together(
    launches: Sequence[tuple[list[str], dict[str, str]]], folder: Path, limit_s: float
) -> tuple[list[int], str]:
    """Run commands with their environments at the same time; their exit codes, and what all of them said.

    Raises subprocess.TimeoutExpired after ``limit_s`` seconds; no command outlives the call.
    """
    logs = [folder / f"host-{host}" for host in range(len(launches))]
    processes = []
    for (command, environment), log in zip(launches, logs, strict=True):
        with log.open("w") as output:
            processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
    until_s = time.monotonic() + limit_s
    try:
        codes = [process.wait(max(0.0, until_s - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.terminate()  # torchrun ends its ranks
            process.wait()
        said = "\n".join(log.read_text(errors="replace") for log in logs)
        print(said)
    return codes, said


def places(world_size: int) -> Places:
    """Places for ``world_size`` ranks with real FlagCX; skips the test where there is no GPU or no FLAGCX_PATH."""
    if not torch.cuda.device_count() or not os.environ.get("FLAGCX_PATH"):
        pytest.skip("needs a GPU, and FLAGCX_PATH with real FlagCX")
    return Places(world_size, are_shared(world_size))
