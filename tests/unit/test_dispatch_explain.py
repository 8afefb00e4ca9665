"""``explain``: every candidate with its verdict, in Python and on the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from sglang_fl import plugin
from sglang_fl.cli.explain import command
from sglang_fl.config import load_settings
from sglang_fl.dispatch import SelectionPolicy, UnknownOperatorError, configure, explain, policy, set_manager
from sglang_fl.dispatch.builtin_ops import BrokenBackend
from sglang_fl.dispatch.registry import KNOWN_OPERATORS
from sglang_fl.dispatch.types import BackendImplKind
from tests.unit.dispatch_cases import Counted, manager_of


@pytest.fixture(autouse=True)
def own_process_state() -> Iterator[None]:
    """Each test has the settings of an empty environment; afterwards the process is as before."""
    before = (policy._settings, policy._process_policy)
    configure(load_settings({}))
    yield
    policy._settings, policy._process_policy = before
    set_manager(None)


IMPLEMENTATIONS = (
    Counted("flagos", unavailable="flag_gems is not installed"),
    Counted("vendor.nvidia"),
    Counted("vendor.acme", options={"supports": lambda layer: "", "supported_dtypes": {"bfloat16", "float16"}}),
    Counted("reference"),
)


def test_the_text_has_the_order_and_each_candidate() -> None:
    """Given an unusable, a denied and two usable implementations, then the text has all four, the chosen one first."""
    denied = SelectionPolicy(deny_vendors=frozenset({"cuda"}))
    set_manager(manager_of(*IMPLEMENTATIONS, policy=denied))
    assert explain("silu_and_mul") == (
        "silu_and_mul (order: flagos, vendor, reference)\n"
        "  chosen      vendor.acme    asked at a layer's first call: each layer; dtypes bfloat16, float16\n"
        "  passed over flagos         flag_gems is not installed\n"
        "  passed over vendor.nvidia  vendor nvidia is denied\n"
        "  passed over reference      available, but vendor.acme comes first"
    )


def test_where_nothing_can_be_used_every_candidate_still_has_its_reason() -> None:
    """Given an order that leaves nothing, then each candidate's reason, and a line that says what will happen."""
    order = SelectionPolicy(
        per_op_order={"silu_and_mul": ("flagos", "vendor:nvidia")}, deny_vendors=frozenset({"nvidia"})
    )
    set_manager(manager_of(*IMPLEMENTATIONS, policy=order))
    lines = explain("silu_and_mul").splitlines()
    assert sorted(line.split()[2] for line in lines[1:-1]) == ["flagos", "reference", "vendor.acme", "vendor.nvidia"]
    assert all(line.startswith("  passed over ") for line in lines[1:-1])
    assert [line for line in lines if "reference" in line] == [
        "  passed over reference      not named by the order flagos, vendor:nvidia"
    ]
    assert lines[-1] == "  nothing can be used: the first call of silu_and_mul will fail"


def test_strict_mode_chooses_nothing_else() -> None:
    """Given strict mode without its first choice, then nothing is chosen, and the problem is told."""
    set_manager(manager_of(*IMPLEMENTATIONS, policy=SelectionPolicy(strict=True)))
    text = explain("silu_and_mul")
    assert "(order: flagos, vendor, reference; strict)" in text
    assert "chosen  " not in text
    assert "vendor.acme    available, but strict mode allows only the first choice" in text
    assert (
        "No available implementation for silu_and_mul: strict mode: the first choice for silu_and_mul is flagos" in text
    )


def test_a_backend_that_did_not_register_is_a_candidate_with_its_reason() -> None:
    """Given a broken backend, then it stands among the candidates of each standard operator."""
    operators = manager_of(Counted("reference"))
    operators.broken = (BrokenBackend("acme", "it did not register: no driver", BackendImplKind.VENDOR, "acme"),)
    set_manager(operators)
    assert "  passed over acme       it did not register: no driver" in explain("silu_and_mul")
    assert "acme" in explain("topk")


def test_a_wrong_name_is_an_error_with_a_suggestion() -> None:
    """Given a misspelled operator, then the error names the right one."""
    set_manager(manager_of(*IMPLEMENTATIONS))
    with pytest.raises(UnknownOperatorError, match="Did you mean silu_and_mul"):
        explain("silu_and_mull")


