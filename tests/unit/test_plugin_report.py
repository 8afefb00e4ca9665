"""The first report: each layer with its reason, each setting with its source, and what has no effect says so."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sglang_fl.plugin as plugin
plugin.load_plugin()
print("\\n".join(plugin._plugin.report_lines()))
"""


def report(**variables: str) -> str:
    """The first report of a fresh process with these variables."""
    environment = {"PATH": "/usr/bin:/bin", "SGLANG_USE_CPU_ENGINE": "1", **variables}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture(scope="module")
def configured() -> str:
    """A report with settings of every layer."""
    return report(
        SGLANG_FL_COMM_MODE="fastest",
        SGLANG_FL_OOT_BLACKLIST="RMSNorm",
        SGLANG_FL_FLAGOS_BLACKLIST="mul",
        SGLANG_FL_DENY_VENDORS="cuda",
    )


def test_every_layer_is_on_or_off_with_its_reason(configured: str) -> None:
    """Given a CPU, when the plugin loads, then layers 1 and 2 are off with a reason and layer 3 says what it uses."""
    assert "layer 1, ATen operators: off: " in configured
    assert "layer 2, fused operators: off: " in configured
    assert "layer 3, communication: on: torch (from cpu.yaml), mode fastest, which does as mode all" in configured


def test_a_setting_without_effect_says_so(configured: str) -> None:
    """Given settings of layers that are off, when reported, then they are said to have no effect, others are not."""
    lines = {line.split(" = ")[0]: line for line in configured.splitlines() if line.startswith("setting ")}
    assert lines["setting ops.blacklist"].endswith("no effect, layer 2, fused operators is off")
    assert lines["setting aten.blacklist"].endswith("no effect, layer 1, ATen operators is off")
    assert lines["setting ops.deny_vendors"].endswith("(from SGLANG_FL_DENY_VENDORS)")
