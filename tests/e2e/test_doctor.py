"""The doctor on real set-ups, right and wrong: settings, FlagCX, packages that are absent, hooks, hidden packages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import sglang_fl
from sglang_fl.testing.server import Environment

from .conftest import ROOT
from .distributions import write_distribution
from .test_hooks import ONE_TAKEN

pytestmark = pytest.mark.e2e

LIMIT_S = 240.0
HOSTCX = ROOT / "build/hostcx"
MODULE = ("-m", "sglang_fl")


@dataclass(frozen=True)
class Examined:
    """What one run of the doctor gave."""

    code: int
    report: dict[str, Any]
    errors: str

    def problems(self, *words: str) -> list[str]:
        """The problems that hold all of ``words``, each with what to do."""
        texts = [f"{each['area']}: {each['found']} -> {each['action']}" for each in self.report["problems"]]
        return [text for text in texts if all(word in text for word in words)]

    def warnings(self, *words: str) -> list[str]:
        """The same of the warnings."""
        return [each["found"] for each in self.report["warnings"] if all(word in each["found"] for word in words)]

    def carriers(self) -> set[str]:
        """What carries the collectives."""
        return {each["chosen"] for each in self.report["collectives"]}

    def versions(self) -> dict[str, str]:
        """Name to version."""
        return {each["name"]: each["value"] for each in self.report["versions"]}


def doctor(
    folder: Path,
    environment: Environment | None = None,
    *arguments: str,
    command: Sequence[str] = (sys.executable, *MODULE),
) -> Examined:
    """Run ``doctor --json`` in ``folder``."""
    removed = {"PYTHONDONTWRITEBYTECODE": None, "FLAGCX_PATH": None, "GLOO_SOCKET_IFNAME": None, "HOSTCX_QUIET": "1"}
    changes = {**removed, **(environment or {})}
    merged = {name: value for name, value in {**os.environ, **changes}.items() if value is not None}
    line = [*command, "doctor", "--json", *arguments]
    done = subprocess.run(
        line,
        cwd=folder,
        env=merged,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode in (0, 1) and done.stdout.startswith("{"), done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] is (done.returncode == 0)
    assert all(each["action"] for each in report["problems"]), "a problem without what to do"
    return Examined(done.returncode, report, done.stderr)


def test_a_healthy_install_without_settings_has_no_problem(tmp_path: Path) -> None:
    """Given nothing configured, then code 0, each section is filled, and every hook is live in both processes."""
    found = doctor(tmp_path)
    assert found.code == 0, found.problems()
    report = found.report
    assert found.versions()["sglang"] == "0.5.11" and found.versions()["sglang_fl"] == sglang_fl.__version__
    assert {layer["name"][:7]: layer["is_on"] for layer in report["layers"]} == {
        "layer 1": False,
        "layer 2": True,
        "layer 3": True,
    }
    assert all(layer["reason"] for layer in report["layers"])
    assert {each["item"] for each in report["operators"]} >= {"silu_and_mul", "rms_norm", "rotary_embedding", "topk"}
    assert {each["chosen"] for each in report["operators"]} == {"reference"}
    assert found.carriers() == {"torch"} and len(report["collectives"]) == 8
    assert all(other["reason"] for each in report["collectives"] for other in each["passed_over"])
    assert [each["process"] for each in report["hooks"]] == ["main", "spawned"]
    for each in report["hooks"]:
        assert each["live"] == each["total"] > 20 and each["dead"] == []
    sources = {each["field"]: each["source"] for each in report["settings"]}
    assert sources["comm.backend"] == "cpu.yaml" and sources["comm.mode"] == "default"
    assert report["network"]["host_name"] and report["network"]["interfaces"]


def test_the_tables_end_with_the_verdict(tmp_path: Path) -> None:
    """Given no --json and no terminal, then tables without escape sequences, and one line of progress elsewhere."""
    environment = {name: value for name, value in os.environ.items() if name != "FLAGCX_PATH"}
    line = [sys.executable, *MODULE, "doctor", "--quick"]
    done = subprocess.run(
        line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert done.stdout.rstrip().splitlines()[-1] == "OK: nothing that was asked for is in the way."
    assert "doctor: looking" in done.stderr


# --- case 20: FLAGCX_PATH and SGLANG_FL_DIST_BACKEND ---

PATHS = {"unset": None, "empty": "", "right": str(HOSTCX), "wrong": "/nonexistent/FlagCX"}
BACKENDS = (None, "", "auto", "flagcx", "nccl", "hccl", "torch", "flagcxx")


def expected_of(path: str, backend: str | None) -> tuple[str, str]:
    """What carries the collectives, and a word of the problem that there must be; empty if there must be none."""
    if backend == "flagcxx":
        return "", "Did you mean 'flagcx'?"
    if backend in ("nccl", "hccl"):
        return "torch", f"asked for is {backend}"
    if backend == "torch":
        return "torch", ""
    if path == "right":
        return "flagcx", ""
    is_asked = path == "wrong" or backend == "flagcx"
    return "torch", "asks for FlagCX, which cannot be opened" if is_asked else ""


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, str | None], Examined]:
    """Every pair of the two variables, examined without SGLang, two at a time."""
    folder = tmp_path_factory.mktemp("matrix")
    pairs = [(path, backend) for path in PATHS for backend in BACKENDS]

    def examine(pair: tuple[str, str | None]) -> Examined:
        path, backend = pair
        return doctor(folder, {"FLAGCX_PATH": PATHS[path], "SGLANG_FL_DIST_BACKEND": backend}, "--quick")

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(pairs, pool.map(examine, pairs), strict=True))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_flagcx_path_and_backend(
    path: str, backend: str | None, matrix: Mapping[tuple[str, str | None], Examined]
) -> None:
    """Given one pair, then what groups would get, and exactly one problem, with its source, where it cannot be had."""
    found = matrix[path, backend]
    carrier, word = expected_of(path, backend)
    if carrier:
        assert found.carriers() == {carrier}
    assert found.code == (1 if word else 0)
    assert len(found.problems()) == len(found.problems(word)) == (1 if word else 0), found.problems()
    if word:
        source = "SGLANG_FL_DIST_BACKEND" if backend in ("flagcxx", "nccl", "hccl") else "FLAGCX"
        assert source in found.problems()[0]
    if path in ("right", "wrong") and backend in ("nccl", "hccl", "torch"):
        assert found.warnings("FLAGCX_PATH", "is not used")


def test_flagcxs_path_and_symbols_are_shown(matrix: Mapping[tuple[str, str | None], Examined]) -> None:
    """Given a library, then its file, its memory, and how much of the API it has."""
    rows = {each["name"]: each for each in matrix["right", None].report["versions"]}
    assert rows["FlagCX"]["value"] == str(HOSTCX / "lib/libflagcx.so")
    assert rows["FlagCX"]["note"] == "HOST host memory"
    assert "operations" in rows["FlagCX symbols"]["value"] and "missing: " in rows["FlagCX symbols"]["note"]


SOURCES = {
    "hangs": (
        "it did not end within 8 s",
        "__attribute__((constructor)) static void hang(void) { for (;;) sleep(1); }",
    ),
    "crashes": ("SIGSEGV", "__attribute__((constructor)) static void fall(void) { *(volatile int *)0 = 1; }"),
}


@pytest.mark.parametrize("fault", SOURCES)
def test_a_library_that_hangs_or_crashes_is_named_and_the_doctor_ends(fault: str, tmp_path: Path) -> None:
    """Given a libflagcx whose opening never ends or falls over, then a problem says so; what came before is told."""
    word, source = SOURCES[fault]
    (tmp_path / "planted.c").write_text(f"#include <unistd.h>\n{source}\n")
    (tmp_path / "lib").mkdir()
    library = tmp_path / "lib/libflagcx.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "planted.c")], check=True)
    found = doctor(tmp_path, {"FLAGCX_PATH": str(tmp_path)}, "--quick", "--limit-s", "8" if fault == "hangs" else "60")
    assert found.code == 1
    (problem,) = found.problems("looking at FlagCX failed")
    assert word in problem
    assert found.report["device"] and found.report["settings"]


# --- case 22: packages that are absent ---


def _environment_without(folder: Path, names: Iterable[str]) -> Path:
    """A Python with everything that is installed here but what belongs to ``names``."""
    venv.create(folder, symlinks=True, with_pip=False)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    target = folder / "lib" / version / "site-packages"
    left_out = tuple(names)
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if (
            not entry.name.startswith(tuple(f"{name}{end}" for name in left_out for end in ("-", ".")))
            and entry.name not in left_out
        ):
            (target / entry.name).symlink_to(entry)
    for pth in target.glob("*.pth"):  # read from where they are, not through the link
        content = pth.read_text()
        pth.unlink()
        pth.write_text(content)
    return folder / "bin/python"


def test_without_flag_gems_the_plugin_loads_and_the_reason_is_shown(tmp_path: Path) -> None:
    """Given no flag_gems, then no problem: layer 1 is off, and each operator says why it is not FlagGems'."""
    python = _environment_without(tmp_path / "environment", ["flag_gems"])
    found = doctor(tmp_path, {}, command=(str(python), *MODULE))
    assert found.code == 0, found.problems()
    assert found.versions()["flag_gems"] == "not installed"
    reasons = {o["reason"] for each in found.report["operators"] for o in each["passed_over"] if o["name"] == "flagos"}
    assert any("flag_gems is not installed" in reason for reason in reasons)
    assert all(each["live"] == each["total"] > 20 for each in found.report["hooks"])