# --- the command ---


def test_the_command_shows_the_operator_that_is_named() -> None:
    """Given an operator, when the command runs, then it prints what ``explain`` says, and nothing else."""
    set_manager(manager_of(*IMPLEMENTATIONS))
    done = CliRunner().invoke(command, ["silu_and_mul"])
    assert (done.exit_code, done.output) == (0, explain("silu_and_mul") + "\n")


def test_the_command_shows_every_operator_when_none_is_named() -> None:
    """Given no name, then the standard operators in their order, and what a backend offers beyond them."""
    set_manager(manager_of(*IMPLEMENTATIONS, Counted("vendor.acme", op_name="attention")))
    done = CliRunner().invoke(command, [])
    heads = [line.split()[0] for line in done.output.splitlines() if not line.startswith(" ")]
    assert heads == [*KNOWN_OPERATORS, "attention"]


def test_the_command_gives_the_same_as_json() -> None:
    """Given --json, then a list of operators with their rows."""
    set_manager(manager_of(*IMPLEMENTATIONS))
    (found,) = json.loads(CliRunner().invoke(command, ["silu_and_mul", "--json"]).output)
    assert found["op_name"] == "silu_and_mul"
    assert [(row["impl_id"], row["is_chosen"]) for row in found["rows"]] == [
        ("vendor.acme", True),
        ("flagos", False),
        ("vendor.nvidia", False),
        ("reference", False),
    ]


def test_on_a_platform_with_kernels_sglangs_own_method_is_a_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given NVIDIA with a real sgl_kernel (made up: there is none here), then SGLang's own method stands behind the
    vendor's backend, by a name of its own, and for a misspelled operator nothing does."""
    monkeypatch.setattr(plugin, "has_own_kernels", lambda platform: platform == "cuda")
    configure(load_settings({"SGLANG_FL_PLATFORM": "cuda"}))
    set_manager(manager_of(*IMPLEMENTATIONS, policy=SelectionPolicy(per_op_order={"silu_and_mul": ("vendor:cuda",)})))
    lines = CliRunner().invoke(command, ["silu_and_mul"]).output.splitlines()
    assert lines[1].split() == ["chosen", "vendor.nvidia"]
    assert lines[2] == ("  passed over vendor.nvidia (SGLang's own method)  available, but vendor.nvidia comes first")
    wrong = CliRunner().invoke(command, ["silu_and_mull"])
    assert wrong.exit_code == 2
    assert "Did you mean silu_and_mul?" in wrong.output


def test_the_command_line_itself(tmp_path: Path) -> None:
    """Given a fresh process with settings, when asked for an operator and for a wrong one, then what was set decides,
    and the wrong name exits with a suggestion and no traceback."""
    environment = {**os.environ, "SGLANG_FL_PER_OP": "rms_norm=reference", "SGLANG_FL_DENY_VENDORS": "npu"}

    def run(name: str) -> subprocess.CompletedProcess[str]:
        arguments = [sys.executable, "-m", "sglang_fl", "explain", name]
        return subprocess.run(
            arguments, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )

    done = run("rms_norm")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == ["rms_norm (order: reference)", "  chosen      reference"]
    wrong = run("rms_nrom")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "Did you mean rms_norm?" in wrong.stderr
    assert "Traceback" not in wrong.stderr


def test_the_command_says_what_keeps_a_server_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given layer 2 switched off, or names that nobody knows, then the command's notes say so."""

    def notes(**variables: str) -> str:
        environment = {**os.environ, **variables}
        command = [sys.executable, "-m", "sglang_fl", "explain", "rms_norm"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    off = notes(SGLANG_FL_OOT_ENABLED="0")
    assert "note: layer 2 is off, SGLang's own methods run: oot_enabled is off (from SGLANG_FL_OOT_ENABLED)" in off
    misspelled = notes(SGLANG_FL_PER_OP="rms_nrom=reference", SGLANG_FL_DENY_VENDORS="cudda")
    assert "note: no such operator is known:" in misspelled and "Did you mean 'rms_norm'" in misspelled
    assert "note: no such vendor is known:" in misspelled
    assert "note: not every class is taken over: without RMSNorm" in notes(SGLANG_FL_OOT_BLACKLIST="RMSNorm")
