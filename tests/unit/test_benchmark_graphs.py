"""The GPU's time of a decode step: which replays are timed, by whom, and what becomes of a server without graphs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.e2e import graphs, report, requests, run, servers
from benchmarks.e2e.configurations import CONFIGURATIONS, NATIVE
from benchmarks.e2e.run import Outcome, Plan, Start, Step
from benchmarks.e2e.server_plugin import graphs as in_server
from benchmarks.e2e.tokens import Answer
from benchmarks.figures import Bar, Figure
from sglang_fl.testing.server import ServerError

# In the server: stand-ins for a stream whose clock moves with each replay, and for SGLang's runner of graphs.


@dataclass
class _Device:
    """A stream: each replay takes 2 ms, and 1 ms more in each warm-up."""

    now_ms: float = 0.0
    replays: int = 0
    waits: int = 0

    def Event(self, enable_timing: bool) -> _Event:  # noqa: N802 - as torch names it
        assert enable_timing
        return _Event(self)

    def replay(self) -> None:
        """One of a graph's."""
        self.replays += 1
        self.now_ms += 3.0 if self.replays <= in_server.WARM_UP else 2.0


@dataclass
class _Event:
    device: _Device
    at_ms: float = -1.0

    def record(self) -> None:
        """Now."""
        self.at_ms = self.device.now_ms

    def synchronize(self) -> None:
        """It was recorded."""
        assert self.at_ms >= 0
        self.device.waits += 1

    def elapsed_time(self, later: _Event) -> float:
        """Milliseconds."""
        return later.at_ms - self.at_ms


class _Runner:
    """Its own replay notes the batch and takes no time."""

    def __init__(self, graph: Any, batches: Sequence[int] = (1, 8)) -> None:
        self.graphs = dict.fromkeys(batches, graph)
        self.raw_bs = 0
        self.steps: list[int] = []

    def replay(self, batch: int, *, skip: bool = False) -> tuple[int, bool]:
        """As SGLang's: a step."""
        self.raw_bs = batch
        self.steps.append(batch)
        return batch, skip


def test_one_step_is_measured_and_sglang_s_own_method_is_back(tmp_path: Path) -> None:
    """Given steps of several batches, then behind the third of batch 8 its graph is replayed, once, and timed alone."""
    device, path = _Device(), tmp_path / "graph.rank0"
    runner = _Runner(device)
    own = runner.replay
    in_server.follow({"batch": 8, "step": 3}, runner, device, path)
    found = [runner.replay(batch, skip=True) for batch in (8, 1, 8)]
    assert not path.exists() and device.replays == 0
    found += [runner.replay(batch, skip=True) for batch in (8, 8, 8)]
    assert found == [(batch, True) for batch in (8, 1, 8, 8, 8, 8)] and len(runner.steps) == 6
    assert json.loads(path.read_text()) == {"us": [2000.0] * in_server.SPANS}, "a warm-up replay would add to it"
    assert (device.replays, device.waits) == (in_server.WARM_UP + in_server.SPANS * in_server.REPLAYS, 1)
    assert runner.replay == own
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("runner", "reason"),
    [
        (None, "no graph here: SGLang decodes without graphs"),
        (_Runner(_Device(), (1, 2)), "no graph here: SGLang captured none for batch 8, but for 1, 2"),
        (_Runner(print), "no graph here: what _Runner keeps cannot be replayed"),
    ],
)
def test_without_a_graph_the_reason_is_written_at_once(runner: _Runner | None, reason: str, tmp_path: Path) -> None:
    """Given no graph of the batch, then the report says why, and nothing is put in the place of SGLang's method."""
    path = tmp_path / "graph.rank1"
    in_server.follow({"batch": 8, "step": 1}, runner, _Device(), path)
    assert json.loads(path.read_text()) == {"absent": reason}
    assert runner is None or "replay" not in vars(runner)


def test_only_its_own_orders_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given SGLang's own requests, then its method answers them; an order is answered, and each rank has its file."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    scheduler = SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(device="cpu", graph_runner=None))
    )

    def original(*given: Any) -> tuple[Any, ...]:
        return given

    other = SimpleNamespace(server_args={"pp_max_micro_batch_size": 8})
    assert in_server.take_order(original, scheduler, other) == (scheduler, other)
    order = SimpleNamespace(server_args={in_server.KEY: {"batch": 1, "step": 1, "path": str(tmp_path / "graph")}})
    assert in_server.take_order(original, scheduler, order).updated
    assert [each.name for each in tmp_path.iterdir()] == ["graph.rank3"]


