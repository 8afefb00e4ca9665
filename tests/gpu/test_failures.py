"""Two ranks with real FlagCX: rank 1 is killed or stopped, and rank 0 ends by itself and returns no value.

Each test has ten pairs of processes on the same one or two GPUs; see PAIRS_AT_ONCE. Run as a program, this file is one
rank.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.gpu.places import Places

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
LIMIT_S = 5.0
ALLOWANCE_S = 2.0
EXIT_CODE = 71
PAIRS = 10
# By whether ranks share a GPU. What spins there for a peer that is gone takes turns from all others.
PAIRS_AT_ONCE = {False: 10, True: 5}
SEED = 7
COUNT = 2**20
REDUCTIONS = 3  # in a graph
_START_LIMIT_S = 180.0
_PERIOD = 1000  # of the data, so that sums stay exact


# --- one rank ---


def _connect(rank: int, folder: Path) -> None:
    """As SGLang does, with the store in rank 0; the port is the system's choice."""
    place, limit = folder / "port", timedelta(seconds=_START_LIMIT_S)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
        place.with_suffix(".partial").write_text(str(store.port))
        place.with_suffix(".partial").rename(place)
    else:
        while not place.exists():
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(place.read_text()), is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)


def _eager(group: object, tensor: torch.Tensor) -> Callable[[], None]:
    return lambda: group.all_reduce(tensor)  # type: ignore[attr-defined]  # the package is not yet imported above


def _captured(group: object, tensor: torch.Tensor) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REDUCTIONS):
            group.all_reduce(tensor)  # type: ignore[attr-defined]
    return graph.replay


