"""bisect on real servers: each planted fault is named, nothing is found where nothing is wrong, and nothing is left.

The runs go three at a time: a server's start uses one core, and not all of the time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from sglang_fl.testing.server import CPU_ARGUMENTS, CPU_ENVIRONMENT
from sglang_fl.testing.tiny_model import Family

from .distributions import write_distribution
from .test_faulty_collective import FAULTY
from .test_operators import PLANTED

pytestmark = pytest.mark.e2e

MARK = "SGLANG_FL_TEST_BISECT"

# A stand-in for FlagGems, which has no device on a CPU: the names that layer 1 uses of it, and two operators, of
# which silu is one per cent off. It shows that bisect names an ATen operator, and nothing of FlagGems itself.
FLAG_GEMS = {
    "flag_gems/__init__.py": """
from flag_gems.ops.two import rsqrt, silu

__version__ = "0.0-standin"
_FULL_CONFIG = (("rsqrt", rsqrt), ("silu", silu))


def enable(lib=None, unused=()):
    only_enable(lib, [function.__name__ for _, function in _FULL_CONFIG if function.__name__ not in unused])


def only_enable(lib=None, include=()):
    for key, function in _FULL_CONFIG:
        if function.__name__ in include:
            lib.impl(key, function, "CPU")
""",
    "flag_gems/ops/__init__.py": "",
    "flag_gems/ops/two.py": """
import logging

import torch

logger = logging.getLogger(__name__)


def rsqrt(x):
    logger.debug("STANDIN RSQRT")
    return torch.reciprocal(torch.sqrt(x))


def silu(x):
    logger.debug("STANDIN SILU")
    return 1.01 * x * torch.sigmoid(x)
""",
    "flag_gems/runtime/__init__.py": "",
    "flag_gems/runtime/backend/__init__.py": "",
    "flag_gems/runtime/backend/device.py": """
import torch


class DeviceDetector:
    vendor_name = "standin"
    # What torch was built for: layer 1 compares.
    name = getattr(torch.accelerator.current_accelerator(), "type", "cpu")
    dispatch_key = "CPU"
""",
}

# Layer 1 as on an accelerator: the plugin itself leaves it off on a CPU. A plugin of another name, so bisect keeps it
# when it starts SGLang without sglang_fl, to which layer 1 belongs.
AS_ON_AN_ACCELERATOR = """
import logging
import os


def load():
    selected = os.environ.get("SGLANG_PLUGINS", "")
    if selected and "sglang_fl" not in selected.split(","):
        return
    from sglang_fl.config import load_settings
    from sglang_fl.sglang_hooks import aten
    from sglang_fl.sglang_hooks.registration import register

    def report(outcome):
        state = "on" if outcome.is_on else "off"
        logging.getLogger("sglang_fl").info("[sglang_fl] layer 1, ATen operators: %s: %s", state, outcome.reason)

    settings = load_settings(platform="cpu")
    if settings.aten.enabled:
        register(aten.hooks(settings, report))
"""


# Python imports it before anything else: a server that says one line, then nothing, and never gets ready.
NEVER_READY = """
import sys
import time

if "sglang.launch_server" in sys.orig_argv:
    print("PLANTED: this server never gets ready", flush=True)
    time.sleep(600)
