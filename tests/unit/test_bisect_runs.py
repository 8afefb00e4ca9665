"""bisect without servers: whole runs in a simulated SGLang that has planted faults.

The simulation decides from a start's variables, read by the plugin's own loader, which operators are on; it stands for
the server alone. Real servers: tests/e2e/test_bisect.py.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rich.console import Console

from sglang_fl.bisect import run as bisect_run
from sglang_fl.bisect.comparison import Outcome
from sglang_fl.bisect.evidence import needs_plugin
from sglang_fl.bisect.parts import (
    OTHER_OPERATIONS,
    ROUTED,
    Configured,
    Part,
    Setup,
    is_plugin_selected,
)
from sglang_fl.bisect.questions import Answers
from sglang_fl.bisect.report import Printer, show, write_json
from sglang_fl.bisect.run import Bisection, CannotRunError, Options, Verdict
from sglang_fl.bisect.server import LaunchedServer
from sglang_fl.config import load_settings
from tests.unit.bisect_cases import answer, answers

CLASSES = ("RMSNorm", "RotaryEmbedding", "SiluAndMul")
FUNCTIONS = tuple(f"op{number}" for number in range(40))
RECORDED = FUNCTIONS[10:]
CALLED = {"all_reduce": 5, "_all_gather_into_tensor": 1, "broadcast_object": 2}


@dataclass
class World:
    """A simulated SGLang with the plugin.

    wrong: operators, functions, operations, OTHER_OPERATIONS, "plugin" or "recording" whose presence moves every value;
    with ``fails`` the server ends instead. native_runs, runs: whether it starts without the plugin, and at all; where
    it does not, its log ends with last_line.
    """

    wrong: frozenset[str] = frozenset()
    fails: bool = False
    native_runs: bool = True
    runs: bool = True
    last_line: str = "ImportError: [sgl_kernel] no library for this machine"

    def present(self, environ: Mapping[str, str]) -> set[str]:
        """What is on, from the variables, read as the plugin reads them."""
        if not is_plugin_selected(environ):
            return set()
        settings = load_settings(environ, platform="cpu")
        on = {"plugin"}
        if settings.aten.record:
            on.add("recording")
        if settings.ops.enabled:
            white = settings.ops.whitelist
            on |= {name for name in CLASSES if name not in settings.ops.blacklist and (white is None or name in white)}
        if settings.aten.enabled:
            white = settings.aten.whitelist
            on |= {name for name in FUNCTIONS if name not in settings.aten.blacklist and (not white or name in white)}
        if settings.comm.backend != "torch":
            native = {order.op for order in settings.comm.routes if settings.comm.mode == "fastest"}
            on |= {OTHER_OPERATIONS, *ROUTED} - native
        return on


@dataclass
class Simulated(Bisection):
    """A bisection whose servers are a World's."""

    world: World = field(default_factory=World)

    def _ask(self, server: LaunchedServer, setup: Setup) -> tuple[Answers | None, str]:
        environ = {**os.environ, **server.environment}
        present = self.world.present({name: value for name, value in environ.items() if value is not None})
        server.log_path().write_text("\n".join([*self._log(present), "the last line of the log"]))
        is_native = not present
        if not self.world.runs or (is_native and not self.world.native_runs):
            server.log_path().write_text(f"Traceback (most recent call last):\n{self.world.last_line}\n")
            return None, "was not ready after 600 s"
        if self._files is not None and "SGLANG_FL_DISPATCH_LOG" in server.environment:
            self._write_evidence(present)
        is_wrong = bool(present & self.world.wrong)
        if is_wrong and self.world.fails:
            return None, "ended with code 1"
        return answers(answer(shift=0.01 if is_wrong else 0.0)), ""

    def _log(self, present: set[str]) -> list[str]:
        def line(layer: str, on: object) -> str:
            return f"[sglang_fl] {layer}: {'on: as asked' if on else 'off: switched off'}"

        if not present:
            return []
        return [
            line(Part.ATEN.value, present & set(FUNCTIONS)),
            line(Part.OPERATORS.value, present & set(CLASSES)),
            line(Part.COMMUNICATION.value, OTHER_OPERATIONS in present),
            "[sglang_fl] group tp:0 ranks [0, 1]: flagcx",
        ]

    def _write_evidence(self, present: set[str]) -> None:
        assert self._files is not None
        bound = [name for name in CLASSES if name in present]
        with self._files.dispatch.open("a") as file:  # as the plugin does
            file.writelines(f"[OOT-DISPATCH] {name} → flagos(flagos)\n" for name in bound)
        ran = [name for name in RECORDED if name in present]
        self._files.aten.write_text("".join(f"[DEBUG] flag_gems.ops.x.{name}: GEMS X\n" for name in ran))
        group = {"group": "tp:0", "ranks": [0, 1], "backend": "flagcx", "calls": CALLED}
        report = {"pid": 1, "rank": 0, "hooks": 1, "hooks_live": 1, "groups": [group], "clock": None}
        self._files.audit.write_text(json.dumps(report))


