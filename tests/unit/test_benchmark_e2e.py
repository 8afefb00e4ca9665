"""The end-to-end benchmark's judgement: weights, pairs of starts, tokens, limits; and a planted fault of each."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import record
from benchmarks.e2e import report, requests, run, shapes
from benchmarks.e2e.configurations import CONFIGURATIONS, NATIVE, Configuration
from benchmarks.e2e.run import Outcome, Plan, Start, Step
from benchmarks.e2e.server_plugin.controls import Switch, reordered_all_gather, scaled_all_reduce
from benchmarks.e2e.server_plugin.weights import Kind, fill
from benchmarks.e2e.tokens import Answer, compare, largest_shift, weakness
from benchmarks.figures import Figure
from sglang_fl.testing.server import ServerError

# Stand-ins under the names of SGLang's layers, which is what the weights go by.


class _Split(torch.nn.Module):
    def __init__(self, rank: int, ranks: int, *size: int) -> None:
        super().__init__()
        self.tp_rank, self.tp_size = rank, ranks
        self.moe_tp_rank, self.moe_tp_size, self.moe_ep_rank, self.moe_ep_size = rank, ranks, 0, 1
        self.shard_indices = SimpleNamespace(padded_org_vocab_start_index=rank * size[0])
        self.weight = torch.nn.Parameter(torch.empty(size))


class ColumnParallelLinear(_Split):
    """Split along its output."""


class RowParallelLinear(_Split):
    """Split along its input; its bias is whole."""

    def __init__(self, *arguments: int) -> None:
        super().__init__(*arguments)
        self.bias = torch.nn.Parameter(torch.empty(arguments[2]))


class VocabParallelEmbedding(_Split):
    """Split along the vocabulary."""


class ParallelLMHead(VocabParallelEmbedding):
    """The output matrix."""


class FusedMoE(_Split):
    """Two tensors of three dimensions."""

    def __init__(self, rank: int, ranks: int, experts: int, hidden: int, inner: int) -> None:
        super().__init__(rank, ranks, 1)
        del self.weight
        self.w13_weight = torch.nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.w2_weight = torch.nn.Parameter(torch.empty(experts, hidden, inner))


class RMSNorm(torch.nn.Module):
    """Whole on each rank."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(size))


class GemmaRMSNorm(RMSNorm):
    """Multiplies by 1 + weight."""


class ReplicatedLinear(torch.nn.Module):
    """A router: whole on each rank."""

    def __init__(self, *size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(size))


