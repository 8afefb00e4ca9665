"""Graphs with FlagCX calls of two ranks: a replay is recorded, watched, and ends its process when a peer is gone."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sglang_fl.comm import CommunicatorFL, dump_calls
from sglang_fl.comm.difference import compare
from sglang_fl.comm.dump_files import choose_dumps
from sglang_fl.comm.dumps import PATTERN
from sglang_fl.comm.monitor import EXIT_CODE, MONITOR
from sglang_fl.comm.replays import watch_graphs
from sglang_fl.testing.ranks import FailureKind, RankContext, RanksFailed, run_ranks
from tests.gpu.places import Places

pytestmark = pytest.mark.gpu

LIMIT_S = 4.0
SIZE = 2**20
REPLAYS = 5
START_AND_RUN_S = 120.0


@pytest.fixture
def folder() -> Iterator[Path]:
    """Private, for the dumps."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def run(stand: Places, function: Callable[..., object], folder: Path, *arguments: object) -> list[object]:
    """Run ``function`` on the ranks, with their dumps in ``folder``."""
    common = {
        "SGLANG_FL_DIST_BACKEND": "flagcx",
        "FLAGCX_PATH": os.environ["FLAGCX_PATH"],
        "SGLANG_FL_COMM_DUMP_DIR": str(folder),
        "SGLANG_FL_COMM_TIMEOUT_S": f"{LIMIT_S}",
    }

    def environment(rank: int) -> dict[str, str]:
        return {**common, **stand.environment(rank)}

    return run_ranks(
        function, stand.world_size, *arguments, env=environment, start_method="spawn", timeout_s=START_AND_RUN_S
    )


class Captured:
    """A group, and a graph with three all_reduces of it."""

    def __init__(self, context: RankContext) -> None:
        torch.cuda.set_device(context.local_rank)
        ranks = list(range(context.world_size))
        watch_graphs(LIMIT_S)
        self.group = CommunicatorFL(
            cpu_group=dist.new_group(ranks, backend="gloo"),
            device_group=dist.new_group(ranks, backend="nccl"),
            device=f"cuda:{context.local_rank}",
            ranks=ranks,
            name="tp:0",
        )
        assert self.group.backend == "flagcx"
        self.tensor = torch.zeros(SIZE, device=f"cuda:{context.local_rank}")
        self.group.all_reduce(self.tensor)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for _ in range(3):
                self.group.all_reduce(self.tensor)

    def replay(self, value: float) -> float:
        """The sum of the sum of the sum, exact for small numbers."""
        self.tensor.fill_(value)
        self.graph.replay()
        return float(self.tensor[-1].item())


def replay_and_look(context: RankContext) -> tuple[list[float], int]:
    """Values of each replay, and the number of the last replay that the monitor saw done."""
    captured = Captured(context)
    values = [captured.replay(float(turn + context.rank)) for turn in range(REPLAYS)]
    until_s, done = time.monotonic() + 10, 0
    while done < REPLAYS and time.monotonic() < until_s:
        time.sleep(0.1)
        done = max((one.done for one in MONITOR.watched() if one.recorder.name == "tp:0 flagcx graphs"), default=0)
    dump_calls()
    dist.barrier()
    return values, done


def test_each_replay_is_recorded_and_seen_done(two_places: Places, folder: Path) -> None:
    """Given a graph of three all_reduces, when it is replayed with new data, then values are exact, each replay is a
    call that names its range, the monitor sees the last one done, and the ranks' dumps are equal."""
    results = run(two_places, replay_and_look, folder)
    wanted = [4.0 * (2 * turn + 1) for turn in range(REPLAYS)]
    assert results == [(wanted, REPLAYS)] * 2
    for path in folder.glob(PATTERN):
        records = {record["name"]: record for record in json.loads(path.read_text())["recorders"]}
        replays = records["tp:0 flagcx graphs"]["calls"]
        first, last = (int(number) for number in re.findall(r"calls (\d+) to (\d+)", replays[0]["operation"])[0])
        assert last - first == 2 and len(replays) == REPLAYS
        captured = [call["number"] for call in records["tp:0 flagcx"]["calls"] if call["captured"]]
        assert captured == list(range(first, last + 1))
    assert compare(choose_dumps([folder]).dumps).differences == ()


def lose_a_peer(context: RankContext, number: int, folder: Path) -> float:
    """Rank 1 gets a signal between replays; rank 0 replays on and must never see a value."""
    captured = Captured(context)
    assert captured.replay(1.0) == 8.0
    dist.barrier()
    if context.rank == 1:
        (folder / "struck").write_text(repr(time.time()))
        os.kill(os.getpid(), number)
    return captured.replay(2.0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["SIGKILL", "SIGSTOP"])
def test_a_replay_without_its_peer_ends_the_process(
    two_places: Places, folder: Path, number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    """Given rank 1 killed or stopped, when rank 0 replays, then it ends with code 71 in time, names rank 1 and the
    replay, and never returns a value."""
    with pytest.raises(RanksFailed) as raised:
        run(two_places, lose_a_peer, folder, number, folder)
    ended = next(failure for failure in raised.value.failures if failure.rank == 0)
    assert ended.kind is FailureKind.EXITED and f"exited with code {EXIT_CODE} " in ended.text, ended.text
    assert raised.value.results[0] is None
    said = capfd.readouterr().err
    gone = r"is stopped" if number is signal.SIGSTOP else r"(was killed|has ended)"
    assert re.search(rf"replay of graph 1, calls \d+ to \d+.*global rank 1 \(process \d+ on \S+\) {gone}", said), said
    (path,) = folder.glob(PATTERN)
    took_s = json.loads(path.read_text())["time_s"] - float((folder / "struck").read_text())
    assert took_s < LIMIT_S + 2
