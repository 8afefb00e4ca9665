"""``sglang.Engine`` in a user's own script, with the plugin: the tokens of SGLang alone, and nothing left behind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from sglang_fl.testing.audits import VARIABLE, read_audits
from sglang_fl.testing.tiny_model import DEFAULT_PROMPTS, GREEDY_TOKENS, Family

from .conftest import Control
from .scripts import run_script
from .topologies import TP

pytestmark = pytest.mark.e2e

ENGINE = """
import json, sys, time
import psutil
import sglang

if __name__ == "__main__":
    model, prompts, new_tokens = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    engine = sglang.Engine(
        model_path=model, tp_size=2, device="cpu", dtype="float32", max_total_tokens=4096, grammar_backend="none",
        disable_radix_cache=True, skip_server_warmup=True, log_level="warning",
    )
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    print("TOKENS", json.dumps([reply["output_ids"] for reply in engine.generate(prompts, sampling)]))
    children = psutil.Process().children(recursive=True)
    print("SCHEDULERS", json.dumps([c.pid for c in children if "sglang::scheduler" in " ".join(c.cmdline())]))
    time.sleep(2)  # the audit is written twice a second
    engine.shutdown()
    print("LEFT", json.dumps([c.pid for c in children if c.is_running() and c.status() != "zombie"]))
"""


def test_an_engine_at_tp_2_is_carried_by_the_plugin(
    models: Mapping[Family, Path], control: Control, tmp_path: Path
) -> None:
    """Given a script that makes an Engine, when it generates, then each scheduler's calls went through the plugin."""
    expected = control(TP)
    audit = tmp_path / "audit.json"
    arguments = (str(models[Family.QWEN2]), json.dumps(DEFAULT_PROMPTS), str(GREEDY_TOKENS))
    environment = {VARIABLE: str(audit), "SGLANG_CPU_OMP_THREADS_BIND": "0|0"}
    outcome = run_script(ENGINE, tmp_path, environment, *arguments)
    assert outcome.returncode == 0, outcome.errors
    found = {name: json.loads(outcome.lines(f"{name} ")[0]) for name in ("TOKENS", "SCHEDULERS", "LEFT")}
    assert [tuple(tokens) for tokens in found["TOKENS"]] == list(expected.batched)
    audits = read_audits(audit, 2)
    assert {report.pid for report in audits} == set(found["SCHEDULERS"])
    assert found["LEFT"] == []
    for report in audits:
        assert report.hooks_live == report.hooks > 0
        assert report.calls()["all_reduce"] >= GREEDY_TOKENS * TP.calls_of(report.rank)["all_reduce"]
