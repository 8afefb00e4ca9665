"""bisect without servers: halving, comparing, the settings of a start, and what its log says."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from sglang_fl.bisect.comparison import LEAST_TOLERANCE, NOISE_FACTOR, Outcome, Tolerance, compare, tolerance_of
from sglang_fl.bisect.evidence import layer_states
from sglang_fl.bisect.parts import (
    Configured,
    Part,
    Setup,
    is_plugin_selected,
    own_backend,
    without_plugin,
)
from sglang_fl.bisect.questions import Answer, AnswerError, ask, sequences_of
from sglang_fl.bisect.search import first_bad, most_asked
from sglang_fl.bisect.server import ArgumentsError, LaunchedServer, usable_arguments
from sglang_fl.cli import frame
from sglang_fl.config import load_settings
from tests.unit.bisect_cases import SECOND, answer, answers

# ---------------------------------------------------------------- halving


@pytest.mark.parametrize("assumed", [0, 1, 7])
def test_halving_finds_every_culprit_within_the_promised_number(assumed: int) -> None:
    """Given n items of which one is bad, when searched, then it is found, in no more questions than promised."""
    for count in range(assumed + 1, 40):
        for culprit in range(count):
            asked: list[int] = []

            def is_good(number: int, culprit: int = culprit, asked: list[int] = asked) -> bool:
                asked.append(number)
                return number <= culprit

            assert first_bad(count, is_good, assumed) == culprit
            assert len(asked) <= most_asked(count, assumed), (count, culprit)
            assert len(set(asked)) == len(asked)
            assert not {0, count} & set(asked)


def test_what_is_found_holds_even_if_badness_comes_and_goes() -> None:
    """Given answers without order, when searched, then without the item it was good and with it it was bad."""
    for pattern in range(1, 2**9, 2):
        good = [not pattern >> number & 1 for number in range(9, -1, -1)]
        good[0] = True
        found = first_bad(9, lambda number, good=good: good[number])
        assert good[found]
        assert not good[found + 1]


# ---------------------------------------------------------------- comparing


def switched(one: Answer, place: int) -> Answer:
    """The answer with the runner-up at ``place``."""
    tokens = (*one.tokens[:place], SECOND, *one.tokens[place + 1 :])
    candidates = list(one.candidates)
    candidates[place] = {SECOND: one.given[place], one.tokens[place]: one.given[place] - 0.001}
    return replace(one, tokens=tokens, candidates=tuple(candidates))


TIGHT = Tolerance(LEAST_TOLERANCE, 0.0)


def test_equal_answers_are_equal() -> None:
    """Given the same answers, then equal, off by nothing."""
    found = compare(answers(answer()), answers(answer()), TIGHT)
    assert (found.outcome, found.deviation, found.first) == (Outcome.EQUAL, 0.0, "")


@pytest.mark.parametrize(("shift", "outcome"), [(0.5e-4, Outcome.EQUAL), (2e-4, Outcome.DIFFERS)])
def test_values_differ_beyond_the_tolerance(shift: float, outcome: Outcome) -> None:
    """Given equal tokens and moved values, then it differs from the tolerance on, and the first value is named."""
    found = compare(answers(answer()), answers(answer(shift=shift)), TIGHT)
    assert found.outcome is outcome
    assert found.deviation == pytest.approx(shift)
    if outcome is Outcome.DIFFERS:
        assert found.first == "prompt 1, log probability of token 2 of prompt and answer: -2.9998, native -3"


def test_a_value_that_is_no_number_differs() -> None:
    """Given NaN in an answer, then it differs."""
    broken = replace(answer(), given=(-2.0, math.nan, -2.0))
    assert compare(answers(answer()), answers(broken), TIGHT).outcome is Outcome.DIFFERS


@pytest.mark.parametrize(("gap", "outcome"), [(0.015, Outcome.ROUNDING), (0.016, Outcome.DIFFERS)])
def test_another_token_is_rounding_only_in_a_tie(gap: float, outcome: Outcome) -> None:
    """Given another second token, then 2^-7 of the larger value, here 2.016 or less, decides between both."""
    native = answer(gap=gap)
    found = compare(answers(native), answers(native, batched=switched(native, 1)), TIGHT)
    assert found.outcome is outcome
    assert found.first.startswith(
        f"prompt 1, token 2: {SECOND}, native has 6; {SECOND} is less likely by {gap:.2g} there"
    )


def test_a_tie_in_native_that_the_other_is_sure_of_is_a_fault() -> None:
    """Given native's tie, when the other prefers the second by far, then it differs."""
    native = answer(gap=0.001)
    other = switched(native, 1)
    sure = list(other.candidates)
    sure[1] = {SECOND: -2.0, 6: -2.5}
    found = compare(answers(native), answers(native, batched=replace(other, candidates=tuple(sure))), TIGHT)
    assert found.outcome is Outcome.DIFFERS


def test_values_after_another_token_are_not_compared() -> None:
    """Given a tie at the first token, then what follows it, after another text, does not count."""
    native = answer(gap=0.001)
    other = replace(switched(native, 0), given=(-2.0, -9.0, -9.0))
    assert compare(answers(native), answers(native, batched=other), TIGHT).outcome is Outcome.ROUNDING