def test_without_flag_gems_asking_for_layer_1_is_a_problem(tmp_path: Path) -> None:
    """Given a setting that asks for layer 1 where it cannot be had, then a problem names the setting and the reason."""
    found = doctor(tmp_path, {"SGLANG_FL_FLAGOS_PROFILE": "full"})
    assert found.code == 1
    assert found.problems("layer 1", "SGLANG_FL_FLAGOS_PROFILE", "for which FlagGems has no device")


@pytest.mark.parametrize("module", ["device", "device_finder"])
def test_flag_gems_with_its_detector_in_either_place_is_no_problem(module: str, tmp_path: Path) -> None:
    """Given a flag_gems of either age, then the plugin loads, and the version is shown."""
    package = tmp_path / "packages/flag_gems"
    backend = package / "runtime/backend"
    backend.mkdir(parents=True)
    for folder in (package, package / "runtime", backend):
        (folder / "__init__.py").write_text("")
    (backend / f"{module}.py").write_text("class DeviceDetector:\n    vendor_name = name = 'none'\n")
    info = tmp_path / "packages/flag_gems-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flag_gems\nVersion: 9.9\n")
    found = doctor(tmp_path, {"PYTHONPATH": str(tmp_path / "packages")})
    assert found.code == 0, found.problems()
    assert found.versions()["flag_gems"] == "9.9"