"""


@dataclass(frozen=True)
class Run:
    """A run of bisect: options before ``--``, further arguments of the server, variables; what it is to find."""

    variables: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    part: str | None = None
    item: str = ""
    starts: int = 2


@dataclass(frozen=True)
class Ended:
    """How it ended: exit code, all that it printed, report.json, and the processes that it left."""

    code: int
    output: str
    report: Mapping[str, Any]
    left: list[str]


RUNS = {
    "collective": Run(
        {
            "SGLANG_FL_DIST_BACKEND": "auto",
            "SGLANG_FL_OOT_ENABLED": "0",
            "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
        },
        arguments=("--tp-size=2",),
        part="layer 3, communication",
        item="all_reduce",
        starts=5,
    ),
    "hang": Run(options=("--ready-limit-s=3",)),
    "operator": Run(
        {
            "SGLANG_FL_PREFER": "vendor",
            "SGLANG_FL_DENY_VENDORS": "on_fire",
            "SGLANG_FL_OOT_BLACKLIST": "RotaryEmbedding",
        },
        part="layer 2, fused operators",
        item="SiluAndMul",
        starts=5,
    ),
    "aten": Run(
        {"SGLANG_FL_FLAGOS_PROFILE": "full", "SGLANG_FL_OOT_ENABLED": "0"},
        part="layer 1, ATen operators",
        item="silu",
        starts=5,
    ),
    "nothing": Run(),
}


def packages(name: str, folder: Path) -> Path | None:
    """The folder for PYTHONPATH that plants the fault of a run."""
    if name == "operator":
        return write_distribution(folder, "planted", PLANTED, "sglang_fl.ops", "register_builtins")
    if name == "collective":
        return write_distribution(folder, "faulty", FAULTY, "sglang_fl.comm", "register_comm")
    if name == "hang":
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(NEVER_READY)
        return folder
    if name == "aten":
        for path, source in FLAG_GEMS.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(source)
        return write_distribution(folder, "as_accelerator", AS_ON_AN_ACCELERATOR, "sglang.srt.plugins", "load")
    return None


def start(run: Run, folder: Path, model: Path, pythonpath: Path | None = None) -> subprocess.Popen[str]:
    """``python -m sglang_fl bisect`` as a user types it, with MARK in its environment and in its servers'."""
    variables = {**CPU_ENVIRONMENT, **run.variables, MARK: str(folder)}
    if pythonpath is not None:
        variables["PYTHONPATH"] = str(pythonpath)
    command = [sys.executable, "-m", "sglang_fl", "bisect", f"--folder={folder / 'bisect'}", *run.options, "--"]
    return subprocess.Popen(
        [*command, f"--model-path={model}", "--dtype=float32", *CPU_ARGUMENTS, *run.arguments],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def left_of(folder: Path) -> list[str]:
    """The processes with this run's mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(folder):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def finish(process: subprocess.Popen[str], folder: Path) -> Ended:
    """Wait for the end."""
    try:
        output, _ = process.communicate(timeout=1200)
    finally:
        process.kill()
    path = folder / "bisect" / "report.json"
    report = json.loads(path.read_text()) if path.exists() else {}
    return Ended(process.returncode, output, report, left_of(folder))


@pytest.fixture(scope="module")
def ended(
    models: Mapping[Family, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Ended]]]:
    """Every run, three at a time, the longest first."""

    def whole(name: str) -> Ended:
        folder = tmp_path_factory.getbasetemp() / f"bisect-{name}"
        folder.mkdir()
        planted = packages(name, folder / "packages")
        return finish(start(RUNS[name], folder, models[Family.QWEN2], planted), folder)

    with ThreadPoolExecutor(3) as pool:
        yield {name: pool.submit(whole, name) for name in RUNS}


@pytest.mark.parametrize("name", ["nothing", "operator", "aten", "collective"])
def test_a_planted_fault_is_named(name: str, ended: dict[str, Future[Ended]]) -> None:
    """Given one wrong operator, ATen operator or collective, or none, when bisected, then it alone is named."""
    run, outcome = RUNS[name], ended[name].result()
    assert outcome.report["part"] == run.part, outcome.output
    assert outcome.report["item"] == run.item, outcome.output
    assert outcome.code == (0 if run.part is None else 1), outcome.output
    assert outcome.left == []
    starts = outcome.report["starts"]
    assert len(starts) == run.starts, outcome.output
    assert starts[0]["environment"]["SGLANG_PLUGINS"] == ("as_accelerator" if name == "aten" else "__none__")
    folder = outcome.output.rsplit(" are in ", 1)[1].strip()
    for trial in starts:
        assert {"equal": True, "differs": False}[trial["outcome"]] == (
            trial["first_difference"] in ("", "the baseline")
        )
        assert Path(folder, f"{trial['label']}.log").exists()
        assert f"{trial['label']}: {trial['title']}" in outcome.output
    if run.part is not None:
        assert starts[-1]["outcome"] == "equal", "without the culprit nothing differs"


def test_the_verdict_says_what_carried_it_and_what_to_do(ended: dict[str, Future[Ended]]) -> None:
    """Given the runs with a fault, then each verdict names the implementation and a setting that serves without it."""
    operator, aten, collective = (ended[name].result().output for name in ("operator", "aten", "collective"))
    assert "SiluAndMul, which ran on vendor(vendor.planted) makes the difference" in operator
    assert "serve with SGLANG_FL_OOT_BLACKLIST=RotaryEmbedding,SiluAndMul." in operator
    assert "serve with SGLANG_FL_FLAGOS_BLACKLIST=silu." in aten
    assert "all_reduce, called by tp:0 (faulty), makes the difference" in collective
    assert "serve with SGLANG_FL_COMM_MODE=fastest SGLANG_FL_COMM_ROUTES=all_reduce=native." in collective


def test_a_start_can_be_repeated_by_hand(ended: dict[str, Future[Ended]]) -> None:
    """Given a run, then each start has a script with the settings that the table shows."""
    report, output = ended["operator"].result().report, ended["operator"].result().output
    folder = Path(output.rsplit(" are in ", 1)[1].strip())
    last = report["starts"][-1]
    script = (folder / f"{last['label']}.sh").read_text()
    assert "export SGLANG_FL_OOT_BLACKLIST=RotaryEmbedding,SiluAndMul\n" in script
    assert "-m sglang.launch_server --model-path=" in script


def test_a_server_that_never_gets_ready_ends_the_run_with_its_log(ended: dict[str, Future[Ended]]) -> None:
    """Given a server that hangs at its start, then exit code 2, the limit, the end of the log, and nothing left."""
    outcome = ended["hang"].result()
    assert outcome.code == 2, outcome.output
    assert outcome.output.count("FAILED after") == 1
    assert "was not ready after 3 s" in outcome.output
    assert outcome.output.count("the log ends:\n  | PLANTED: this server never gets ready\n") == 1
    assert "SGLang alone, without the plugin, does not serve with these arguments: was not ready" in outcome.output
    assert outcome.left == []


def test_an_interrupt_leaves_nothing(models: Mapping[Family, Path], tmp_path: Path) -> None:
    """Given a server that is starting, when the user presses Ctrl-C, then the run ends and no process is left."""
    process = start(Run(), tmp_path, models[Family.QWEN2])
    log = tmp_path / "bisect" / "01-native.log"
    until = time.monotonic() + 300
    while not (log.exists() and "server_args=" in log.read_text()):
        assert time.monotonic() < until, "the server said nothing"
        time.sleep(0.1)
    assert len(left_of(tmp_path)) > 1
    process.send_signal(signal.SIGINT)
    outcome = finish(process, tmp_path)
    assert outcome.code == 128 + signal.SIGINT, outcome.output
    assert outcome.left == []
