"""A wrong setting stops a server with one clear message, and is an ordinary error in a user's own program."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from sglang_fl.testing.server import CPU_ARGUMENTS, Environment
from sglang_fl.testing.tiny_model import Family

from .scripts import run_script
from .topologies import TP

pytestmark = pytest.mark.e2e

UNKNOWN_BACKEND = {"SGLANG_FL_DIST_BACKEND": "torhc"}
UNKNOWN_BACKEND_WORDS = ("SGLANG_FL_DIST_BACKEND", "'torhc'", "nccl, hccl, flagcx, torch, auto", "mean 'torch'")
# What is wrong, and what the one message must hold: source, value, what is allowed.
WRONG: dict[str, tuple[Environment, tuple[str, ...]]] = {
    "unknown-backend": (UNKNOWN_BACKEND, UNKNOWN_BACKEND_WORDS),
    "missing-file": ({"SGLANG_FL_CONFIG": "/nonexistent/my.yaml"}, ("SGLANG_FL_CONFIG", "/nonexistent/my.yaml")),
    "both-lists": (
        {"SGLANG_FL_OOT_BLACKLIST": "RMSNorm", "SGLANG_FL_OOT_WHITELIST": "SiluAndMul"},
        ("SGLANG_FL_OOT_BLACKLIST and SGLANG_FL_OOT_WHITELIST", "a black and a white list"),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_server_stops_before_a_scheduler_starts(name: str, models: Mapping[Family, Path], tmp_path: Path) -> None:
    """Given a wrong setting, then the server ends with a code that is not 0 and one message, without a traceback."""
    environment, words = WRONG[name]
    server = TP.server(models, tmp_path, environment)
    codes = server.run_to_end()
    log = server.log()
    messages = [line for line in log.splitlines() if line.startswith("sglang_fl: ")]
    assert codes == [1]
    assert len(messages) == 1, log
    assert all(word in messages[0] for word in words), messages
    assert log.count("sglang_fl") == messages[0].count("sglang_fl"), log
    assert "Traceback" not in log
    assert "server_args=" not in log, "SGLang logs its arguments before it starts schedulers"


ENGINE = """
import multiprocessing
import sglang

def start():
    try:
        sglang.Engine(model_path="/nonexistent/model", device="cpu")
    except Exception as error:
        print("CAUGHT", type(error).__name__, error)

if __name__ == "__main__":
    start()
    child = multiprocessing.get_context("spawn").Process(target=start)
    child.start()
    child.join()
    print("CODE", child.exitcode)
"""


def test_an_engine_raises_an_ordinary_error(tmp_path: Path) -> None:
    """Given a wrong setting, when a script makes an Engine, itself and in a child, then it can catch the message."""
    outcome = run_script(ENGINE, tmp_path, UNKNOWN_BACKEND)
    caught = outcome.lines("CAUGHT ")
    assert outcome.returncode == 0, outcome.errors
    assert outcome.lines("CODE ") == ["0"]
    assert len(caught) == 2, (outcome.output, outcome.errors)
    for message in caught:
        assert message.startswith("ConfigurationError sglang_fl: ")
        assert all(word in message for word in UNKNOWN_BACKEND_WORDS)


ATTENTION = """
import sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
for flags in ([], ["--attention-backend=torch_native"]):
    print("BACKEND", prepare_server_args(sys.argv[1:] + flags).attention_backend)
"""


@pytest.mark.parametrize(
    ("variable", "expected"),
    [("flex_attention", ["flex_attention", "torch_native"]), (None, ["torch_native", "torch_native"])],
)
def test_attention_backend_is_used_where_the_flag_is_absent(
    variable: str | None, expected: list[str], models: Mapping[Family, Path], tmp_path: Path
) -> None:
    """Given ATTENTION_BACKEND, when SGLang reads its arguments as its server does, then a flag wins over it."""
    arguments = (f"--model-path={models[Family.QWEN2]}", *CPU_ARGUMENTS)
    outcome = run_script(ATTENTION, tmp_path, {"ATTENTION_BACKEND": variable}, *arguments)
    assert outcome.returncode == 0, outcome.errors
    assert outcome.lines("BACKEND ") == expected
