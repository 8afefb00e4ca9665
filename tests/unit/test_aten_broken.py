"""Layer 1 with packages flag_gems that are broken, each in its own way: off with its reason, and nothing half done."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aten_cases import PRETEND, answer, is_flag_gems, run, write_version

# One process that has torch, and a child of it for each package.
_EACH = """
import os
from pathlib import Path
def outcome(case):
    sys.path.insert(0, case["folder"])
    found = switch_on(load_settings(case["variables"], None))
    with capturing():
        pass
    return {"is_on": found.is_on, "reason": found.reason, "owner": owner("aten::cumsum")}
cases = json.loads(sys.argv[1])
for name, case in cases.items():
    if os.fork() == 0:
        try:
            found = outcome(case)
        except BaseException as error:
            found = {"raised": f"{type(error).__name__}: {error}"}
        Path(case["folder"], "found.json").write_text(json.dumps(found))
        os._exit(0)
    os.wait()
print(json.dumps({name: json.loads(Path(case["folder"], "found.json").read_text()) for name, case in cases.items()}))
"""
_FULL = {"SGLANG_FL_FLAGOS_PROFILE": "full"}
_VERIFIED = {"SGLANG_FL_FLAGOS_VERIFIED": "cumsum"}
_WHITE = {"SGLANG_FL_FLAGOS_WHITELIST": "cumsum"}
_NO_LIST = "has not the list that sglang_fl knows"
_NO_EXCLUSIONS = "does not say which operators it leaves out by itself"
_HALF = "lib.impl('cumsum', cumsum, 'CUDA'); "


@dataclass(frozen=True)
class Broken:
    """A package: what follows in its module, files over or beside its own, settings; and the reason that is due."""

    reason: str
    more: str = ""
    files: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=lambda: _FULL)


def detector(text: str) -> dict[str, str]:
    """DeviceDetector's module."""
    return {"runtime/backend/device.py": text}


def config(text: str) -> dict[str, str]:
    """The module in which FlagGems looks for its own lists."""
    return {"config.py": text}