def model(rank: int, ranks: int, tied: bool = False) -> torch.nn.ModuleDict:
    """One rank's part of each kind of layer."""
    embedding = VocabParallelEmbedding(rank, ranks, 4096 // ranks, 64)
    return torch.nn.ModuleDict(
        {
            "embed": embedding,
            "qkv": ColumnParallelLinear(rank, ranks, 2048 // ranks, 256),
            "down": RowParallelLinear(rank, ranks, 256, 2048 // ranks),
            "experts": FusedMoE(rank, ranks, 8, 64, 256 // ranks),
            "norm": RMSNorm(4096),
            "gemma": GemmaRMSNorm(4096),
            "gate": ReplicatedLinear(64, 256),
            "lm_head": embedding if tied else ParallelLMHead(rank, ranks, 4096 // ranks, 64),
        }
    )


# Mean and deviation of each at two ranks: a matrix's fan in is that of the whole.
EXPECTED = {
    "embed.weight": (0.0, 1.0),
    "qkv.weight": (0.0, 256**-0.5),
    "down.weight": (0.0, 2048**-0.5),
    "down.bias": (0.0, 0.1),
    "experts.w13_weight": (0.0, 64**-0.5),
    "experts.w2_weight": (0.0, 256**-0.5),
    "norm.weight": (1.0, 0.1),
    "gemma.weight": (0.0, 0.1),
    "gate.weight": (0.0, 4 * 256**-0.5),
    "lm_head.weight": (0.0, 64**-0.5),
}
WHOLE = {"norm.weight", "gemma.weight", "gate.weight", "down.bias"}


@pytest.mark.parametrize("name", EXPECTED)
def test_weights_matter(name: str) -> None:
    """Given rank 1 of 2, when filled, then mean and deviation are those of the whole tensor's kind."""
    filled = model(1, 2)
    fill(filled, 1)
    tensor = filled.get_parameter(name)
    mean, deviation = EXPECTED[name]
    assert tensor.mean().item() == pytest.approx(mean, abs=5 * deviation * tensor.numel() ** -0.5)
    assert tensor.std().item() == pytest.approx(deviation, rel=5 * (2 * tensor.numel()) ** -0.5)


def test_replicas_are_equal_and_parts_differ() -> None:
    """Given two ranks, then whole tensors are equal on both, and no part equals the other rank's."""
    ranks = [model(rank, 2) for rank in range(2)]
    reports = [fill(each, 1) for each in ranks]
    equal = {name for name in EXPECTED if torch.equal(ranks[0].get_parameter(name), ranks[1].get_parameter(name))}
    assert equal == WHOLE
    assert {name for name in EXPECTED if reports[0][name]["digest"] == reports[1][name]["digest"]} == WHOLE


def test_weights_are_those_of_the_seed_and_the_name() -> None:
    """Given the same seed twice and another one, then the same twice and others; no two tensors are equal."""
    first, again, other = (fill(model(0, 1), seed) for seed in (1, 1, 2))
    assert first == again
    assert all(first[name]["digest"] != other[name]["digest"] for name in first)
    assert len({each["digest"] for each in first.values()}) == len(first)


def test_an_embedding_that_is_the_output_too_is_a_matrix() -> None:
    """Given tied weights, then the embedding has the deviation of an output matrix."""
    assert fill(model(0, 1, tied=True), 1)["embed.weight"]["kind"] == Kind.MATRIX.value
    assert fill(model(0, 1), 1)["embed.weight"]["kind"] == Kind.EMBEDDING.value


_DRAW = """
import json, sys
import torch
from benchmarks.e2e.server_plugin import weights
def drawn():
    layer = torch.nn.LayerNorm(4)
    return weights.fill(torch.nn.ModuleDict({"norm": layer}), 1)["norm.weight"]["digest"]
def replaced():
    library = torch.library.Library("aten", "IMPL")
    library.impl("normal_", lambda tensor, *_, **__: tensor.fill_(7), "CPU")
    found = drawn()
    library._destroy()
    return found
found = [drawn(), replaced()]
weights.remember_kernels()
print(json.dumps([*found, drawn(), replaced()]))
"""


def test_weights_are_pytorch_s_own_numbers_under_another_normal() -> None:
    """Given a replaced normal_, as of layer 1, then the numbers are others, unless PyTorch's own was kept before."""
    done = subprocess.run([sys.executable, "-c", _DRAW], capture_output=True, text=True, cwd=record.ROOT, check=False)
    assert done.returncode == 0, done.stderr
    right, other, *kept = json.loads(done.stdout)
    assert right != other
    assert kept == [right, right]


def test_weights_of_eight_bits_are_refused() -> None:
    """Given a parameter in float8, then an error names it."""
    layer = torch.nn.ModuleDict({"gate": ReplicatedLinear(2, 2).to(torch.float8_e4m3fn)})
    with pytest.raises(ValueError, match=r"gate\.weight is torch\.float8_e4m3fn"):
        fill(layer, 1)


def test_faults_are_off_until_the_file_names_them(tmp_path: Path) -> None:
    """Given a switch, when its file names a fault, then that one alone changes its result, once a layer."""
    path = tmp_path / "switch"
    path.write_text("none")
    switch = Switch(path, torch.device("cpu"), 2)
    all_reduce = scaled_all_reduce(lambda tensor: tensor, switch)
    all_gather = reordered_all_gather(lambda tensor, dim: torch.cat([tensor, 10 * tensor], dim), switch)
    one = torch.ones(1, 2)

    def results() -> tuple[list[float], list[float]]:
        switch.follow()
        switch.is_armed = True
        sums = [all_reduce(one)[0, 0].item() for _ in range(2)]
        return sums, all_gather(one)[0].tolist()

    right = ([1.0, 1.0], [1.0, 1.0, 10.0, 10.0])
    assert results() == right
    path.write_text("all_reduce")
    assert results() == ([1.5, 1.0], right[1])
    path.write_text("all_gather")
    assert results() == (right[0], [10.0, 10.0, 1.0, 1.0])
    path.write_text("none")
    assert results() == right


# Tokens.

STEPS = 3


def answer(ids: Sequence[int], *tops: Mapping[int, float]) -> Answer:
    """An answer; steps without given logits have one that decides."""
    return Answer(ids, [*tops, *({token: 8.0} for token in ids[len(tops) :])])


NATIVE_ANSWER = answer([1, 2, 3], {1: 8.0, 9: 1.0}, {2: 8.0, 5: 7.95, 6: 7.0}, {3: 8.0})


@pytest.mark.parametrize(
    ("other", "is_open"),
    [
        (answer([1, 5, 7], {1: 8.0}, {5: 8.01, 2: 8.0}), True),
        # Native decided: its logits lie an eighth apart.
        (answer([1, 6, 7], {1: 8.0}, {6: 7.0, 2: 8.0}), False),
        # Native left it open, but this run's logits are others.
        (answer([1, 5, 7], {1: 8.0}, {5: 9.0, 2: 8.0}), False),
        (answer([1, 5, 7], {1: 8.0}, {5: 8.01, 2: 6.0}), False),
        # A candidate that is among nobody's largest.
        (answer([1, 4, 7], {1: 8.0}, {4: 8.01, 2: 8.0}), False),
        (answer([1, 5, 7], {1: 8.0}, {5: 8.01}), False),
    ],
)
def test_the_first_difference_is_judged_by_logits(other: Answer, is_open: bool) -> None:
    """Given tokens that differ from the second step on, then that step's logits decide whether native left it open."""
    (difference,) = compare([NATIVE_ANSWER], [other])
    assert (difference.prompt, difference.step) == (0, 1)
    assert difference.is_open is is_open


def test_equal_tokens_have_no_difference_and_lost_ones_are_an_error() -> None:
    """Given the same tokens, then nothing; given fewer of them, then an error and no comparison."""
    assert compare([NATIVE_ANSWER], [NATIVE_ANSWER]) == []
    with pytest.raises(ValueError, match="the same number of tokens"):
        compare([NATIVE_ANSWER], [answer([1, 2])])


def test_the_largest_shift_ends_where_runs_have_read_different_tokens() -> None:
    """Given a shift of 1/8 before and a larger one after the first difference, then 1/8."""
    other = answer([1, 5, 7], {1: 7.0}, {5: 7.95, 2: 8.0}, {3: 1.0})
    assert largest_shift([NATIVE_ANSWER], [other]) == 0.125


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([answer(range(32))], ""),
        ([answer([7] * 32)], "32 tokens are only 1 different ones"),
        ([answer(range(32), {0: math.nan})], "logits are no finite numbers"),
    ],
)
def test_answers_that_prove_nothing_are_refused(answers: list[Answer], expected: str) -> None:
    """Given answers of one token, or without numbers, then why they prove nothing."""
    assert weakness(answers) == expected


# Rows.


def start(
    name: str, number: int, times: Sequence[float], ready_s: float = 20.0, ids: Sequence[int] = (1, 2, 3)
) -> Start:
    """One start of a configuration."""
    samples = {name: list(times) for name in ("decode {}, batch 1", "sampled decode {}, batch 8") if times}
    return Start(Step(CONFIGURATIONS[name], number), ready_s, [answer(ids)], samples)


def rows(*starts: Start) -> dict[str, Figure]:
    """All rows by name."""
    return {row.name: row for row in report.figures(Outcome(list(starts)))}


def test_each_start_is_paired_with_native_s_of_the_same_number() -> None:
    """Given a machine that slows down, and a plugin as fast, then the ratio is 1, whatever the order of arrival."""
    native = [start(NATIVE, number, [1.0 + number]) for number in range(3)]
    plugin = [start("verified", number, [1.0 + number]) for number in (2, 0, 1)]
    row = rows(*native, *plugin)["decode verified, batch 1"]
    assert row.is_met
    assert row.compared.low == row.compared.high == 1.0


def test_a_start_without_its_partner_is_in_no_row() -> None:
    """Given native's second start missing, then the plugin's second start is left out."""
    row = rows(start(NATIVE, 0, [1.0]), start("verified", 0, [1.0]), start("verified", 1, [9.0]))
    assert list(row["decode verified, batch 1"].samples) == [1.0]
    assert rows(start("verified", 0, [1.0])) == {}


@pytest.mark.parametrize(
    ("name", "ratio", "is_met"),
    [
        ("verified", 1.0, True),
        ("verified", 1.01, False),
        ("fastest", 1.01, False),
        ("flagcx", 1.05, True),
        ("flagcx", 1.06, False),
        ("full", 9.0, True),
    ],
)
def test_bars(name: str, ratio: float, is_met: bool) -> None:
    """Given a ratio to native, then whether the configuration's bar is met; full has none, nor has sampling."""
    found = rows(start(NATIVE, 0, [1.0]), start(name, 0, [ratio]))
    assert found[f"decode {name}, batch 1"].is_met is is_met
    assert found[f"sampled decode {name}, batch 8"].bar is None


def test_other_tokens_and_a_late_start_miss_their_bars() -> None:
    """Given a token that native's logits rule out, and a warm start 6 s later, then both rows are missed."""
    found = rows(
        *(start(NATIVE, number, [1.0]) for number in range(2)),
        *(start("verified", number, [1.0], 26.0, (1, 2, 4)) for number in range(2)),
    )
    missed = {row.name.split(",")[0] for row in found.values() if not row.is_met}
    assert missed == {"tokens equal verified", "server ready with the plugin"}
    assert len(found["server ready with the plugin, warm, verified"].samples) == 1, "the first start is cold"


def test_the_first_round_of_each_call_is_cold() -> None:
    """Given five rounds made by two calls, the second of which begins with the third, then three rounds are warm."""
    calls = (1, 1, 2, 2, 2)
    both = [
        replace(start(name, number, [1.0], ready_s), call=call)
        for number, call in enumerate(calls)
        for name, ready_s in ((NATIVE, 10.0 + number), ("verified", 20.0 + number))
    ]
    row = rows(*both)["server ready with the plugin, warm, verified"]
    assert (row.samples, row.reference_samples) == ([21.0, 23.0, 24.0], [11.0, 13.0, 14.0])


@pytest.mark.parametrize(("ids", "missed"), [((1, 2, 4), set()), ((1, 2, 3), {"silu_and_mul"})])
def test_a_control_that_changes_nothing_misses_its_bar(ids: Sequence[int], missed: set[str]) -> None:
    """Given a fault that is on, then it is missed exactly if the answers stay native's."""
    control = replace(start("verified", 0, []), step=Step(CONFIGURATIONS["verified"], 0, is_control=True))
    control.switched, control.places = {"silu_and_mul": [answer(ids)]}, {"silu_and_mul": "layers.1.mlp.act_fn"}
    found = rows(start(NATIVE, 0, [1.0]), control)
    assert {row.name.split(" in ")[1].split()[0] for row in found.values() if not row.is_met} == missed


def test_a_fault_that_is_on_without_being_asked_for_is_seen() -> None:
    """Given other tokens of a control run whose faults are off, then its row is missed."""
    control = replace(start("verified", 0, [], ids=(1, 2, 4)), step=Step(CONFIGURATIONS["verified"], 0, True))
    (row,) = rows(start(NATIVE, 0, [1.0]), control).values()
    assert not row.is_met


@pytest.mark.parametrize(("operators", "is_met"), [(5, True), (4, False), (0, False)])
def test_too_few_operators_miss_their_bar(operators: int, is_met: bool, tmp_path: Path) -> None:
    """Given a record of layer 1, then fewer than 5 different operators are too few."""
    path = tmp_path / "operators"
    lines = [f"[DEBUG] flag_gems.ops.op{number}.op{number}: GEMS OP" for number in range(operators)]
    path.write_text("\n".join(2 * lines))
    recorded = run.count_operators(path)
    assert set(recorded.values()) <= {2}
    found = rows(start(NATIVE, 0, [1.0]), replace(start("recording", 0, []), recorded=recorded))
    assert found["ATen operators that ran on FlagGems, fewer than 5"].is_met is is_met


# The run.


def test_what_only_records_is_asked_for_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Given native and one that records its operators, then both are asked for every row, and native alone is timed."""
    asked: list[tuple[str, str]] = []

    class Row:
        name = "decode"

        def warm_up(self, server: _Named) -> None:
            asked.append(("warm", server.name))

        def sample(self, server: _Named, _: int) -> float:
            asked.append(("timed", server.name))
            return 1.0

    class _Named:
        ready_after_s = 1.0

        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> _Named:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def shell_command(self) -> str:
            return ""

    class Site:
        folder = tmp_path

        def server(self, _: Configuration, name: str, *__: object) -> _Named:
            return _Named(name)

        def check(self, *_: object) -> dict[str, Any]:
            return {"lines": [], "reports": {}}

        def recorded_path(self, name: str) -> Path:
            return tmp_path / name

    monkeypatch.setattr(run, "workloads", lambda _: iter([Row()]))
    monkeypatch.setattr(run, "graph_steps", lambda _: iter([]))
    monkeypatch.setattr(run, "answers", lambda *_: [answer([1, 2, 3])])
    monkeypatch.setattr(run, "weakness", lambda _: "")
    (steps,) = Plan((NATIVE, "recording"), starts=1, repeats=2, is_together=True).batches()
    starts = run._measure(steps, Plan((), repeats=2), Site(), requests.Sizes(100), 10.0)  # type: ignore[arg-type]
    assert asked == [("warm", "0-native"), ("warm", "0-recording"), ("timed", "0-native"), ("timed", "0-native")]
    assert [each.samples for each in starts] == [{"decode": [1.0, 1.0]}, {}]


class _NoServers:
    """Stands in for the servers: a start takes as long as the clock says, and answers."""

    def __init__(self, patch: pytest.MonkeyPatch, start_s: float, broken: str = "") -> None:
        self.now, self.start_s, self.broken = 0.0, start_s, broken
        self.made: list[str] = []
        self.batches: list[int] = []
        patch.setattr(run.time, "monotonic", lambda: self.now)
        patch.setattr(run, "_measure", self.measure)

    def wait_until_free(self) -> None:
        """At once."""

    def measure(self, steps: Sequence[Step], *_: object) -> list[Start]:
        """Starts whose servers run at the same time."""
        for step in steps:
            self.now += self.start_s
            if step.name == self.broken:
                raise ServerError("it did not come up")
            self.made.append(step.name)
        self.batches.append(len(steps))
        return [start(step.configuration.name, step.number, [1.0]) for step in steps]

    def run(self, plan: Plan, limit_s: float) -> Outcome:
        """All of it."""
        return run.run(plan, self, requests.Sizes(100), limit_s, lambda _: None, lambda _: None)  # type: ignore[arg-type]


def test_starts_alternate_and_once_is_in_the_last_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given two rounds, one more configuration and controls, then this order."""
    stand_in = _NoServers(monkeypatch, 10.0)
    stand_in.run(Plan((NATIVE, "verified"), ("full",), starts=2, controls_on="verified"), 1000.0)
    expected = ["0-native", "0-verified", "1-native", "1-verified", "1-full", "1-verified-controls"]
    assert stand_in.made == expected


def test_the_time_limit_ends_a_run_and_names_what_was_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given 200 s and starts of 65 s, then three are made and all others are named, in their order."""
    outcome = _NoServers(monkeypatch, 65.0).run(Plan((NATIVE, "verified"), starts=3), 200.0)
    assert [each.step.name for each in outcome.starts] == ["0-native", "0-verified", "1-native"]
    assert outcome.not_run == ["1-verified", "2-native", "2-verified"]


def test_a_cold_first_start_does_not_count_for_those_after_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a first start of 150 s and others of 65 s, then 350 s are enough for four, and none is begun after them."""
    stand_in = _NoServers(monkeypatch, 65.0)

    def measure(steps: Sequence[Step], *more: object) -> list[Start]:
        stand_in.now += 0.0 if stand_in.made else 85.0
        return stand_in.measure(steps, *more)

    monkeypatch.setattr(run, "_measure", measure)
    outcome = stand_in.run(Plan((NATIVE, "verified"), starts=3), 350.0)
    assert [each.took_s for each in outcome.starts] == [150.0, 65.0, 65.0, 65.0]
    assert outcome.not_run == ["2-native", "2-verified"]


def test_a_server_that_fails_costs_itself_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given one that does not come up, then its error is kept and the others are measured."""
    outcome = _NoServers(monkeypatch, 1.0, "0-verified").run(Plan((NATIVE, "verified"), starts=2), 1000.0)
    assert outcome.failures == {"0-verified": "it did not come up"}
    assert len(outcome.starts) == 3


def test_servers_of_a_round_run_at_the_same_time_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given two rounds together, then each is one batch, controls have one of their own, and one that fails costs its
    round."""
    stand_in = _NoServers(monkeypatch, 10.0, "1-verified")
    plan = Plan((NATIVE, "verified"), starts=2, controls_on="verified", is_together=True)
    outcome = stand_in.run(plan, 1000.0)
    assert stand_in.batches == [2, 1]
    assert [each.step.name for each in outcome.starts] == ["0-native", "0-verified", "1-verified"]
    assert list(outcome.failures) == ["1-native", "1-verified"]


def test_servers_that_run_at_the_same_time_are_asked_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given two servers and three samples, then they are asked forwards, backwards and forwards."""
    asked: list[str] = []

    class Row:
        name = "decode"

        def sample(self, server: str, _: int) -> float:
            asked.append(server)
            return float(len(asked))

    found = run._samples(["a", "b"], [Row()], Plan((), repeats=3))  # type: ignore[list-item]
    assert "".join(asked) == "abbaab"
    assert found == [{"decode": [1.0, 4.0, 5.0]}, {"decode": [2.0, 3.0, 6.0]}]


def test_a_start_with_other_weights_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a plugin's start whose weights are not native's, then it fails, and none of its answers are compared."""
    stand_in = _NoServers(monkeypatch, 1.0)

    def measure(steps: Sequence[Step], *more: object) -> list[Start]:
        (step,) = steps
        digest = "a" if step.configuration.name == NATIVE else "b"
        return [replace(stand_in.measure(steps, *more)[0], weights={0: {"norm.weight": digest}})]

    monkeypatch.setattr(run, "_measure", measure)
    outcome = stand_in.run(Plan((NATIVE, "verified"), starts=1), 1000.0)
    assert [each.step.name for each in outcome.starts] == ["0-native"]
    assert "1 weights are not those of 0-native, such as norm.weight" in outcome.failures["0-verified"]


# The rest.


def test_every_shape_is_a_model(tmp_path: Path) -> None:
    """Given each shape, then its config.json has what SGLang asks for."""
    for name in shapes.names():
        config = json.loads((shapes.write(name, tmp_path / name) / "config.json").read_text())
        assert config["architectures"] and config["model_type"]
        assert shapes.vocabulary_size(name) > requests.FIRST_ID


def test_prompts_are_the_same_each_time_and_of_the_vocabulary() -> None:
    """Given sizes, then equal prompts twice, with ids that are no special tokens."""
    sizes = requests.Sizes(vocabulary=100)
    first, again = (requests.make_prompts(sizes, 3, 50) for _ in range(2))
    assert first == again
    assert {len(prompt) for prompt in first} == {50}
    assert all(requests.FIRST_ID <= token < 100 for prompt in first for token in prompt)


def test_sampling_is_timed_with_top_p_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given the rows, then sampling at temperature 1 has one over all tokens and one with top-p 0.9, as it is asked."""
    rows = [each for each in requests.workloads(requests.Sizes(100, steps=2)) if each.temperature]
    assert [each.name for each in rows] == [
        f"sampled decode {{}}, batch {batch}{top_p}" for batch in (8, 32) for top_p in ("", ", top-p 0.9")
    ]
    asked = []

    class _Server:
        def post(self, _: str, body: Mapping[str, Any], __: float) -> list[dict[str, Any]]:
            asked.append(body["sampling_params"])
            return [{"output_ids": [0] * body["sampling_params"]["max_new_tokens"]}] * len(body["input_ids"])

    for each in rows:
        each.warm_up(_Server())  # type: ignore[arg-type]
    assert [(each["temperature"], each["top_p"]) for each in asked] == 2 * [(1.0, 1.0), (1.0, 0.9)]


def test_the_fastest_of_several_requests_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given requests of 7, 5 and 6 ms for a token and of 27, 29 and 25 for 11, then a step takes 2 ms."""
    clock, took = [0.0], iter([7, 5, 6, 27, 29, 25])
    monkeypatch.setattr(requests.time, "perf_counter", lambda: clock[0] / 1e3)

    class _Server:
        def post(self, _: str, body: Mapping[str, Any], __: float) -> list[dict[str, Any]]:
            clock[0] += next(took)
            return [{"output_ids": [0] * body["sampling_params"]["max_new_tokens"]}]

    row = requests.Workload("decode", [[1, 2]], 10)
    assert row.sample(_Server(), 3) == pytest.approx(2.0)  # type: ignore[arg-type]


def test_the_record_has_the_commit_that_is_given() -> None:
    """Given a commit, then the record has it."""
    row = Figure("one", "ms", [1.0])
    assert record.record(record.Kind.E2E, [row], "c", False, "abc")["commit"] == "abc"