Simulate = Callable[..., tuple[Simulated, Verdict]]


@pytest.fixture
def simulate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Simulate:
    """Runs a bisection in a World with these variables set."""
    for name in list(os.environ):
        if name.startswith("SGLANG_") or name in ("USE_FLAGGEMS", "FLAGCX_PATH"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(bisect_run, "chosen_names", lambda path, environ: list(FUNCTIONS))
    monkeypatch.setattr("sglang_fl.bisect.parts.entry_points", lambda group: [])

    def whole(world: World, **variables: str) -> tuple[Simulated, Verdict]:
        for name, value in {"SGLANG_FL_DIST_BACKEND": "flagcx", **variables}.items():
            monkeypatch.setenv(name, value)
        settings = Configured(load_settings(platform="cpu"), "torch")
        bisection = Simulated(Options(("--model-path=m",), tmp_path), settings, world=world)
        return bisection, bisection.find()

    return whole


def test_nothing_wrong_takes_two_starts(simulate: Simulate) -> None:
    """Given no fault, then two starts and no part."""
    bisection, verdict = simulate(World())
    assert (verdict.part, len(bisection.trials)) == (None, 2)
    assert verdict.sentences == (
        "Nothing differs with layer 2, fused operators, layer 1, ATen operators, layer 3, communication on.",
    )


CULPRITS = [
    *((Part.OPERATORS, name, 2 + 2 + 3) for name in CLASSES),
    *((Part.ATEN, name, 2 + 2 + 6 + 1) for name in RECORDED),
    *((Part.ATEN, name, 2 + 2 + 5 + 1 + 4 + 1) for name in FUNCTIONS[:10]),
    *((Part.COMMUNICATION, name, 2 + 2 + 3) for name in ("all_reduce", "all_gather", OTHER_OPERATIONS)),
]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(("part", "item", "most"), CULPRITS)
def test_every_culprit_is_named(part: Part, item: str, most: int, fails: bool, simulate: Simulate) -> None:
    """Given one culprit, one whose server answers wrongly or one that fails, then it is named, within the promise."""
    bisection, verdict = simulate(World(frozenset({item}), fails))
    assert (verdict.part, verdict.item) == (part, item)
    assert len(bisection.trials) <= most
    assert verdict.sentences[1].startswith("With everything else on nothing differs: serve with ")
    assert bisection.trials[-1].comparison.outcome is Outcome.EQUAL
    failed = [trial for trial in bisection.trials if trial.comparison.outcome is Outcome.FAILED]
    assert bool(failed) is fails
    assert all("the last line of the log" in trial.tail for trial in failed)


def test_the_plugin_itself_is_named(simulate: Simulate) -> None:
    """Given a difference with all layers off, then the plugin's platform is named."""
    _, verdict = simulate(World(frozenset({"plugin"})))
    assert (verdict.part, verdict.item) == (Part.PLUGIN, "")
    assert "attention backend" in verdict.sentences[1]


def test_layers_that_are_off_cost_no_start(simulate: Simulate) -> None:
    """Given two layers switched off by the user, then only the third is looked into."""
    bisection, verdict = simulate(World(frozenset({"SiluAndMul"})), USE_FLAGGEMS="0", SGLANG_FL_DIST_BACKEND="torch")
    assert (verdict.part, verdict.item) == (Part.OPERATORS, "SiluAndMul")
    assert len(bisection.trials) == 2 + 1 + 2 + 1


def test_an_earlier_run_in_the_folder_does_not_count(simulate: Simulate, tmp_path: Path) -> None:
    """Given the files of an earlier run, when bisected into the same folder, then only what ran now is looked into."""
    for suffix in ("", ".rank1"):
        (tmp_path / f"02-all.dispatch{suffix}").write_text("[OOT-DISPATCH] TopK → flagos(flagos)\n")
    bisection, verdict = simulate(World(frozenset({"RMSNorm"})))
    assert verdict.item == "RMSNorm"
    items = [name for trial in bisection.trials for name in trial.setup.items]
    assert "TopK" not in items


def test_without_native_the_layers_off_are_the_baseline(simulate: Simulate) -> None:
    """Given an SGLang that runs only with the plugin, then all layers off is the baseline."""
    bisection, verdict = simulate(World(frozenset({"all_reduce"}), native_runs=False))
    assert (verdict.part, verdict.item) == (Part.COMMUNICATION, "all_reduce")
    assert [trial.comparison.outcome for trial in bisection.trials[:2]] == [Outcome.FAILED, Outcome.EQUAL]


def test_a_server_that_never_runs_cannot_be_bisected(simulate: Simulate) -> None:
    """Given a server that runs in no way, then an error after the two baselines."""
    with pytest.raises(CannotRunError, match="neither without the plugin nor with all layers off"):
        simulate(World(runs=False))


SAME_WITH_THE_PLUGIN = (
    "OSError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/no/such/model'",
    "launch_server.py: error: unrecognized arguments: --no-such-argument",
    "torch.OutOfMemoryError: CUDA out of memory.",
    "[2026-11-30 04:00:00] Ignore import error when loading sglang.srt.models.x: No module named 'y'",
)


@pytest.mark.parametrize("line", SAME_WITH_THE_PLUGIN)
def test_what_fails_alike_with_the_plugin_costs_no_second_start(
    line: str, simulate: Simulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given SGLang alone that fails for a reason in which the plugin has no part, then an error after one start."""
    shown: list[str] = []
    monkeypatch.setattr(Simulated, "_end", lambda self, trial: shown.append(trial.tail))
    with pytest.raises(CannotRunError, match="SGLang alone, without the plugin, does not serve with these arguments"):
        simulate(World(native_runs=False, last_line=line))
    assert len(shown) == 1 and line in shown[0]


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: No accelerator (CUDA, XPU, HPU, NPU, MUSA, MPS) is available.",
        "ModuleNotFoundError: No module named 'sgl_kernel'",
        "AssertionError: Torch not compiled with CUDA enabled",
        "OSError: libcudart.so.12: cannot open shared object file: No such file or directory",
        "[2026-11-30 04:00:00 TP0] NotImplementedError: Could not run 'sgl_kernel::rmsnorm'",
    ],
)
def test_what_the_plugin_is_for_is_recognised(line: str) -> None:
    """Given a last line that says that a device or kernels are missing, then it is given as the reason."""
    assert needs_plugin(f"some line\n{line}\nKilled\n") == line
    assert needs_plugin("") == ""


def test_a_run_that_was_interrupted_at_once_shows_no_table(tmp_path: Path) -> None:
    """Given no start, when shown, then there is no table of starts."""
    text = io.StringIO()
    settings = Configured(load_settings({}, platform="cpu"), "torch")
    show(Console(file=text, width=200), Bisection(Options(("--model-path=m",), tmp_path), settings), None)
    assert text.getvalue() == ""


def test_a_server_that_differs_from_itself_is_told(simulate: Simulate) -> None:
    """Given no layer on and answers that differ all the same, then an error says that they do not come twice."""
    off = {"SGLANG_FL_OOT_ENABLED": "0", "USE_FLAGGEMS": "0", "SGLANG_FL_DIST_BACKEND": "torch"}
    with pytest.raises(CannotRunError, match="does not give the same answers twice"):
        simulate(World(frozenset({"recording"}), native_runs=False), **off)


def test_without_a_list_of_flaggems_the_recorded_operators_are_searched(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a FlagGems that cannot be listed, then what was recorded is searched."""
    monkeypatch.setattr(bisect_run, "chosen_names", lambda path, environ: [])
    _, verdict = simulate(World(frozenset({RECORDED[7]})))
    assert verdict.item == RECORDED[7]


def test_a_second_culprit_is_told_of(simulate: Simulate) -> None:
    """Given two wrong operators, then the first is named, with the settings for the run that finds the other."""
    _, verdict = simulate(World(frozenset({"RMSNorm", "SiluAndMul"})))
    assert verdict.item == "RMSNorm"
    assert "run bisect again with SGLANG_FL_OOT_BLACKLIST=RMSNorm" in verdict.sentences[1]


@pytest.mark.parametrize("terminal", [False, True])
def test_what_is_shown_names_settings_log_and_outcome(terminal: bool, simulate: Simulate, tmp_path: Path) -> None:
    """Given a run, when shown, on a terminal or not, then each start has settings, log, outcome and first difference.

    Lines of a server's log and brackets in texts are shown as they are, whatever rich would read in them.
    """
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=200, color_system=None)
    printer = Printer(console)
    bisection, verdict = simulate(World(frozenset({"SiluAndMul"})))
    for trial in bisection.trials:
        server = LaunchedServer(Path(), tmp_path, environment=trial.environment, label=trial.label)
        printer.begin(trial.setup.title, server)
        printer.waiting(["[2026-11-30] [/red] [sglang_fl] layer 2[/]"])
        printer.end(trial)
    show(console, bisection, verdict)
    printed = text.getvalue()
    for trial in bisection.trials:
        assert f"{trial.label}: {trial.setup.title}" in printed
        assert f"log: {tmp_path / trial.label}.log; by hand: sh {tmp_path / trial.label}.sh" in printed
    assert printed.count("DIFFERS") == 2 * sum(not trial.comparison.outcome.is_good for trial in bisection.trials)
    assert "SGLANG_FL_OOT_BLACKLIST=SiluAndMul" in printed
    assert printed.rstrip().endswith(verdict.sentences[-1])
    assert ("[/red] [sglang_fl] layer 2[/]" in printed) is terminal
    write_json(tmp_path / "report.json", bisection, verdict)
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["differs"], report["part"], report["item"]) == (True, Part.OPERATORS.value, "SiluAndMul")
    assert [start["label"] for start in report["starts"]] == [trial.label for trial in bisection.trials]