# Beside the server.


@dataclass
class _Server:
    """Stands in for a server of two ranks: writes ``reports`` where it is told, at the order or at the request."""

    folder: Path
    reports: Mapping[int, Sequence[float]] = field(default_factory=dict)
    reason: str = ""
    world_size: int = 2
    asked: list[str] = field(default_factory=list)
    order: dict[str, Any] = field(default_factory=dict)

    def log_path(self) -> Path:
        """Of the start."""
        return self.folder / "0-layers-12.log"

    def post(self, path: str, body: Mapping[str, Any], _: float = 0.0) -> Any:
        """An order, or a request for tokens."""
        self.asked.append(path)
        if path == "/set_internal_state":
            self.order = body["server_args"][in_server.KEY]
            self._write({rank: {"absent": self.reason} for rank in range(2)} if self.reason else {})
            return [True]
        assert len(body["input_ids"]) == self.order["batch"]
        assert self.order["step"] < body["sampling_params"]["max_new_tokens"]
        self._write({rank: {"us": list(spans)} for rank, spans in self.reports.items()})
        return []

    def _write(self, reports: Mapping[int, Any]) -> None:
        for rank, content in reports.items():
            Path(f"{self.order['path']}.rank{rank}").write_text(json.dumps(content))


def graph_step(batch: int = 8) -> graphs.GraphStep:
    """One row."""
    return next(each for each in graphs.graph_steps(requests.Sizes(100)) if len(each.prompts) == batch)


def test_a_step_takes_as_long_as_its_slowest_rank(tmp_path: Path) -> None:
    """Given spans of two ranks, then the larger of each span, and of these the median."""
    server = _Server(tmp_path, {0: [10.0, 30.0, 11.0], 1: [20.0, 5.0, 12.0]})
    assert graph_step().sample(server) == 20.0  # type: ignore[arg-type]
    assert server.asked == ["/set_internal_state", "/generate"]


def test_a_rank_that_does_not_measure_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given an old report of rank 1 and no new one, then an error names the file, and what can be done."""
    monkeypatch.setattr(graphs, "REPORT_WAIT_S", 0.05)
    server = _Server(tmp_path, {0: [10.0]})
    (tmp_path / "0-layers-12.graph.rank1").write_text('{"us": [1.0]}')
    with pytest.raises(ServerError, match=r"^gpu decode, batch 8: 0-layers-12\.graph\.rank1 did not .* with --rows"):
        graph_step().sample(server)  # type: ignore[arg-type]


def start(name: str, number: int, samples: Sequence[float] = (), reason: str = "") -> Start:
    """One with GPU times at batch 1, or without them."""
    row = "gpu decode {}, batch 1"
    answers = [Answer([1, 2], [{1: 8.0}, {2: 8.0}])]
    times = {row: list(samples)} if samples else {}
    return Start(Step(CONFIGURATIONS[name], number), 1.0, answers, times, {row: reason} if reason else {})


@pytest.mark.parametrize("reason", ["no graph here: x", ""])
def test_servers_are_measured_in_turns_and_those_without_graphs_say_why(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given two servers of which one may have no graph, then the others' samples are there, and of it the reason."""
    asked: list[str] = []

    class _Row:
        name = "gpu decode {}, batch 1"

        def warm_up(self, server: str) -> str:
            return reason if server == "b" else ""

        def sample(self, server: str, _: int) -> float:
            asked.append(server)
            return float(len(asked))

    monkeypatch.setattr(run, "graph_steps", lambda _: iter([_Row()]))
    site = servers.Site(tmp_path, tmp_path, tmp_path, 1, True)
    measured = [("a", start(NATIVE, 0)), ("b", start("verified", 0))]
    run._add_graph_times(measured, Plan((), repeats=2), site, requests.Sizes(100))  # type: ignore[arg-type]
    assert "".join(asked) == ("aa" if reason else "abba")
    first, second = (each for _, each in measured)
    assert first.samples == {_Row.name: [1.0, 2.0] if reason else [1.0, 4.0]} and not first.absent
    assert (second.samples, second.absent) == (({}, {_Row.name: reason}) if reason else ({_Row.name: [2.0, 3.0]}, {}))


