"""One run of everything on a machine: its parts, what their records come to, exit codes; with planted faults."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks.cluster import command, run
from benchmarks.cluster.judge import NO_TIMES, Ended, Result, State, exit_code, judge
from benchmarks.cluster.parts import Machine, Part, dp_attention_shape, parts
from benchmarks.e2e import command as e2e_command
from benchmarks.e2e import report
from benchmarks.e2e.configurations import CONFIGURATIONS, NATIVE
from benchmarks.e2e.requests import Sizes, workloads
from benchmarks.e2e.run import Outcome, Start, Step
from benchmarks.e2e.tokens import Answer
from benchmarks.record import Kind, record
from sglang_fl.comm import bench, selftest
from sglang_fl.comm.backends.flagcx import locate

PART = Part("one", ("false",), 10.0, ("decode *",))


@pytest.fixture(autouse=True)
def flagcx(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """FLAGCX_PATH: a folder with a library that can be loaded, any; nothing here loads it."""
    folder = tmp_path_factory.mktemp("flagcx")
    (folder / "lib").mkdir()
    (folder / "lib" / locate.FILE_NAME).symlink_to(torch._C.__file__)
    monkeypatch.setenv("FLAGCX_PATH", str(folder))
    return folder


def machine(is_on_gpu: bool = True, ranks: int = 8, shape: str = "qwen2.5-14b") -> Machine:
    """Eight GPUs, or less."""
    return Machine(is_on_gpu, ranks, Path("out"), shape)


def row(met: bool = True, name: str = "decode fastest, batch 1", unit: str = "ms") -> dict[str, Any]:
    """A row with a bar."""
    bar = {"measure": "ratio", "at_most": 1.0, "met": met}
    reference = {"reference": "SGLang alone", "reference_samples": [1.0]}
    return {"name": name, "unit": unit, "samples": [1.1], "bar": bar, **reference}


def judged(ended: Ended, part: Part = PART, is_on_gpu: bool = True) -> Result:
    """The result of a part that ended so."""
    return judge(part, ended, 10.0, is_on_gpu)


def states(result: Result) -> dict[str, State]:
    """By check."""
    return {check.name: check.state for check in result.checks}


# Parts.


def test_the_parts_are_everything_at_that_many_ranks() -> None:
    """Given eight GPUs, then both self-tests, both benchmarks and three sizes of servers, in this order."""
    found = list(parts(machine()))
    assert [part.name for part in found] == [
        "selftest flagcx",
        "selftest nccl",
        "operations",
        "routes",
        "e2e tp=8",
        "e2e tp=4 pp=2",
        "e2e tp=8 DP attention, qwen3-14b",
    ]
    assert not any(part.cannot or part.absent for part in found)
    assert "--pp=2" in found[5].command and "--dp-attention" in found[6].command
    assert all("--nproc-per-node=8" in part.command for part in found[:3])
    assert "--graph" in found[2].command and "--quick" not in found[0].command


def test_on_a_cpu_what_cannot_be_seen_there_is_named() -> None:
    """Given a CPU, then routes as a whole, captured calls and mode fastest are left out, each with why."""
    found = {part.name: part for part in parts(machine(False, shape="tiny-8"))}
    assert found["routes"].cannot == "it compares routes between GPUs, eager and captured"
    assert set(found["selftest torch"].absent) == {"captured calls", "all combinations"}
    assert set(found["operations"].absent) == {"captured calls"}
    assert set(found["e2e tp=8"].absent) == {"fastest"}
    assert set(found["e2e tp=4 pp=2"].absent) == {"fastest", "transfers between stages over FlagCX"}


def test_one_round_of_servers_cannot_tell_when_they_are_ready() -> None:
    """Given one round, then the bar of the start is named as not run instead of being expected."""
    several, one = ({part.name: part for part in parts(replace(machine(), starts=starts))} for starts in (2, 1))
    assert "server ready with the plugin, warm, flagcx" in several["e2e tp=8"].expected
    assert not any(name.startswith("server ready") for name in one["e2e tp=8"].expected)
    assert set(one["e2e tp=8"].absent) == {"server ready"}


@pytest.mark.parametrize("is_on_gpu", [True, False])
@pytest.mark.parametrize("ranks", [2, 8])
def test_each_part_s_command_is_one_that_its_tool_takes(is_on_gpu: bool, ranks: int, tmp_path: Path) -> None:
    """Given each part, then its tool reads the whole command line."""
    tools = {"sglang_fl.comm.selftest": selftest.parse, "sglang_fl.comm.bench": bench.parse}
    seen = set()
    for part in parts(machine(is_on_gpu, ranks, "qwen2.5-14b" if is_on_gpu else "tiny-8")):
        arguments = part.arguments(tmp_path, 100.0) if not part.cannot else []
        for module, parse in {**tools, "benchmarks.e2e": e2e_command.parse}.items():
            if module in arguments:
                options = parse(arguments[arguments.index(module) + 1 :])
                assert options.json == tmp_path / f"{part.file}.json"
                seen.add(module)
                if module == "benchmarks.e2e":
                    assert options.tp * options.pp == ranks and options.controls_on
                    assert options.limit_s == 80.0
                    assert options.server_arguments == ([] if is_on_gpu else ["--dtype=float32"])
    assert seen == {*tools, "benchmarks.e2e"}


def test_a_model_without_dp_attention_gives_way_to_one_of_its_size_or_says_so() -> None:
    """Given shapes, then Qwen3 stands for itself, Qwen2 of 14B gives way, and any other part says why it cannot be."""
    assert dp_attention_shape("qwen3-14b") == "qwen3-14b"
    assert dp_attention_shape("qwen2.5-14b") == "qwen3-14b"
    *_, last = parts(machine(shape="qwen2.5-0.5b"))
    assert last.cannot == "SGLang has none for Qwen2ForCausalLM of qwen2.5-0.5b"


def outcome(names: Sequence[str], sizes: Sizes, places: Mapping[str, str]) -> Outcome:
    """Two rounds of equal starts, and the controls of the last."""
    answer = [Answer(tuple(range(8)), [{token: 1.0, token + 1: 0.5} for token in range(8)])]
    wrong = [Answer(tuple(range(1, 9)), [{token: 0.5, token + 1: 1.0} for token in range(8)])]
    samples = {each.name: [1.0] for each in workloads(sizes)}
    starts = [Start(Step(CONFIGURATIONS[name], number), 1.0, answer, samples) for number in range(2) for name in names]
    control = Step(CONFIGURATIONS[names[1]], 1, is_control=True)
    return Outcome([*starts, Start(control, 1.0, answer, switched=dict.fromkeys(places, wrong), places=places)])


@pytest.mark.parametrize("is_on_gpu", [True, False])
def test_what_is_expected_of_servers_is_what_their_rows_are_called(is_on_gpu: bool) -> None:
    """Given rows as the end-to-end benchmark makes them, then none is missing; without one of them, it is."""
    found = machine(is_on_gpu, shape="qwen2.5-14b" if is_on_gpu else "tiny-8")
    (part,) = [each for each in parts(found) if each.name == "e2e tp=8"]
    sizes = Sizes(100) if is_on_gpu else Sizes.for_cpu(100)
    compared = (NATIVE, "fastest", "flagcx") if is_on_gpu else (NATIVE, "flagcx")
    places = dict.fromkeys(("silu_and_mul", "all_reduce", "all_gather"), "place")
    content = record(Kind.E2E, report.figures(outcome(compared, sizes, places)), "c", False, "abc")
    result = judged(Ended(0, 1.0, content), replace(part, absent={}), is_on_gpu)
    assert [check for check in result.checks if "no such row" in check.detail] == []
    assert exit_code([result]) == (0 if is_on_gpu else 3)
    fewer = [each for each in content["rows"] if not each["name"].startswith("control: a fault in all_gather")]
    result = judged(Ended(0, 1.0, {**content, "rows": fewer}), part)
    assert states(result)["control: a fault in all_gather (*"] is State.NOT_RUN


# Judgement.


def test_all_met_is_0() -> None:
    """Given a record whose bars are met, then the part is met and the code 0."""
    result = judged(Ended(0, 1.0, {"rows": [row()]}))
    assert (result.state, exit_code([result])) == (State.MET, 0)


def test_a_missed_bar_is_1_and_says_by_how_much() -> None:
    """Given a missed bar, then the part is missed, with both numbers, and the code of the command adds nothing."""
    result = judged(Ended(1, 1.0, {"rows": [row(), row(met=False, name="decode flagcx, batch 1")]}))
    assert states(result) == {"decode fastest, batch 1": State.MET, "decode flagcx, batch 1": State.MISSED}
    assert result.of(State.MISSED)[0].detail == "1.1 ms, SGLang alone 1; ratio at most 1"
    assert exit_code([result]) == 1


def test_a_wrong_element_is_1() -> None:
    """Given a self-test's or a benchmark's row with a wrong element or an error, then it is missed."""
    right = {"name": "decode x", "wrong": 0, "error": "", "problems": []}
    wrong = {"name": "send over flagcx", "wrong": 3, "error": "", "problems": ["rank 1: shape (3,)"]}
    untried = {"name": "barrier over flagcx", "wrong": 0, "cases": 0}
    assert judged(Ended(0, 1.0, {"rows": [right, untried]})).of(State.NOT_RUN)[0].name == "barrier over flagcx"
    ended_early = {"name": "gather over flagcx", "wrong": 0, "error": "rank 2: gone", "problems": []}
    result = judged(Ended(1, 1.0, {"rows": [right, wrong, ended_early]}))
    assert [(check.name, check.detail) for check in result.of(State.MISSED)] == [
        ("send over flagcx", "rank 1: shape (3,)"),
        ("gather over flagcx", "rank 2: gone"),
    ]
    assert exit_code([result]) == 1


def test_a_failed_server_and_ranks_that_differ_are_1() -> None:
    """Given failures in a record, then they are failed checks with their first line."""
    content = {"rows": [row()], "failed": {"0-flagcx": "it ended\nlog"}, "failures": ["ranks 0 and 1 differ"]}
    result = judged(Ended(1, 1.0, content))
    assert [(check.name, check.detail) for check in result.of(State.FAILED)] == [
        ("0-flagcx", "it ended"),
        ("ranks", "ranks 0 and 1 differ"),
    ]
    assert exit_code([result]) == 1


def test_a_command_that_fails_without_a_record_is_1_and_shows_its_end() -> None:
    """Given an exit code and nothing that explains it, then that is the failure."""
    result = judged(Ended(2, 1.0, {}, "first\nno such option"))
    assert states(result)["exit code 2"] is State.FAILED
    assert "no such option" in result.of(State.FAILED)[0].detail
    assert exit_code([result]) == 1


def test_a_reached_limit_is_3() -> None:
    """Given a command that was ended, or one that left starts out, then what is missing is not run."""
    result = judged(Ended(None, 10.0, {"rows": [row()]}))
    assert (states(result)["its end"], exit_code([result])) == (State.NOT_RUN, 3)
    assert result.verdict == "in part"
    result = judged(Ended(3, 10.0, {"rows": [row()], "not_run": ["2-flagcx"]}))
    assert (states(result)["start 2-flagcx"], exit_code([result])) == (State.NOT_RUN, 3)


def test_a_record_without_what_it_should_have_is_3() -> None:
    """Given no row of an expected kind, or a route that was absent, then it is not run, though all else is met."""
    other = judged(Ended(0, 1.0, {"rows": [row(name="prefill fastest")]}))
    assert (states(other)["decode *"], exit_code([other])) == (State.NOT_RUN, 3)
    absent = judged(Ended(0, 1.0, {"rows": [row()]}, "warming up\nsymm is absent: no NVLink\n"))
    assert [(check.name, check.detail) for check in absent.of(State.NOT_RUN)] == [("route symm", "no NVLink")]
    assert exit_code([absent]) == 3


def test_a_miss_counts_more_than_what_was_not_run() -> None:
    """Given both, then the code is 1; given nothing at all, it is 3."""
    late, missed = judged(Ended(None, 10.0)), judged(Ended(1, 1.0, {"rows": [row(met=False)]}))
    assert exit_code([late, missed]) == 1
    assert exit_code([]) == 3


def test_on_a_cpu_bars_of_time_are_not_held_and_all_others_are() -> None:
    """Given a CPU, then a missed bar of time is not run, also in the exit code; one of tokens is missed."""
    tokens = row(met=True, name="tokens equal flagcx", unit="prompts")
    result = judged(Ended(1, 1.0, {"rows": [row(met=False), tokens]}), is_on_gpu=False)
    assert [(check.name, check.detail) for check in result.of(State.NOT_RUN)] == [
        ("bar of decode fastest, batch 1", NO_TIMES)
    ]
    assert exit_code([result]) == 3
    wrong = {**tokens, "bar": {**tokens["bar"], "met": False}}
    assert exit_code([judged(Ended(1, 1.0, {"rows": [wrong]}), is_on_gpu=False)]) == 1


# Runs of real commands.

WRITES = """
import json, pathlib, sys, time
(path,) = [each.partition("=")[2] for each in sys.argv if each.startswith("--json=")]
pathlib.Path(path).write_text(json.dumps({"rows": %s}))
%s
"""


def program(name: str, rows: Sequence[Mapping[str, Any]], then: str = "", limit_s: float = 60.0) -> Part:
    """A part that writes these rows and does ``then``."""
    rows_in_python = json.dumps(rows).replace("true", "True").replace("false", "False")
    return Part(name, (sys.executable, "-c", WRITES % (rows_in_python, then)), limit_s, ("decode *",))


def ran(found: Sequence[Part], out: Path, limit_s: float = 1000.0) -> list[Result]:
    """Their results."""
    return run.run(found, out, True, limit_s, {}, lambda _: None, {})


def test_parts_run_one_after_another_and_a_failure_costs_itself_only(tmp_path: Path) -> None:
    """Given a part that fails, one that hangs and one that is right, then each has its own result."""
    found = ran(
        [
            program("fails", [], "raise SystemExit('broken')"),
            program("hangs", [row()], "time.sleep(600)", limit_s=1.0),
            replace(PART, name="cannot", cannot="no such thing here"),
            program("right", [row()]),
        ],
        tmp_path,
    )
    assert [result.state for result in found] == [State.FAILED, State.NOT_RUN, State.NOT_RUN, State.MET]
    assert "broken" in found[0].of(State.FAILED)[0].detail
    assert states(found[1]) == {"decode fastest, batch 1": State.MET, "its end": State.NOT_RUN}
    assert found[2].checks[0].detail == "no such thing here"
    assert (tmp_path / "right.json").exists() and (tmp_path / "right.log").exists()


def test_a_record_of_an_earlier_run_is_not_taken_for_this_one_s(tmp_path: Path) -> None:
    """Given a record from before and a command that writes none, then nothing of the old one counts."""
    (tmp_path / "one.json").write_text(json.dumps({"rows": [row()]}))
    (result,) = ran([replace(PART, command=(sys.executable, "-c", "pass"))], tmp_path)
    assert states(result) == {"decode *": State.NOT_RUN}


def test_a_record_that_was_cut_off_is_a_failure_of_its_part(tmp_path: Path) -> None:
    """Given a command that leaves half a record, then that is what failed, and the next part is run."""
    cut = replace(PART, command=(sys.executable, "-c", WRITES.replace("json.dumps", "'{' + json.dumps") % ("[]", "")))
    first, second = ran([cut, program("two", [row()])], tmp_path)
    assert states(first)["its record"] is State.FAILED and second.state is State.MET


def test_the_limit_of_all_leaves_out_what_would_end_later(tmp_path: Path) -> None:
    """Given less time than any part needs, then none is begun, and the code is 3."""
    found = ran([program("one", [row()]), program("two", [row()])], tmp_path, limit_s=20.0)
    assert [result.checks[0].detail for result in found] == ["the limit of 20 s for all is reached"] * 2
    assert exit_code(found) == 3 and list(tmp_path.iterdir()) == []


# The command line.


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Part]:
    """Parts in the place of the real ones."""
    found = [program("one", [row()]), program("two", [row(name="decode flagcx, batch 1")])]
    monkeypatch.setattr(command, "parts", lambda _: found)
    monkeypatch.setattr(command.record, "describe_commit", lambda: "abc")
    return found


def call(out: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the record."""
    code = command.main(["--device=cpu", f"--out={out}", *arguments])
    return code, json.loads((out / "cluster.json").read_text())


