"""The values of the flagos backend's kernels, called as it calls them, by Triton's interpreter on the CPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from sglang_fl.testing.interpreted_flag_gems import OPERATORS

_LIMIT_S = 300.0
_LEAST_CASES = 20


@pytest.mark.parametrize("op_name", OPERATORS)
def test_the_values_are_right(op_name: str) -> None:
    """Given the float32 and float16 cases, when the kernels are interpreted, then results and inputs are right.

    What is refused is the gate by groups without a bias, and nothing else.
    """
    assert importlib.util.find_spec("flag_gems"), "pip install --no-deps flag_gems==5.0.2 sqlalchemy==2.0.48"
    command = [sys.executable, "-W", "ignore", "-m", "sglang_fl.testing.interpreted_flag_gems", op_name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert outcome["problems"] == []
    assert outcome["ran"] >= _LEAST_CASES
    assert all(label.startswith("groups, ") and "bias" not in label for label in outcome["refused"])
    assert bool(outcome["refused"]) == (op_name == "topk")