@pytest.mark.parametrize(("sizes", "words"), [({"pp": 2}, "with stages"), ({"has_dp_attention": True}, "with DP")])
def test_steps_that_are_no_single_graph_are_not_asked_for(sizes: dict[str, Any], words: str, tmp_path: Path) -> None:
    """Given stages or DP attention, then no server is asked, and each row says why."""
    site = servers.Site(tmp_path, tmp_path, tmp_path, 2, True, **sizes)
    server, found = _Server(tmp_path), start(NATIVE, 0)
    run._add_graph_times([(server, found)], Plan(()), site, requests.Sizes(100))  # type: ignore[list-item]
    assert server.asked == []
    assert list(found.absent) == [f"gpu decode {{}}, batch {batch}" for batch in (1, 8, 32)]
    assert all(reason.startswith(words) for reason in found.absent.values())


def test_a_server_without_graphs_is_not_asked_for_tokens(tmp_path: Path) -> None:
    """Given the reason of a rank, then the warm-up gives it, and asks no further; with a graph it measures once."""
    server = _Server(tmp_path, reason="no graph here: x")
    assert graph_step().warm_up(server) == "no graph here: x"  # type: ignore[arg-type]
    assert server.asked == ["/set_internal_state"]
    server = _Server(tmp_path, {0: [1.0], 1: [1.0]})
    assert graph_step().warm_up(server) == ""  # type: ignore[arg-type]
    assert server.asked == ["/set_internal_state", "/generate"]


# Rows.


def rows(*starts: Start) -> dict[str, Figure]:
    """Those of the GPU's time by name."""
    return {row.name: row for row in report.figures(Outcome(list(starts))) if row.name.startswith("gpu")}


@pytest.mark.parametrize(("name", "limit"), [("verified", 1.0), ("fastest", 1.0), ("flagcx", 1.05), ("full", None)])
def test_each_sample_is_paired_and_the_bar_is_that_of_decode(name: str, limit: float | None) -> None:
    """Given two starts of which the second is slower, then pairs by start and repeat, in us, under decode's bar."""
    native = [start(NATIVE, 0, [100.0, 102.0]), start(NATIVE, 1, [200.0, 204.0])]
    plugin = [start(name, 1, [200.0, 204.0]), start(name, 0, [100.0, 102.0])]
    (row,) = rows(*native, *plugin).values()
    assert (row.name, row.unit, row.reference) == (f"gpu decode {name}, batch 1", "us", report.REFERENCE)
    assert row.bar == (None if limit is None else Bar.ratio_at_most(limit))
    assert row.compared.low == row.compared.high == 1.0
    slower = [start(name, 0, [101.0, 103.1]), start(name, 1, [202.0, 206.1])]
    assert rows(*native, *slower)[row.name].is_met is (name in ("flagcx", "full"))


def test_a_graph_that_the_plugin_took_away_misses_a_bar() -> None:
    """Given native alone with a graph, then that is missed; given neither with one, then there is only a reason."""
    lost = [start(NATIVE, 0, [1.0]), start("verified", 0, reason="no graph here: x")]
    (row,) = rows(*lost).values()
    assert row.name == "gpu decode verified, batch 1: starts without a graph where native has one" and not row.is_met
    none = [start(name, 0, reason="no graph here: x") for name in (NATIVE, "verified")]
    assert rows(*none) == {}
    expected = {"gpu decode verified, batch 1": "no graph here: x"}
    assert report.absent(Outcome(lost)) == report.absent(Outcome(none)) == expected


def test_a_graph_that_only_the_plugin_has_is_in_no_row() -> None:
    """Given native without a graph, then the plugin's times stand beside nothing, and the reason is native's."""
    starts = [start(NATIVE, 0, reason="no graph here: x"), start("verified", 0, [1.0])]
    assert rows(*starts) == {}
    expected = {"gpu decode verified, batch 1": "SGLang alone: no graph here: x"}
    assert report.absent(Outcome(starts)) == expected


@pytest.mark.parametrize("kinds", [requests.ROWS, ("decode", "gpu decode"), ("sampled decode", "prefill"), ()])
def test_only_the_rows_that_are_wanted_are_asked_for(kinds: tuple[str, ...]) -> None:
    """Given kinds of rows, then those and no others, with their numbers of rows."""
    sizes = requests.Sizes(100, rows=kinds)
    names = [each.name for each in (*requests.workloads(sizes), *graphs.graph_steps(sizes))]
    counts = {"decode": 3, "sampled decode": 4, "prefill": 1, "gpu decode": 3}
    assert {kind: sum(name.startswith(f"{kind} {{}}") for name in names) for kind in counts} == {
        kind: count if kind in kinds else 0 for kind, count in counts.items()
    }
    assert len(names) == sum(counts[kind] for kind in kinds)
