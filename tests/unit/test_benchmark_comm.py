"""The benchmark of the routes, as far as a CPU goes: real ranks on hostcx and gloo, and its judgement of samples."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from benchmarks import bench_comm_gpu
from benchmarks.bench_binding import hostcx
from benchmarks.bench_comm_gpu import SIZES, best_of, figures, in_words
from benchmarks.bench_communicator import build_loop
from benchmarks.comm.measure import C_LOOP, Measured, Plan, measure, slowest
from benchmarks.comm.routes import BARE, FASTEST, FLAGCX, ONE_SHOT, PULL, PUSH, SGLANG, TORCH, TWO_SHOT
from sglang_fl.comm.graph_mixing import LIBRARIES
from sglang_fl.testing.ranks import RankContext, run_ranks


def made(**changed: float) -> Measured:
    """Samples of one size in which every bar is kept, but for what is changed."""
    graph = {
        FLAGCX: 6.0,
        BARE: 5.95,
        TORCH: 5.98,
        SGLANG: 4.2,
        TWO_SHOT: 6.2,
        FASTEST: 4.3,
        f"{FLAGCX}, registered": 4.6,
        f"{TWO_SHOT}, registered": 4.1,
        f"{FASTEST}, registered": 4.15,
    }
    host = {FLAGCX: 10.8, C_LOOP: 9.6, TORCH: 23.0, BARE: 10.0, FASTEST: 11.0}
    for name, value in changed.items():
        (host if name.startswith("host_") else graph)[name.removeprefix("host_")] = value
    samples = {name: [value] * 3 for name, value in graph.items()}
    return Measured({1024: samples}, host={name: [value] * 3 for name, value in host.items()})


def missed(found: Measured) -> list[str]:
    """Names of the rows that miss their bar."""
    return [figure.name for figure in figures(found) if not figure.is_met]


def test_rows_and_bars() -> None:
    """Given samples within every bar, then none is missed, and the rows are those of the bars, with their sizes."""
    assert missed(made()) == []
    names = [figure.name for figure in figures(made()) if figure.bar is not None]
    assert names == [
        "graph all_reduce flagcx, 1 KiB",
        "host all_reduce flagcx / c loop, 1 KiB",
        "host all_reduce flagcx / torch, 1 KiB",
        "graph all_reduce fastest, ordinary, 1 KiB",
        "graph all_reduce fastest, registered, 1 KiB",
    ]
    assert [in_words(size) for size in (SIZES[0], SIZES[5], SIZES[-1])] == ["1 KiB", "320 KiB", "64 MiB"]


@pytest.mark.parametrize(
    ("name", "value", "row"),
    [
        (FLAGCX, 6.1, "graph all_reduce flagcx, 1 KiB"),
        (f"host_{FLAGCX}", 11.2, "host all_reduce flagcx / c loop, 1 KiB"),
        (f"host_{TORCH}", 21.0, "host all_reduce flagcx / torch, 1 KiB"),
        (FASTEST, 4.4, "graph all_reduce fastest, ordinary, 1 KiB"),
        (SGLANG, 4.05, "graph all_reduce fastest, ordinary, 1 KiB"),
        (f"{FASTEST}, registered", 4.3, "graph all_reduce fastest, registered, 1 KiB"),
        (f"{FLAGCX}, registered", 4.0, "graph all_reduce fastest, registered, 1 KiB"),
    ],
)
def test_a_miss_is_reported(name: str, value: float, row: str) -> None:
    """Given one sample beyond its bar, or a better route than the one taken, then that row is missed."""
    assert row in missed(made(**{name: value}))


def test_the_best_route() -> None:
    """Given routes on both kinds of memory, then ordinary memory is held against those that take it, registered
    against all, and neither against mode fastest itself."""
    samples = made().graph[1024]
    assert best_of(samples, only_ordinary=True) == SGLANG
    assert best_of(samples, only_ordinary=False) == f"{TWO_SHOT}, registered"


def test_the_slowest_rank_counts() -> None:
    """Given two ranks, then each round has the longer of their samples."""
    one = Measured({1: {"a": [1.0, 5.0]}}, {1: {"a": [7.0]}}, {"b": [2.0, 2.0]}, {"x": "why"}, ("words",))
    other = Measured({1: {"a": [3.0, 4.0]}}, {1: {"a": [8.0]}}, {"b": [1.0, 9.0]})
    both = Measured({1: {"a": [3.0, 5.0]}}, {1: {"a": [8.0]}}, {"b": [2.0, 9.0]}, {"x": "why"}, ("words",))
    assert slowest([one, other]) == both


def test_it_runs_on_real_ranks(tmp_path: Path) -> None:
    """Given two ranks on hostcx and gloo, when everything is measured, then each route that is there has samples of
    each size, FlagCX and mode fastest of registered memory too, the others say why they are absent, and the rows can
    be made."""
    sizes = (1024, 65536)
    plan = Plan("cpu", sizes, {0: 2}, host_calls=3, rounds=2, c_loop=build_loop(tmp_path))
    environment = {
        "FLAGCX_PATH": str(hostcx()),
        "HOSTCX_QUIET": "1",
        "SGLANG_FL_COMM_MODE": "fastest",
        "SGLANG_FL_COMM_ROUTES": "all_reduce=torch:2KiB@ordinary",
    }
    found = slowest(run_ranks(measure, 2, plan, env=environment))
    there = {TORCH, FLAGCX, BARE, FASTEST, f"{FLAGCX}, registered", f"{FASTEST}, registered"}
    for size in sizes:
        assert set(found.graph[size]) == set(found.eager[size]) == there
        assert all(len(samples) == 2 and min(samples) > 0 for samples in found.graph[size].values())
    assert set(found.host) == {FLAGCX, BARE, TORCH, FASTEST, C_LOOP}
    assert set(found.absent) == {SGLANG, PUSH, PULL, ONE_SHOT, TWO_SHOT}
    assert "not on cuda" in found.absent[TWO_SHOT]
    assert found.words[0] == "all_reduce by size: torch:2048@ordinary|else flagcx"
    assert len([figure for figure in figures(found) if figure.bar is not None]) == 3 * len(sizes) + 2


def measure_as_on_a_gpu(context: RankContext, plan: Plan) -> tuple[str, ...]:
    """The words of a rank to whose device what belongs to NCCL is given."""
    LIBRARIES["cpu"] = LIBRARIES["cuda"]
    return (*measure(context, plan).words, os.environ["NCCL_GRAPH_MIXING_SUPPORT"])


def test_ranks_have_nccls_order_as_a_server_does(tmp_path: Path) -> None:
    """Given ranks on one host, then what a server would decide on NCCL's order is decided, set and told first."""
    plan = Plan("cpu", (1024,), {0: 2}, host_calls=3, rounds=1, c_loop=build_loop(tmp_path))
    environment = {
        "FLAGCX_PATH": str(hostcx()),
        "HOSTCX_QUIET": "1",
        "SGLANG_FL_COMM_MODE": "fastest",
        "SGLANG_FL_COMM_ROUTES": "all_reduce=torch:2KiB@ordinary",
        "NCCL_CONF_FILE": str(tmp_path / "none"),
        "NCCL_GRAPH_MIXING_SUPPORT": None,
    }
    for first, *_, value in run_ranks(measure_as_on_a_gpu, 2, plan, env=environment):
        assert first.startswith("NCCL_GRAPH_MIXING_SUPPORT=0 and ")
        assert value == "0"


@pytest.mark.parametrize("gpus", [0, 1])
def test_it_says_what_it_needs(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given fewer than two GPUs, then it ends with how many there are and what else is missing."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.delenv("FLAGCX_PATH", raising=False)
    with pytest.raises(RuntimeError, match=f"two GPUs or more, torch sees {gpus}, and FLAGCX_PATH, which is not set"):
        bench_comm_gpu.run()