def test_without_sgl_kernel_the_plugin_loads_and_the_scheduler_is_the_problem(tmp_path: Path) -> None:
    """Given neither sgl_kernel nor its stand-in, then the plugin is live in SGLang's command, and what SGLang's own
    scheduler lacks is a problem that says what to do."""
    python = _environment_without(tmp_path / "environment", ["sglang_fl_kernel_standin"])
    found = doctor(tmp_path, {}, command=(str(python), *MODULE))
    assert found.code == 1
    (problem,) = found.problems()
    assert "sgl_kernel" in problem and "stand-in" in problem
    main, spawned = found.report["hooks"]
    assert main["live"] == main["total"] > 20
    assert spawned["total"] == 0 and "sgl_kernel" in spawned["reason"]


@pytest.mark.parametrize("way", ["absent", "broken"])
def test_without_sglang_the_rest_is_looked_at(way: str, tmp_path: Path) -> None:
    """Given no SGLang, or one that cannot be imported, then that is said, and layers, operators, collectives told."""
    python = _environment_without(tmp_path / "environment", ["sglang"])
    if way == "broken":
        (next((tmp_path / "environment/lib").glob("python*")) / "site-packages/sglang").mkdir()
        (next((tmp_path / "environment/lib").glob("python*/site-packages/sglang")) / "__init__.py").write_text(
            "import a_package_that_is_not_there\n"
        )
    found = doctor(tmp_path, {}, command=(str(python), *MODULE))
    assert found.code == 1
    (problem,) = found.problems("SGLang")
    assert ("is not installed" if way == "absent" else "a_package_that_is_not_there") in problem
    assert len(found.problems()) == 1, found.problems()
    assert len(found.report["layers"]) == 3
    assert found.carriers() == {"torch"}
    assert {each["chosen"] for each in found.report["operators"]} == {"reference"}
    assert [each["total"] for each in found.report["hooks"]] == [0, 0]


