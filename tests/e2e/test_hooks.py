"""Hooks are live everywhere and applied once, or the scheduler says so; without the plugin SGLang is untouched."""

from __future__ import annotations

import json
import sys
import sysconfig
import venv
from collections.abc import Mapping
from pathlib import Path

import pytest

from sglang_fl.testing.server import Environment
from sglang_fl.testing.tiny_model import Family

from .distributions import write_distribution
from .scripts import run_script
from .topologies import CONTROL, ONE

pytestmark = pytest.mark.e2e

# Another plugin hooks one of our targets and applies hooks at once: SGLang then takes that target as done and
# ignores ours, with a log line at most.
ONE_TAKEN = '''
"""A plugin that does not wait for the others."""
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

TARGET = "sglang.srt.distributed.parallel_state.GroupCoordinator.all_reduce"


def load():
    HookRegistry.register(TARGET, lambda original, self, input_: original(self, input_), HookType.AROUND)
    HookRegistry.apply_hooks()
'''

# And one after which SGLang applies no hook at all, so that none of ours can notice.
NONE_APPLIED = '''
"""A plugin that breaks SGLang's registry."""
from sglang.srt.plugins.hook_registry import HookRegistry


def load():
    HookRegistry.apply_hooks = classmethod(lambda cls: None)
'''


@pytest.mark.parametrize("source", [ONE_TAKEN, NONE_APPLIED], ids=["one-taken", "none-applied"])
def test_a_hook_that_is_not_live_stops_the_server(source: str, models: Mapping[Family, Path], tmp_path: Path) -> None:
    """Given a plugin because of which SGLang ignores hooks, then the scheduler raises and names them, also alone."""
    packages = write_distribution(tmp_path / "packages", "other", source, "sglang.srt.plugins", "load")
    server = ONE.server(models, tmp_path, {"PYTHONPATH": str(packages)})
    codes = server.run_to_end()
    log = server.log()
    assert codes[0] != 0
    assert "HookError: sglang_fl: required hooks are not live: " in log, log
    assert "GroupCoordinator.all_reduce: SGLang did not apply the hook" in log


# Prints what GroupCoordinator's methods are, before and after SGLang has loaded plugins.
METHODS = """
import importlib.util, inspect, json, sys
import sglang.srt.managers.scheduler
from sglang.srt.distributed import parallel_state
from sglang.srt.model_executor import model_runner
from sglang.srt.plugins import hook_registry, load_plugins

def functions():
    found = {name: value for name, value in vars(parallel_state.GroupCoordinator).items() if inspect.isfunction(value)}
    modules = {"state": parallel_state, "runner": model_runner}
    imported = {f"{m}.{n}": getattr(module, n) for m, module in modules.items()
                for n in ("init_distributed_environment", "initialize_model_parallel")}
    return {**found, **imported}

before = functions()
load_plugins()
after = functions()
print("REPORT", json.dumps({
    "methods": len(before),
    "changed": sorted(name for name in before if before[name] is not after[name]),
    "lost": sorted(set(before) - set(after)),
    "wrapped": sorted(n for n, f in after.items() if f.__code__.co_filename == hook_registry.__file__),
    "attribute": hasattr(parallel_state.GroupCoordinator, "fl_communicator"),
    "installed": importlib.util.find_spec("sglang_fl") is not None,
    "loaded": sorted(name for name in sys.modules if name.split(".")[0] == "sglang_fl"),
}))
"""


def _uninstalled(folder: Path) -> Path:
    """An environment with everything that is installed beside this package, and not this package itself."""
    venv.create(folder, symlinks=True, with_pip=False)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    target = folder / "lib" / version / "site-packages"
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "sglang_fl-" not in entry.name and "sglang_fl." not in entry.name and entry.name != "sglang_fl":
            (target / entry.name).symlink_to(entry)
    return folder / "bin/python"


@pytest.mark.parametrize("way", ["uninstalled", "switched-off"])
def test_without_the_plugin_sglang_is_as_it_was(way: str, tmp_path: Path) -> None:
    """Given no plugin, installed or selected, when SGLang loads plugins, then each method is the same object."""
    is_uninstalled = way == "uninstalled"
    interpreter = _uninstalled(tmp_path / "environment") if is_uninstalled else Path(sys.executable)
    environment: Environment = {} if is_uninstalled else CONTROL
    outcome = run_script(METHODS, tmp_path, environment, interpreter=interpreter)
    assert outcome.returncode == 0, outcome.errors
    report = json.loads(outcome.lines("REPORT ")[0])
    assert report["installed"] is not is_uninstalled
    assert report["methods"] > 30
    assert not report["attribute"]
    assert [report[name] for name in ("changed", "lost", "wrapped", "loaded")] == [[], [], [], []], report


# Everything that SGLang's scheduler imports is imported first, as in a real scheduler process.
TWICE = """
import json
import sglang.srt.managers.scheduler
from sglang.srt.distributed import parallel_state
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
import sglang_fl
from sglang_fl import plugin
from sglang_fl.sglang_hooks.registration import dead

methods = dict(vars(parallel_state.GroupCoordinator))
load_plugins()
first = dict(vars(parallel_state.GroupCoordinator))
load_plugins()
sglang_fl.load_plugin()
HookRegistry.apply_hooks()
again = dict(vars(parallel_state.GroupCoordinator))

def depth(function):
    count = 0
    while hasattr(function, "__wrapped__"):
        function, count = function.__wrapped__, count + 1
    return count

hooks = plugin._plugin.groups.hooks
print("REPORT", json.dumps({
    "hooks": len(hooks),
    "dead": dead(hooks),
    "hooked": sorted(name for name in methods if methods[name] is not first[name]),
    "wanted": sorted(h.target.rpartition(".")[2] for h in hooks if ".GroupCoordinator." in h.target),
    "changed_again": sorted(name for name in first if first[name] is not again[name]),
    "depths": sorted({depth(first[n]) - depth(methods[n]) for n in methods if methods[n] is not first[n]}),
}))
"""


def test_every_hook_is_live_once_however_often_the_plugin_is_loaded(tmp_path: Path) -> None:
    """Given modules imported before, when plugins are loaded again and again, then each hook is there exactly once."""
    outcome = run_script(TWICE, tmp_path, {})
    assert outcome.returncode == 0, outcome.errors
    report = json.loads(outcome.lines("REPORT ")[0])
    assert report["hooks"] >= 20
    assert report["dead"] == []
    assert report["hooked"] == report["wanted"]
    assert report["changed_again"] == []
    assert report["depths"] == [1]