def test_the_tolerance_follows_natives_own_rounding() -> None:
    """Given native that differs from itself in a batch or reading, then three times that is rounding."""
    assert tolerance_of(answers(answer())) == TIGHT
    by_batch = tolerance_of(answers(answer(), batched=answer(shift=0.02)))
    assert by_batch.limit == pytest.approx(NOISE_FACTOR * 0.02)
    assert tolerance_of(answers(answer(), read_shift=-0.05)).noise == pytest.approx(0.05)
    assert tolerance_of(answers(answer(), read_shift=-0.05), limit=0.01).limit == 0.01


def test_questions_are_asked_three_ways_and_a_wrong_reply_is_an_error() -> None:
    """Given a server, then it is asked alone, in one batch, and with answers as prompts; a reply without is told."""
    bodies: list[Mapping[str, Any]] = []

    def post(path: str, body: Mapping[str, Any]) -> Any:
        bodies.append(body)
        reply = {
            "output_ids": [4],
            "meta_info": {
                "input_token_logprobs": [[None, 1, None], [-1.5, 2, None]],
                "output_token_logprobs": [[-0.5, 4, None]],
                "output_top_logprobs": [[[-0.5, 4, None], [-1.0, 3, None]]],
            },
        }
        return [reply] * 2 if isinstance(body.get("text"), list) else reply

    found = ask(post, ("a", "b"), 1)
    assert [body.get("text") or body["input_ids"] for body in bodies] == ["a", "b", ["a", "b"], [1, 2, 4], [1, 2, 4]]
    assert found.alone[0] == Answer("prompt 1", (4,), (1, 2), (-1.5,), (-0.5,), ({4: -0.5, 3: -1.0},))
    assert sequences_of(found.alone) == [[1, 2, 4], [1, 2, 4]]
    with pytest.raises(AnswerError, match="prompt 1: the reply has no tokens"):
        ask(lambda path, body: {"error": "no"}, ("a",), 1)


# ---------------------------------------------------------------- settings of a start


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {"SGLANG_PLUGINS": "acme"}),
        ({"SGLANG_PLUGINS": "sglang_fl"}, {"SGLANG_PLUGINS": "__none__"}),
        ({"SGLANG_PLUGINS": "acme, sglang_fl"}, {"SGLANG_PLUGINS": "acme"}),
        ({"SGLANG_PLATFORM": "sglang_fl"}, {"SGLANG_PLUGINS": "acme", "SGLANG_PLATFORM": None}),
        ({"SGLANG_PLATFORM": "acme"}, {"SGLANG_PLUGINS": "acme"}),
    ],
)
def test_native_keeps_the_other_plugins(
    environ: dict[str, str], expected: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given another plugin, when SGLang is to run without this one, then the other stays if it was allowed."""
    found = [SimpleNamespace(name="sglang_fl"), SimpleNamespace(name="acme")]
    monkeypatch.setattr("sglang_fl.bisect.parts.entry_points", lambda group: found)
    assert without_plugin(environ) == expected


@pytest.mark.parametrize(("text", "selected"), [("", True), ("sglang_fl,acme", True), ("acme", False)])
def test_a_plugin_that_is_not_selected_is_noticed(text: str, selected: bool) -> None:
    """Given SGLANG_PLUGINS, then whether sglang_fl loads at all."""
    assert is_plugin_selected({"SGLANG_PLUGINS": text}) is selected


def configured(platform: str = "cpu", **variables: str) -> Configured:
    """The settings of these variables."""
    return Configured(load_settings(variables, platform=platform), own_backend(platform))


ALL = tuple(Part)
EXCLUSIONS = [
    (Part.OPERATORS, "RMSNorm", {}, {"SGLANG_FL_OOT_BLACKLIST": "RMSNorm"}),
    (Part.OPERATORS, "RMSNorm", {"SGLANG_FL_OOT_BLACKLIST": "TopK"}, {"SGLANG_FL_OOT_BLACKLIST": "TopK,RMSNorm"}),
    (Part.OPERATORS, "RMSNorm", {"SGLANG_FL_OOT_WHITELIST": "RMSNorm,TopK"}, {"SGLANG_FL_OOT_WHITELIST": "TopK"}),
    (Part.OPERATORS, "RMSNorm", {"SGLANG_FL_OOT_WHITELIST": "RMSNorm"}, {"SGLANG_FL_OOT_ENABLED": "0"}),
    (Part.ATEN, "mul", {"SGLANG_FL_FLAGOS_WHITELIST": "mul,add"}, {"SGLANG_FL_FLAGOS_WHITELIST": "add"}),
    (
        Part.COMMUNICATION,
        "all_reduce",
        {"SGLANG_FL_COMM_MODE": "fastest", "SGLANG_FL_COMM_ROUTES": "all_reduce=native:1024;all_gather=torch"},
        {"SGLANG_FL_COMM_MODE": "fastest", "SGLANG_FL_COMM_ROUTES": "all_reduce=native;all_gather=torch"},
    ),
]


@pytest.mark.parametrize(("part", "item", "variables", "expected"), EXCLUSIONS)
def test_an_item_is_taken_out_of_the_users_own_lists(
    part: Part, item: str, variables: dict[str, str], expected: dict[str, str]
) -> None:
    """Given the user's lists, when an item is to be left out, then exactly it is, in the same notation."""
    assert configured(**variables).variables(Setup("", ALL, part, without=(item,))) == expected


@pytest.mark.parametrize(("platform", "backend"), [("cpu", "torch"), ("cuda", "nccl"), ("ascend", "hccl")])
def test_communication_off_is_what_sglang_has_there(platform: str, backend: str) -> None:
    """Given a platform, when layer 3 is off, then its own library carries the groups, whatever order was asked for."""
    plain = configured(platform).variables(Setup("", (Part.PLUGIN,)))
    assert plain["SGLANG_FL_DIST_BACKEND"] == backend
    assert "SGLANG_FL_PER_OP" not in plain
    ordered = configured(platform, SGLANG_FL_PER_OP="communicator=flagos;rms_norm=vendor").variables(
        Setup("", (Part.PLUGIN,))
    )
    kind = "reference" if backend == "torch" else "vendor"
    assert ordered["SGLANG_FL_PER_OP"] == f"rms_norm=vendor;communicator={kind}"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["--model-path", "m", "--port", "1", "--tp", "2"], ["--model-path", "m", "--tp", "2"]),
        (["--model-path=m", "--host=0.0.0.0", "--log-level=error", "--nnodes=1"], ["--model-path=m"]),
        (["--api-key", "secret", "--model", "m"], ["--model", "m"]),
    ],
)
def test_arguments_that_every_start_has_are_replaced(given: list[str], kept: list[str]) -> None:
    """Given a user's command, then its port, host, log level and key are taken out, and the rest stays."""
    assert usable_arguments(given) == kept