# --- hooks ---


def test_a_hook_that_is_not_live_is_named_in_both_processes(tmp_path: Path) -> None:
    """Given another plugin because of which SGLang ignores one of our hooks, then the doctor counts and names it."""
    packages = write_distribution(tmp_path / "packages", "other", ONE_TAKEN, "sglang.srt.plugins", "load")
    found = doctor(tmp_path, {"PYTHONPATH": str(packages)})
    assert found.code == 1
    for each in found.report["hooks"]:
        assert each["live"] == each["total"] - 1
        assert found.problems(f"in the {each['process']} process", "GroupCoordinator.all_reduce: SGLang did not apply")


def test_a_plugin_that_was_left_out_is_said(tmp_path: Path) -> None:
    """Given SGLANG_PLUGINS without us, which is a wish and no fault, then a warning, and code 0."""
    found = doctor(tmp_path, {"SGLANG_PLUGINS": "__none__"})
    assert found.code == 0, found.problems()
    assert found.warnings("SGLANG_PLUGINS=__none__ leaves the plugin out")
    assert {each["total"] for each in found.report["hooks"]} == {0}


def test_what_the_plugin_refuses_is_a_problem_in_its_words(tmp_path: Path) -> None:
    """Given a file that could never be written, which only the plugin's start finds out, then its message is told."""
    found = doctor(tmp_path, {"SGLANG_FL_COMM_AUDIT": str(tmp_path / "absent/audit.json")})
    assert found.code == 1
    (problem,) = found.problems()
    assert "SGLANG_FL_COMM_AUDIT" in problem and "Make the folder" in problem


# --- case 25, what of it is of one host; tests/multinode has the rest ---


def test_nccls_notation_for_gloo_is_a_problem_with_a_plain_name_instead(tmp_path: Path) -> None:
    """Given GLOO_SOCKET_IFNAME=^lo,docker, then the problem says that gloo takes one plain name, and which."""
    found = doctor(tmp_path, {"GLOO_SOCKET_IFNAME": "^lo,docker"}, "--quick")
    assert found.code == 1
    (problem,) = found.problems("GLOO_SOCKET_IFNAME=^lo,docker", "gloo takes one plain name")
    assert f"export GLOO_SOCKET_IFNAME={found.report['network']['interface']}" in problem


# --- case 35: folders that hide packages ---


def test_folders_of_the_names_without_a_package_hide_nothing(tmp_path: Path) -> None:
    """Given folders named sglang_fl and plugin in the working directory, then the installed package is used."""
    (tmp_path / "sglang_fl").mkdir()
    (tmp_path / "plugin").mkdir()
    (tmp_path / "plugin/__init__.py").write_text("raise RuntimeError('the wrong plugin')\n")
    found = doctor(tmp_path)
    assert found.code == 0, found.problems()
    rows = {each["name"]: each for each in found.report["versions"]}
    assert rows["sglang_fl"]["note"] == str(Path(sglang_fl.__file__).parent)


def test_a_module_in_the_folder_that_a_dependency_of_sglang_tries_is_told(tmp_path: Path) -> None:
    """Given h2.py, which httpx tries to import and nobody has installed, then a warning names the file."""
    (tmp_path / "h2.py").write_text("")
    found = doctor(tmp_path)
    assert found.code == 0, found.problems()
    assert found.warnings(f"SGLang, started in {tmp_path}, imports {tmp_path}/h2.py")