def _rank(mode: str, rank: int, folder: Path) -> None:
    """Reduce for ever; rank 1 says each number before it takes part, rank 0 each number with its value afterwards."""
    from sglang_fl.comm import CommunicatorFL
    from sglang_fl.comm.replays import watch_graphs

    (folder / f"imported-{rank}").touch()
    while not (folder / "admitted").exists():
        time.sleep(0.01)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    _connect(rank, folder)
    watch_graphs(LIMIT_S)
    group = CommunicatorFL(
        cpu_group=dist.new_group([0, 1], backend="gloo"),
        device_group=dist.new_group([0, 1], backend="nccl"),
        device=device,
        ranks=[0, 1],
        name="tp:0",
        operation_timeout_s=LIMIT_S,
    )
    assert group.backend == "flagcx"
    tensor = torch.zeros(COUNT, device=device)
    reduce = {"eager": _eager, "graph": _captured}[mode](group, tensor)
    said = os.open(folder / f"said-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    number = 0
    while True:
        tensor.fill_(float((rank + 1) * (number % _PERIOD + 1)))
        if rank == 1:
            os.write(said, f"{number}\n".encode())
        reduce()
        value = tensor[-1].item()
        if rank == 0:
            os.write(said, f"{number} {value}\n".encode())
        if number == 20:
            (folder / f"ready-{rank}").touch()
        number += 1


# --- the tests ---


@dataclass
class Pair:
    """Two ranks, and what became of the first of them."""

    mode: str
    folder: Path
    stand: Places
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    struck_s: float = 0.0
    ended_s: float | None = None

    def start(self) -> None:
        """Start both; they import what they need, and do not touch the GPU before :meth:`admit`."""
        self.folder.mkdir()
        (self.folder / "dumps").mkdir(mode=0o700)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "SGLANG_FL_DIST_BACKEND": "flagcx",
            "SGLANG_FL_COMM_DUMP_DIR": str(self.folder / "dumps"),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        for rank in range(2):
            command = [sys.executable, str(Path(__file__)), self.mode, str(rank), str(self.folder)]
            own = {**environment, **self.stand.environment(rank)}
            with (self.folder / f"output-{rank}").open("w") as output:
                process = subprocess.Popen(command, env=own, stdout=output, stderr=subprocess.STDOUT)
            self.processes.append(process)

    def admit(self) -> None:
        """Let both begin."""
        (self.folder / "admitted").touch()

    def is_at(self, stage: str) -> bool:
        """Whether both have "imported", or are "ready": have reduced a while."""
        return all((self.folder / f"{stage}-{rank}").exists() for rank in range(2))

    def strike(self, number: signal.Signals) -> None:
        """The fault."""
        self.struck_s = time.monotonic()
        os.kill(self.processes[1].pid, number)

    def end(self) -> None:
        """Kill what is left."""
        for process in self.processes:
            process.kill()
            process.wait()

    def problems(self) -> list[str]:
        """What is wrong with how rank 0 ended, and with the values that it returned."""
        output = (self.folder / "output-0").read_text(errors="replace")
        found = []
        if self.ended_s is None:
            found.append("rank 0 did not end")
        elif self.ended_s - self.struck_s > LIMIT_S + ALLOWANCE_S:
            found.append(f"rank 0 ended {self.ended_s - self.struck_s:.1f} s after the fault")
        if self.processes[0].returncode != EXIT_CODE:
            found.append(f"its exit code is {self.processes[0].returncode}")
        if "global rank 1 (process " not in output:
            found.append("it does not name rank 1")
        if not list((self.folder / "dumps").iterdir()):
            found.append("it left no dump")
        found += self._wrong_values()
        return [*found, output[-3000:]] if found else []

    def _wrong_values(self) -> list[str]:
        entered = int((self.folder / "said-1").read_text().split()[-1])
        factor = 3 * (2 ** (REDUCTIONS - 1) if self.mode == "graph" else 1)
        found = []
        for line in (self.folder / "said-0").read_text().splitlines():
            number, value = int(line.split()[0]), float(line.split()[1])
            if number > entered:
                found.append(f"rank 0 has a value of number {number}, rank 1 took part in {entered} at most")
            if value != factor * (number % _PERIOD + 1):
                found.append(f"number {number} gave {value}, not {factor * (number % _PERIOD + 1)}")
        return found[:5]


@pytest.fixture
def pairs(tmp_path: Path, two_places: Places) -> Iterator[list[Pair]]:
    """Pairs that do not outlive the test."""
    made = [Pair("", tmp_path / str(number), two_places) for number in range(PAIRS)]
    yield made
    for pair in made:
        pair.end()


def _wait_until(stage: str, pairs: list[Pair]) -> None:
    until_s = time.monotonic() + _START_LIMIT_S
    while not all(pair.is_at(stage) for pair in pairs):
        for pair in pairs:
            for rank, process in enumerate(pair.processes):
                output = (pair.folder / f"output-{rank}").read_text(errors="replace")[-3000:]
                assert process.poll() is None, f"rank {rank} ended too early\n{output}"
        assert time.monotonic() < until_s, f"not all pairs were {stage} in time"
        time.sleep(0.1)


def _watch(pairs: list[Pair], number: signal.Signals, chance: random.Random) -> None:
    """Strike each pair at a moment of its own, and note when its rank 0 ends."""
    start_s = time.monotonic()
    moments = {pair.folder: start_s + chance.uniform(0.0, 2.0) for pair in pairs}
    until_s = start_s + 2.0 + LIMIT_S + ALLOWANCE_S + 3.0
    while time.monotonic() < until_s and any(pair.ended_s is None for pair in pairs):
        for pair in pairs:
            if not pair.struck_s and time.monotonic() >= moments[pair.folder]:
                pair.strike(number)
            if pair.ended_s is None and pair.processes[0].poll() is not None:
                pair.ended_s = time.monotonic()
        time.sleep(0.005)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_rank_0_ends_and_returns_no_value(
    mode: str, number: signal.Signals, pairs: list[Pair], two_places: Places
) -> None:
    """Given ranks that reduce eagerly, or replay a graph of three reductions, when rank 1 is killed or stopped, then
    rank 0 ends with code 71 within the limit plus two seconds, names rank 1, leaves a dump, and has returned no value
    of a reduction that rank 1 did not take part in, ten times out of ten."""
    for pair in pairs:
        pair.mode = mode
        pair.start()
    _wait_until("imported", pairs)
    chance = random.Random(SEED)
    at_once = PAIRS_AT_ONCE[two_places.is_shared]
    for first in range(0, PAIRS, at_once):
        lot = pairs[first : first + at_once]
        for pair in lot:
            pair.admit()
        _wait_until("ready", lot)
        _watch(lot, number, chance)
        for pair in lot:
            pair.end()
    problems = {pair.folder.name: found for pair in pairs if (found := pair.problems())}
    text = "\n\n".join(f"pair {name}: " + "\n".join(found) for name, found in problems.items())
    assert not problems, f"{len(problems)} of {PAIRS} pairs, seed {SEED}\n{text}"


if __name__ == "__main__":
    _rank(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
