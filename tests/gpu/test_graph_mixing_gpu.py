"""Without NCCL's order between graphs and other calls, one stream's order is enough on one host: sums are exact."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sglang_fl.comm import CommunicatorFL
from sglang_fl.comm.graph_mixing import prepare
from sglang_fl.config import load_settings
from sglang_fl.devices import detect_platform
from sglang_fl.testing.ranks import RankContext, run_ranks
from tests.gpu.places import Places

pytestmark = pytest.mark.gpu

SIZES = (256, 2**14, 2**18, 2**21)  # of float32: NCCL takes another protocol for each
TURNS = 400
CALLS = 4  # in a graph; each doubles
LATE_CYCLES = 300_000


class Captured:
    """A tensor of one size, and a graph that fills it from a source and sums it several times."""

    def __init__(self, group: CommunicatorFL, source: torch.Tensor, size: int) -> None:
        self.tensor = torch.zeros(size, device=group.device)
        group.all_reduce(self.tensor)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.tensor.copy_(source.expand(size))
            for _ in range(CALLS):
                group.all_reduce(self.tensor)
        torch.cuda.synchronize()


def wrong_turns(context: RankContext) -> tuple[str, list[int]]:
    """Replays and calls of one group in turn, on one stream, the host far ahead; the turns with a wrong element."""
    decision = prepare(load_settings(platform=detect_platform()), "cuda", hosts=1)
    assert decision is not None
    torch.cuda.set_device(context.local_rank)
    ranks = list(range(context.world_size))
    group = CommunicatorFL(
        cpu_group=dist.new_group(ranks, backend="gloo"),
        device_group=dist.new_group(ranks, backend="nccl"),
        device=f"cuda:{context.local_rank}",
        ranks=ranks,
        name="tp:0",
    )
    assert group.backend == "flagcx"
    source = torch.zeros(1, device=group.device)
    graphs = [Captured(group, source, size) for size in SIZES]
    eager = [torch.zeros(size, device=group.device) for size in SIZES]
    ends = torch.zeros(TURNS, 4, device=group.device)
    for turn in range(TURNS):
        one, other = graphs[turn % len(SIZES)], eager[turn // 2 % len(SIZES)]
        if turn % 3 == context.rank:
            torch.cuda._sleep(LATE_CYCLES)  # the peer waits within its kernel, and this host runs ahead
        source.fill_(float(turn + context.rank))
        one.graph.replay()
        other.fill_(float(turn + 2 * context.rank))
        group.all_reduce(other)
        ends[turn].copy_(torch.stack([one.tensor.amin(), one.tensor.amax(), other.amin(), other.amax()]))
    torch.cuda.synchronize()
    turns = torch.arange(TURNS, dtype=torch.float32)
    in_graph, outside = (2 * turns + 1) * 2 ** (CALLS - 1), 2 * turns + 2
    wanted = torch.stack([in_graph, in_graph, outside, outside], dim=1)
    wrong = (ends.cpu() != wanted).any(dim=1).nonzero().flatten().tolist()
    dist.barrier()
    return decision.line(), wrong


def test_replays_and_calls_beside_them_are_exact(two_places: Places, tmp_path: Path) -> None:
    """Given two GPUs of one host, when replays and other calls of a group follow each other on one stream, the ranks
    now and then late, then NCCL has read 0, connects the GPUs by P2P or shared memory alone, and every sum is exact."""
    if two_places.is_shared:
        pytest.skip("two ranks on one GPU are two hosts to NCCL, for which its order stays")

    def environment(rank: int) -> dict[str, str | None]:
        return {
            "SGLANG_FL_DIST_BACKEND": "flagcx",
            "FLAGCX_PATH": os.environ["FLAGCX_PATH"],
            "NCCL_GRAPH_MIXING_SUPPORT": None,
            "NCCL_NET_DISABLE_INTRA": None,
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,ENV,P2P,SHM,NET",
            "NCCL_DEBUG_FILE": str(tmp_path / f"nccl.{rank}"),
            **two_places.environment(rank),
        }

    for rank, (line, wrong) in enumerate(
        run_ranks(wrong_turns, 2, env=environment, start_method="spawn", timeout_s=180.0)
    ):
        assert line.startswith("NCCL_GRAPH_MIXING_SUPPORT=0 and NCCL_NET_DISABLE_INTRA=1 set: "), line
        assert wrong == []
        log = (tmp_path / f"nccl.{rank}").read_text()
        assert "NCCL_GRAPH_MIXING_SUPPORT set by environment to 0" in log
        assert "via P2P" in log or "via SHM" in log
        assert "via NET" not in log
