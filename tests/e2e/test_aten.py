"""Layer 1 in the real SGLang on a CPU: off with its reason, refused if asked for strictly, hooked where models run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from sglang_fl.testing.server import ServerError
from sglang_fl.testing.tiny_model import Family

from .conftest import Control
from .distributions import write_distribution
from .topologies import ONE, TP, ask

pytestmark = pytest.mark.e2e


def test_asked_for_on_a_cpu_it_is_off_with_its_reason_and_the_server_runs(
    models: Mapping[Family, Path], tmp_path: Path, control: Control
) -> None:
    """Given profile full on a CPU, when served, then the log says why the layer is off, and SGLang's tokens come."""
    with ONE.server(models, tmp_path, {"SGLANG_FL_FLAGOS_PROFILE": "full"}) as server:
        answers, log = ask(server), server.log()
    assert answers == control(ONE)
    assert "layer 1, ATen operators: off: this process runs on the CPU, for which FlagGems has no device" in log
    assert (
        "setting aten.profile = full (from SGLANG_FL_FLAGOS_PROFILE); no effect, layer 1, ATen operators is off" in log
    )


def test_strict_and_asked_for_it_ends_the_server(models: Mapping[Family, Path], tmp_path: Path) -> None:
    """Given strict and profile full on a CPU, when started, then the server ends and the error says what to do."""
    variables = {"SGLANG_FL_FLAGOS_PROFILE": "full", "SGLANG_FL_STRICT": "1", "SGLANG_FL_PREFER": "reference"}
    with pytest.raises(ServerError) as failure, ONE.server(models, tmp_path, variables):
        pass
    assert "layer 1, ATen operators, was asked for and cannot be switched on: this process runs on the CPU" in str(
        failure.value
    )


# Layer 1 as on an accelerator, beside the plugin: its hook, with a report of where and when it was called.
WATCHED = """
import os

def load():
    from sglang_fl.config import load_settings
    from sglang_fl.sglang_hooks import aten
    from sglang_fl.sglang_hooks.registration import misfits, register

    def report(outcome):
        import torch
        rank = torch.distributed.get_rank()
        with open(os.environ["WATCHED"], "a") as file:
            file.write(f"{os.getpid()} rank {rank} {outcome.is_on} {outcome.reason}\\n")

    hooks = aten.hooks(load_settings({"SGLANG_FL_FLAGOS_PROFILE": "full"}), report)
    assert not misfits(hooks), misfits(hooks)
    register(hooks)
"""


def test_it_is_switched_on_once_in_each_process_that_runs_a_model(
    models: Mapping[Family, Path], tmp_path: Path, control: Control
) -> None:
    """Given the hook as on an accelerator, when two ranks serve, then each of them, and no other process, called it.

    FlagGems itself finds no device here, so its own reason arrives where a report belongs, and the server runs.
    """
    packages = write_distribution(tmp_path / "packages", "watched", WATCHED, "sglang.srt.plugins", "load")
    watched = tmp_path / "watched.txt"
    variables = {"PYTHONPATH": str(packages), "WATCHED": str(watched), "GEMS_VENDOR": "none"}
    with TP.server(models, tmp_path, variables) as server:
        answers = ask(server)
    assert answers == control(TP)
    found = [re.fullmatch(r"(\d+) rank (\d) (\w+) (.*)", line) for line in watched.read_text().splitlines()]
    assert all(found)
    assert sorted(match[2] for match in found if match) == ["0", "1"]
    assert len({match[1] for match in found if match}) == 2
    for match in found:
        assert match is not None
        assert match[3] == "False"
        assert "flag_gems" in match[4]


def test_a_flag_gems_that_ends_processes_does_not_end_a_server(
    models: Mapping[Family, Path], tmp_path: Path, control: Control
) -> None:
    """Given a flag_gems that calls sys.exit while it is imported, when switched on as on an accelerator, then the layer
    is off with that reason, and SGLang's tokens come.
    """
    packages = write_distribution(tmp_path / "packages", "watched", WATCHED, "sglang.srt.plugins", "load")
    (packages / "flag_gems").mkdir()
    (packages / "flag_gems" / "__init__.py").write_text("import sys\nsys.exit('no gpu')\n")
    watched = tmp_path / "watched.txt"
    with ONE.server(models, tmp_path, {"PYTHONPATH": str(packages), "WATCHED": str(watched)}) as server:
        answers = ask(server)
    assert answers == control(ONE)
    (line,) = watched.read_text().splitlines()
    assert re.fullmatch(r"\d+ rank 0 False flag_gems \S+ cannot be imported: SystemExit: no gpu", line)