BROKEN = {
    "no device": Broken("finds no device that it knows here (No device were", "raise RuntimeError('No device were')"),
    "a package lacks": Broken("lacks a package: No module named 'no_such_package'", "import no_such_package"),
    "OSError": Broken("cannot be imported: OSError: libcuda.so.1", "raise OSError('libcuda.so.1')"),
    "SyntaxError": Broken("cannot be imported: SyntaxError", "def x(:"),
    "RecursionError": Broken("cannot be imported: RecursionError", "def f(): f()\nf()"),
    "ends the process": Broken("cannot be imported: SystemExit: no gpu", "import sys; sys.exit('no gpu')"),
    "no Exception": Broken("cannot be imported: X: x", "class X(BaseException): pass\nraise X('x')"),
    "detector raises": Broken(
        "cannot tell its device: RuntimeError: broken",
        files=detector("class DeviceDetector:\n    def __init__(self): raise RuntimeError('broken')"),
    ),
    "detector's module raises": Broken("device: RuntimeError: driver", files=detector("raise RuntimeError('driver')")),
    "detector's module ends": Broken("device: SystemExit: 4", files=detector("raise SystemExit(4)")),
    "detector's module is none": Broken("device: SyntaxError", files=detector("def x(:")),
    "detector's module has none": Broken("has DeviceDetector neither in", files=detector("")),
    "detector without names": Broken(
        "device: AttributeError",
        files=detector("class DeviceDetector:\n    vendor_name = name = dispatch_key = None"),
    ),
    "no list": Broken("has no _FULL_CONFIG", "del _FULL_CONFIG"),
    "list is none": Broken(f"{_NO_LIST}: TypeError", "_FULL_CONFIG = None"),
    "list is a mapping": Broken("leaves no operator to replace", "_FULL_CONFIG = {'mul.Tensor': mul}"),
    "short entry": Broken(f"{_NO_LIST}: ValueError", "_FULL_CONFIG = (('cumsum',),)"),
    "condition raises": Broken(
        f"{_NO_LIST}: RuntimeError: asks",
        "def c(): raise RuntimeError('asks the driver')\n_FULL_CONFIG = (('mul.Tensor', mul, c),)",
    ),
    "condition ends": Broken(f"{_NO_LIST}: SystemExit: 5", "_FULL_CONFIG = (('cumsum', cumsum, lambda: exit(5)),)"),
    "exclusions raise": Broken(
        f"{_NO_EXCLUSIONS}: FileNotFoundError: x.yaml",
        files=config("def resolve_user_setting(a, b): raise FileNotFoundError('x.yaml')"),
    ),
    "exclusions of another form": Broken(
        f"{_NO_EXCLUSIONS}: TypeError", files=config("def resolve_user_setting(a): return []")
    ),
    "exclusions are none": Broken(
        f"{_NO_EXCLUSIONS}: TypeError", files=config("def resolve_user_setting(a, b): return None")
    ),
    "exclusions' module raises": Broken(
        f"{_NO_EXCLUSIONS}: RuntimeError: yaml", files=config("raise RuntimeError('yaml')")
    ),
    "exclusions' module lacks a package": Broken(
        "lacks a package: No module named 'no_such_yaml'", files=config("import no_such_yaml")
    ),
    "no enable": Broken("failed while it registered: AttributeError", "del enable"),
    "enable of another form": Broken("failed while it registered: TypeError", "def enable(): pass"),
    "enable raises half way": Broken(
        "failed while it registered: ValueError: half", f"def enable(lib, **_): {_HALF}raise ValueError('half')"
    ),
    "enable ends half way": Broken(
        "failed while it registered: SystemExit: 3", f"def enable(lib, **_): {_HALF}raise SystemExit(3)"
    ),
    "a white list ends half way": Broken(
        "failed while it registered: SystemExit: 3",
        f"def only_enable(lib, **_): {_HALF}raise SystemExit(3)",
        variables=_WHITE,
    ),
    "a trial before graphs ends half way": Broken(
        "failed while it registered: SystemExit: 3",
        f"def only_enable(lib, **_): {_HALF}raise SystemExit(3)",
        variables=_VERIFIED,
    ),
    "nothing is registered": Broken("registered no operator", "def enable(**_): pass"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What became of layer 1 with each package."""
    cases = {}
    for number, (name, package) in enumerate(BROKEN.items()):
        folder = tmp_path_factory.mktemp(f"package{number}")
        write_version(folder, "5.0.2", "device", more=package.more + "\n")
        for file, text in package.files.items():
            (folder / "flag_gems" / file).write_text(text + "\n")
        cases[name] = {"folder": str(folder), "variables": package.variables}
    return answer(run(PRETEND + _EACH, json.dumps(cases)))


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_package_is_off_with_its_reason(found: Any, name: str) -> None:
    """Given a broken flag_gems, when switched on, then the layer is off for that reason, and PyTorch has its own."""
    outcome = found[name]
    assert "raised" not in outcome, outcome["raised"]
    assert not outcome["is_on"]
    assert BROKEN[name].reason in outcome["reason"]
    assert "5.0.2" in outcome["reason"] or "leaves no operator" in outcome["reason"]
    assert not is_flag_gems(outcome["owner"])


def test_a_whole_package_is_on(tmp_path: Path) -> None:
    """Given the same package without a fault, when switched on, then it is on: the faults are what turns it off."""
    write_version(tmp_path, "5.0.2", "device")
    cases = {"whole": {"folder": str(tmp_path), "variables": _FULL}}
    outcome = answer(run(PRETEND + _EACH, json.dumps(cases)))["whole"]
    assert outcome["is_on"], outcome
    assert is_flag_gems(outcome["owner"])


def test_an_interrupt_passes(tmp_path: Path) -> None:
    """Given Ctrl-C while flag_gems is imported, when switched on, then the process ends by it."""
    write_version(tmp_path, "5.0.2", "device", more="raise KeyboardInterrupt\n")
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})" + PRETEND + "switch_on(load_settings())"
    done = run(script, **_FULL)
    assert done.returncode != 0
    assert "KeyboardInterrupt" in done.stderr


def test_a_damaged_table_is_a_reason(tmp_path: Path) -> None:
    """Given a stored table that is cut off, when profile verified is switched on, then the reason names the file."""
    table = tmp_path / "cut.csv"
    table.write_text("# flag_gems=5.0.2\noperator,fun\nmul")
    script = (
        PRETEND
        + "from pathlib import Path\nfrom sglang_fl.aten import layer\n"
        + f"layer.STORED_TABLES['nvidia.yaml'] = Path({str(table)!r})\n"
        + "found = switch_on(load_settings({}, 'cuda'))\nprint(json.dumps([found.is_on, found.reason]))"
    )
    is_on, reason = answer(run(script))
    assert not is_on
    assert f"{table} is no table of a sweep" in reason


# FlagGems 4.2.0 has its list inside a function.
_OF_4_2 = """
__version__ = "4.2.0"
def cumsum(a, dim, *, dtype=None): return a
def enable(lib=None, unused=None, registrar=None, record=False, once=False, path=None):
    registrar((("cumsum", cumsum),), user_unused_ops_list=list(set(unused or [])), lib=lib)
"""


def test_the_form_of_4_2_is_too_old(tmp_path: Path) -> None:
    """Given 4.2.0's form, then the layer is off with what to install: before an import where the version is known, and
    after it where it is not.
    """
    write_version(tmp_path, "4.2.0", "device")
    (tmp_path / "flag_gems" / "__init__.py").write_text(_OF_4_2)
    reason = "flag_gems 4.2.0 has no _FULL_CONFIG, the list of its operators that 5.0 and later have: pip install"
    cases = {"old": {"folder": str(tmp_path), "variables": _FULL}}
    assert answer(run(PRETEND + _EACH, json.dumps(cases)))["old"]["reason"].startswith(reason)

    known = tmp_path / "flag_gems-4.2.0.dist-info"
    known.mkdir()
    (known / "METADATA").write_text("Metadata-Version: 2.1\nName: flag_gems\nVersion: 4.2.0\n")
    script = (
        "import json, sys\nsys.path.insert(0, sys.argv[1])\nfrom sglang_fl.aten.layer import before_import\n"
        "from sglang_fl.config import load_settings\nfound = before_import(load_settings({}, 'cuda'), 'cuda')\n"
        "print(json.dumps([found.is_on, found.reason, 'flag_gems' in sys.modules]))"
    )
    is_on, said, is_imported = answer(run(script, str(tmp_path)))
    assert not is_on
    assert said.startswith(reason)
    assert not is_imported