def test_the_record_has_everything(planned: list[Part], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Given a run, then its record has what it was made on, the rows by part, and each part with its checks."""
    planned.append(program("three", [row(met=False, name="decode x", unit="B")], "raise SystemExit(1)"))
    code, found = call(tmp_path / "out", "--starts=2")
    assert (code, found["exit_code"], found["ranks"], found["device"], found["starts"]) == (1, 1, 8, "cpu", 2)
    assert (found["kind"], found["commit"]) == ("e2e", "abc")
    assert found["versions"]["torch"] and found["machine"]["cores"] and "--starts=2" in found["command"]
    assert [each["name"] for each in found["rows"]] == [
        "one: decode fastest, batch 1",
        "two: decode flagcx, batch 1",
        "three: decode x",
    ]
    assert [each["state"] for each in found["parts"]] == ["not run", "not run", "missed"]
    said = capsys.readouterr().out
    assert "MISSED three: decode x: 1.1 B, SGLang alone 1; ratio at most 1" in said
    assert f"NOT RUN one: bar of decode fastest, batch 1: {NO_TIMES}" in said


def test_only_leaves_the_others_out_and_resume_keeps_what_there_is(planned: list[Part], tmp_path: Path) -> None:
    """Given one part, then the other, then both are in the record and the first was not run again."""
    code, found = call(tmp_path, "--only=one")
    assert code == 3 and [each["was_run"] for each in found["parts"]] == [True, False]
    first_s = found["parts"][0]["took_s"]
    _, found = call(tmp_path, "--only=two", "--resume")
    assert [each["was_run"] for each in found["parts"]] == [True, True]
    assert found["parts"][0]["took_s"] == first_s and len(found["rows"]) == 2
    assert [each["name"] for each in found["rows"]] == ["one: decode fastest, batch 1", "two: decode flagcx, batch 1"]
    planned[0] = replace(planned[0], command=(*planned[0].command, "another"))
    _, found = call(tmp_path, "--only=two", "--resume")
    assert [each["was_run"] for each in found["parts"]] == [False, True]


def test_resume_keeps_nothing_of_another_commit(
    planned: list[Part], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Given a record of another commit, or of one with changes, then its parts are not kept."""
    for commits in (("abc", "def"), ("abc+changes", "abc+changes")):
        for commit, more in zip(commits, (["--only=one"], ["--only=two", "--resume"]), strict=True):
            monkeypatch.setattr(command.record, "describe_commit", lambda commit=commit: commit)
            _, found = call(tmp_path, *more)
        assert [each["was_run"] for each in found["parts"]] == [False, True]
    said = capsys.readouterr().out
    assert "nothing is kept: the record is of commit abc, this is def" in said
    assert "nothing is kept: the checkout has changes that are in no commit" in said


@pytest.mark.parametrize(
    ("is_met", "then", "is_kept"), [(True, "", True), (False, "raise SystemExit(1)", True), (True, "1 / 0", False)]
)
def test_resume_keeps_misses_and_makes_failures_again(
    planned: list[Part], tmp_path: Path, is_met: bool, then: str, is_kept: bool
) -> None:
    """Given a part that met, missed or failed, then only the failed one runs again; a miss stays."""
    planned[:] = [program("one", [row(is_met, unit="prompts")], then)]
    _, first = call(tmp_path)
    _, second = call(tmp_path, "--resume")
    assert (second["parts"][0]["took_s"] == first["parts"][0]["took_s"]) is is_kept


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks=3"], "3 ranks: an even number from 2 on is needed"),
        (["--only=two servers"], "there is no part two servers; there are selftest flagcx"),
        (["--shape=none"], "invalid choice"),
        (["--device=cuda", "--gpus=9"], "--gpus 9: torch sees"),
        (["--device=cuda", "--gpus=²"], "'²' is no whole number above 0"),
        (["--device=cuda", "--ranks=2"], "--ranks has no effect on GPUs"),
        (["--gpus=2"], "--gpus has no effect on a CPU"),
        (["--starts=0"], "'0' is no whole number above 0"),
        (["--repeats=-1"], "'-1' is no whole number above 0"),
        (["--limit-s=nan"], "'nan' is no time limit; allowed is a number of seconds from 0.001, such as"),
        (["--limit-s=inf"], "'inf' is no time limit; allowed is a number of seconds from 0.001, such as"),
        (["--limit-s=-1"], "'-1' is no time limit; allowed is a number of seconds from 0.001, such as"),
        (["--only=routes", "--only=routes"], "--only: routes more than once"),
        (["--list", "--resume"], "--only and --resume have no effect"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Given what cannot be, or has no effect, then 2 and what is allowed, and nothing is made."""
    out = tmp_path / "out"
    device = [] if "--device=cuda" in arguments else ["--device=cpu"]
    with pytest.raises(SystemExit, match="2"):
        command.parse([*device, f"--out={out}", *arguments])
    assert words in capsys.readouterr().err
    assert not out.exists()


def test_places_that_cannot_be_written_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Given --out that is a file or below one, or a record that is a folder, then 2 before anything is run."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "out" / "cluster.json").mkdir(parents=True)
    for place, words in (("file", "File exists"), ("file/out", "Not a directory"), ("out", "Is a directory")):
        with pytest.raises(SystemExit, match="2"):
            command.parse(["--device=cpu", f"--out={tmp_path / place}"])
        said = capsys.readouterr().err
        assert str(tmp_path / place) in said and words in said
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"commit": "abc"}', '{"commit": "abc", "rows": [], "parts": [{}]}']
)
def test_resume_from_what_is_no_record_is_refused(
    planned: list[Part], content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Given a file that is cut off or something else, then 2, and it stays as it is."""
    (tmp_path / "cluster.json").write_text(content)
    with pytest.raises(SystemExit, match="2"):
        call(tmp_path, "--resume")
    assert "cluster.json is no record to go on from" in capsys.readouterr().err
    assert (tmp_path / "cluster.json").read_text() == content


def test_a_list_of_the_parts_makes_nothing(planned: list[Part], tmp_path: Path) -> None:
    """Given --list, then all is shown, and its folder is not made."""
    assert command.main(["--device=cpu", "--list", f"--out={tmp_path / 'out'}"]) == 0
    assert not (tmp_path / "out").exists()


def test_a_folder_of_flagcx_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Given FLAGCX_PATH with nothing there, or a folder without a library, then 2 before anything is run."""
    for place, words in (("/nonexistent", "which does not exist"), (str(tmp_path), "which has no library")):
        monkeypatch.setenv("FLAGCX_PATH", place)
        with pytest.raises(SystemExit, match="2"):
            command.parse(["--device=cpu", f"--out={tmp_path / 'out'}"])
        said = capsys.readouterr().err
        assert place in said and words in said and "run make hostcx, or set it" in said
    assert list(tmp_path.iterdir()) == []


def test_the_gpus_that_are_used_are_the_first_of_those_visible(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Given eight visible GPUs and --gpus 2, then all commands see the first two, with NVLink multicast off."""
    monkeypatch.setattr(command.record, "describe_gpus", lambda: ["H200"] * 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,3,2,1,0")
    options = command.parse(["--gpus=2", f"--out={tmp_path}"])
    assert (options.ranks, options.shape, options.starts) == (2, "qwen2.5-14b", 3)
    assert options.environment["CUDA_VISIBLE_DEVICES"] == "7,6"
    assert options.environment["NCCL_NVLS_ENABLE"] == "0"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert command.parse([f"--out={tmp_path}"]).environment["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"


def test_the_table_counts_checks_by_what_came_of_them() -> None:
    """Given a result of each kind, then its line has its numbers."""
    console = Console(width=120, record=True, file=io.StringIO())
    command.show(machine(), [judged(Ended(1, 7.0, {"rows": [row(), row(met=False, name="x")]}))], console)
    (line,) = [each for each in console.export_text().splitlines() if "│ one" in each]
    assert [cell.strip() for cell in line.strip("│").split("│")] == ["one", "missed", "1", "1", "0", "0", "7"]