def test_a_copy_of_the_package_in_the_folder_is_reported(tmp_path: Path) -> None:
    """Given another copy, which python -m takes, then the problem names both and what to do."""
    source = Path(sglang_fl.__file__).parent
    shutil.copytree(source, tmp_path / "sglang_fl", ignore=shutil.ignore_patterns("__pycache__"))
    found = doctor(tmp_path, {}, "--quick")
    assert found.code == 1
    (problem,) = found.problems()
    assert f"imports {tmp_path}/sglang_fl/__init__.py instead of the installed {source}" in problem


def test_the_command_finds_a_foreign_package_that_hides_ours(tmp_path: Path) -> None:
    """Given a package of our name that is not ours, which python -m would fall over, then the command reports it."""
    (tmp_path / "sglang_fl").mkdir()
    (tmp_path / "sglang_fl/__init__.py").write_text("raise RuntimeError('foreign')\n")
    found = doctor(tmp_path, {}, "--quick", command=(str(Path(sys.executable).with_name("sglang-fl")),))
    assert found.code == 1
    assert found.problems(f"imports {tmp_path}/sglang_fl/__init__.py instead of the installed")


# --- what the command line and the output bear ---


def test_a_route_that_no_rank_has_is_a_problem(tmp_path: Path) -> None:
    """Given mode fastest with a backend that nobody has, then it is a problem; in mode all they have no effect."""
    routes = {"SGLANG_FL_COMM_ROUTES": "all_reduce=nosuch"}
    found = doctor(tmp_path, {**routes, "SGLANG_FL_COMM_MODE": "fastest"}, "--quick")
    assert found.code == 1
    assert found.problems("SGLANG_FL_COMM_ROUTES names 'nosuch', which no rank has")
    found = doctor(tmp_path, routes, "--quick")
    assert found.code == 0
    assert found.warnings("comm.routes (from SGLANG_FL_COMM_ROUTES) has no effect: the mode is all")


@pytest.mark.parametrize("value", ["nan", "inf", "1e300", "0", "-1"])
def test_a_limit_that_is_none_is_a_wrong_option(value: str, tmp_path: Path) -> None:
    """Given --limit-s that no wait could have, then exit code 2 and a message of the option."""
    line = [sys.executable, *MODULE, "doctor", "--quick", f"--limit-s={value}"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 2
    assert "'--limit-s'" in done.stderr


def test_values_are_printed_as_they_are_and_an_output_that_is_full_is_said(tmp_path: Path) -> None:
    """Given a path that reads like an emoji on an ASCII output, then it is shown; given a full disk, one line and 2."""
    environment = {**os.environ, "FLAGCX_PATH": "/opt/:smile:\N{SNOWMAN}", "PYTHONIOENCODING": "ascii"}
    line = [sys.executable, *MODULE, "doctor", "--quick"]
    done = subprocess.run(
        line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 1
    assert "/opt/:smile:\\u2603" in done.stdout
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            line, cwd=tmp_path, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "python -m sglang_fl: No space left on device"


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"SGLANG_FL_DISPATCH_LOG": "/nonexistent/x.log"}, "SGLANG_FL_DISPATCH_LOG"),
        ({"SGLANG_FL_COMM_AUDIT": "/nonexistent/a.json"}, "SGLANG_FL_COMM_AUDIT"),
        ({"SGLANG_FL_COMM_DUMP_DIR": "/tmp"}, "SGLANG_FL_COMM_DUMP_DIR"),
        ({"SGLANG_PLATFORM": "nosuch"}, "SGLANG_PLATFORM=nosuch: no platform of that name is installed"),
    ],
)
def test_what_a_server_ends_on_is_a_problem_also_without_one(
    variables: dict[str, str], problem: str, tmp_path: Path
) -> None:
    """Given a file, folder or platform that cannot be, when looked at quickly, then it is a problem all the same."""
    found = doctor(tmp_path, variables, "--quick")
    assert found.code == 1
    assert found.problems(problem)


def test_a_plugin_that_is_left_out_is_said_quickly(tmp_path: Path) -> None:
    """Given SGLANG_PLUGINS with another name, when looked at quickly, then a warning says that ours is left out."""
    found = doctor(tmp_path, {"SGLANG_PLUGINS": "sglangfl"}, "--quick")
    assert found.code == 0
    assert found.warnings("SGLANG_PLUGINS=sglangfl leaves the plugin out")
