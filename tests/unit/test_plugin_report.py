"""The first report: each layer with its reason, each setting with its source, and what has no effect says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
    """Given a CPU, when the plugin loads, then layer 1 is off with a reason and layers 2 and 3 say what they use."""
    assert "layer 1, ATen operators: off: " in configured
    assert "layer 2, fused operators: on: order flagos, vendor, reference (from default); without RMSNorm" in configured
    communication = "layer 3, communication: on: torch (from cpu.yaml), mode fastest"
    assert f"{communication}, for which comm.routes has no route here: as mode all" in configured


def test_a_setting_without_effect_says_so(configured: str) -> None:
    """Given settings of layers that are off, when reported, then they are said to have no effect, others are not."""
    lines = {line.split(" = ")[0]: line for line in configured.splitlines() if line.startswith("setting ")}
    assert lines["setting ops.blacklist"].endswith("(from SGLANG_FL_OOT_BLACKLIST)")
    assert lines["setting aten.blacklist"].endswith("no effect, layer 1, ATen operators is off")
    assert lines["setting ops.deny_vendors"].endswith("(from SGLANG_FL_DENY_VENDORS)")


SERVER = """
import sys
sys.argv[0] = "sglang"  # as the command of that name
import sglang_fl.plugin as plugin
plugin.load_plugin()
print("loaded")
"""


def refused(**variables: str) -> str:
    """What a server's process says when it ends because of these variables."""
    environment = {"PATH": "/usr/bin:/bin", "SGLANG_USE_CPU_ENGINE": "1", **variables}
    done = subprocess.run([sys.executable, "-c", SERVER], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "loaded" not in done.stdout, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("SGLANG_FL_COMM_AUDIT", "/nonexistent/folder/audit.json", "allowed: a file, in a folder that exists"),
        ("SGLANG_FL_COMM_AUDIT", "/tmp", "allowed: a file, in a folder that exists"),
        ("SGLANG_FL_COMM_DUMP_DIR", "/nonexistent/folder/dumps", "allowed: a folder of this user, no link"),
        ("ATTENTION_BACKEND", "tritn", "Did you mean 'triton'?"),
        ("SGLANG_FL_PLATFORM", "ascend", "asks for the platform ascend, but torch finds no such device here"),
        ("SGLANG_FL_DIST_BACKEND", "torhc", "Did you mean 'torch'?"),
    ],
)
def test_a_wrong_setting_ends_a_servers_process_with_one_message(variable: str, value: str, told: str) -> None:
    """Given a setting that cannot work, when a server's process loads the plugin, then it ends and says why."""
    text = refused(**{variable: value})
    assert variable in text and told in text


def test_yaml_nested_too_deeply_is_a_wrong_setting(tmp_path: Path) -> None:
    """Given YAML that the parser gives up on, when a server's process loads the plugin, then the file is named."""
    path = tmp_path / "deep.yaml"
    path.write_text("[" * 5000)
    assert "deep.yaml" in refused(SGLANG_FL_CONFIG=str(path))


BROKEN = """
import sys
sys.argv[0] = "sglang"
import sglang_fl.plugin as plugin
def broken(*_):
    raise OSError("libdevice.so: cannot open shared object")
plugin._switch_on = broken
plugin.load_plugin()
print("loaded")
"""


def test_any_other_error_while_loading_ends_a_servers_process_too() -> None:
    """Given an error that is no setting's, when a server's process loads the plugin, then it ends as well."""
    environment = {"PATH": "/usr/bin:/bin", "SGLANG_USE_CPU_ENGINE": "1"}
    done = subprocess.run([sys.executable, "-c", BROKEN], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "loaded" not in done.stdout
    assert "could not be loaded: OSError: libdevice.so" in done.stderr


def test_an_unknown_vendor_is_a_warning() -> None:
    """Given a vendor that nobody knows, when reported, then a warning suggests the one that was meant."""
    script = SCRIPT + "\nprint('\\n'.join(plugin.unknown_vendors(plugin._plugin.settings)))"
    environment = {"PATH": "/usr/bin:/bin", "SGLANG_USE_CPU_ENGINE": "1", "SGLANG_FL_DENY_VENDORS": "nvidai,cuda"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert "no such vendor is known: SGLANG_FL_DENY_VENDORS (ops.deny_vendors): found 'nvidai'" in done.stdout
    assert "found 'nvidia'" not in done.stdout