@pytest.mark.parametrize(
    ("given", "message"), [([], "no --model-path"), (["--model-path=m", "--nnodes", "2"], "--nnodes 2: bisect starts")]
)
def test_arguments_that_cannot_be_used_are_refused(given: list[str], message: str) -> None:
    """Given no model or several nodes, then the error says so."""
    with pytest.raises(ArgumentsError, match=message):
        usable_arguments(given)


def test_a_script_holds_what_the_start_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a start, when its script runs, then the command has the same variables, the user's own among them."""
    monkeypatch.setenv("SGLANG_FL_PREFER", "vendor's")
    monkeypatch.setenv("SGLANG_FL_OOT_BLACKLIST", "TopK")
    changed: dict[str, str | None] = {"SGLANG_FL_OOT_WHITELIST": "RMSNorm", "SGLANG_FL_OOT_BLACKLIST": None}
    server = LaunchedServer(Path(), tmp_path, arguments=("--model-path=m",), environment=changed, label="03-x")
    server.write_script()
    text = server.script_path.read_text()
    assert f"-m sglang.launch_server --model-path=m --host=127.0.0.1 --port={server.port} --log-level=info" in text
    script = text.rsplit("exec ", 1)[0] + 'echo "$SGLANG_FL_PREFER|$SGLANG_FL_OOT_WHITELIST|$SGLANG_FL_OOT_BLACKLIST"'
    shown = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown == "vendor's|RMSNorm|\n"


LOG = """\
[2026] [sglang_fl] layer 1, ATen operators: on: FlagGems 5.0.2, profile full; in processes that run a model, once it has
[2026] [sglang_fl] layer 2, fused operators: on: order flagos, vendor, reference (from default)
[2026] [sglang_fl] layer 3, communication: on: flagcx (from FLAGCX_PATH), mode all
[2026] [sglang_fl] setting ops.enabled = 1 (from X); no effect, layer 2, fused operators is off
[2026] [sglang_fl] layer 1, ATen operators: off: flag_gems finds no device that it knows here (x)
[2026] [sglang_fl] group pp:0 ranks [0]: one rank, nothing to communicate
"""


def test_the_log_tells_the_layers_by_their_last_word() -> None:
    """Given a report, then a layer that went off later is off, and communication needs a group of two."""
    alone = layer_states(LOG)
    assert alone.active == (Part.OPERATORS,)
    assert alone.reasons[Part.COMMUNICATION] == "off: no group has more than one rank"
    both = layer_states(LOG + "[2026] [sglang_fl] group tp:0 ranks [0, 1]: flagcx; 8 KiB of memory taken\n")
    assert both.active == (Part.OPERATORS, Part.COMMUNICATION)
    assert both.backends == {"tp:0": "flagcx"}


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), click.Abort()])
def test_ctrl_c_is_no_result(interrupt: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given Ctrl-C in a command, then the exit code is a shell's 130, not the 1 of a difference."""

    def interrupted(**_: object) -> None:
        raise interrupt

    monkeypatch.setattr(frame.commands, "invoke", lambda context: interrupted())
    monkeypatch.setattr(sys, "argv", ["sglang_fl", "bisect"])
    with pytest.raises(SystemExit) as ended:
        frame.main()
    assert ended.value.code == 130
