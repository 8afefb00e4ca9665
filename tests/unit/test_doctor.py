"""The doctor's judgement on made-up surroundings, its children that hang or crash, and its two forms of output."""

from __future__ import annotations

import importlib
import io
import json
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from sglang_fl.cli.doctor import interface_names, network, render, shadowing, surroundings
from sglang_fl.cli.doctor.children import Child, Failure
from sglang_fl.cli.doctor.report import Choice, Fact, Finding, Hooks, Interface, Layer, Network, Other, Report, Setting

LO = Interface("lo", ("127.0.0.1", "::1"), is_up=True, is_loopback=True, is_virtual=False)
ETH0 = Interface("eth0", ("192.0.2.2",), is_up=True, is_loopback=False, is_virtual=False)
ETH1 = Interface("eth1", ("198.51.100.2",), is_up=True, is_loopback=False, is_virtual=False)
DOCKER = Interface("docker0", ("172.17.0.1",), is_up=True, is_loopback=False, is_virtual=True)
BARE = Interface("ib0", (), is_up=True, is_loopback=False, is_virtual=False)
DOWN = replace(ETH1, is_up=False)
ALL = (LO, DOCKER, ETH0, BARE)


# --- names of interfaces, as gloo and NCCL read them (gloo: tried on torch 2.11) ---


@pytest.mark.parametrize(
    ("text", "problem", "warning"),
    [
        ("eth0", "", ""),
        ("^lo,docker", "gloo takes one plain name and finds no interface for '^lo': it does not know NCCL's '^'", ""),
        ("=eth0", "finds no interface for '=eth0': it does not know NCCL's '='", ""),
        ("eth7", "finds no interface for 'eth7'", ""),
        (" eth0", "the space belongs to the name", ""),
        ("ib0", "finds no interface for 'ib0', which has no address", ""),
        ("eth0,docker0", "", "with several, every rank must name as many"),
        ("eth0,", "", "gloo takes one plain name"),
        ("eth", "", "the first that begins with 'eth', which is eth0"),
    ],
)
def test_gloo_takes_one_plain_name(text: str, problem: str, warning: str) -> None:
    """Given a value of GLOO_SOCKET_IFNAME, then what gloo does with it is told."""
    found = interface_names.gloo(text, ALL, is_several_hosts=False)
    assert problem in found.problem and bool(problem) == bool(found.problem)
    assert warning in found.warning and bool(warning) == bool(found.warning)


def test_the_loopback_is_no_interface_for_several_hosts() -> None:
    """Given lo, then it will do on one host, and not on two."""
    assert interface_names.gloo("lo", ALL, is_several_hosts=False) == interface_names.Verdict()
    assert "no other host is reached" in interface_names.gloo("lo", ALL, is_several_hosts=True).problem


@pytest.mark.parametrize("text", ["eth", "=eth0", "^lo,docker", "eth0,ib0", "^=docker0"])
def test_nccls_language_may_leave_something(text: str) -> None:
    """Given prefixes, whole names and exclusions, then one interface is enough."""
    assert interface_names.with_prefixes(text, ALL).problem == ""


@pytest.mark.parametrize("text", ["=eth", "eno", "^lo,docker,eth", "ib0"])
def test_nccls_language_may_leave_nothing(text: str) -> None:
    """Given names after which no interface with an address is left, then that is a problem."""
    assert "leaves no interface" in interface_names.with_prefixes(text, ALL).problem


# --- the interface to use ---


@pytest.mark.parametrize(
    ("found", "default", "expected"),
    [
        ((LO, DOCKER, ETH0, ETH1), "eth1", "eth1"),
        ((LO, DOCKER, ETH0, ETH1), "", "eth0"),
        ((LO, DOCKER, ETH0, ETH1), "ppp0", "eth0"),
        ((LO, DOCKER, DOWN, BARE), "", "docker0"),
        ((LO, DOWN, BARE), "", None),
    ],
)
def test_the_interface_to_use(found: tuple[Interface, ...], default: str, expected: str | None) -> None:
    """Given interfaces, then the default route's, else a real one, else any but the loopback, each with its reason."""
    chosen, reason = network.to_use(found, default=default)
    assert (chosen.name if chosen else None) == expected
    assert reason


def test_the_default_route_is_read_from_the_kernels_table() -> None:
    """Given /proc/net/route, then the line without a destination names the interface; without one, none does."""
    head = "Iface\tDestination\tGateway \tFlags\n"
    assert network.default_interface(f"{head}eth1\t000200C0\t0\t1\nens3\t00000000\t010200C0\t3\n") == "ens3"
    assert network.default_interface(head) == ""


def test_this_hosts_own_interfaces_are_found() -> None:
    """Given this machine, then the system's list and ours name the same interfaces, and lo has its address."""
    found = {each.name: each for each in network.interfaces()}
    assert set(found) == {name for _, name in socket.if_nameindex()}
    assert "127.0.0.1" in found["lo"].addresses and found["lo"].is_loopback


def test_a_name_that_does_not_resolve_is_told_in_time() -> None:
    """Given a name of nobody, then no address and a reason; a numeric address resolves to itself."""
    begin = time.monotonic()
    addresses, reason = network.resolve("no-such-host.invalid", limit_s=3.0)
    assert addresses == () and reason
    assert time.monotonic() - begin < 5.0
    assert network.resolve("127.0.0.1") == (("127.0.0.1",), "")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, False),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, True),
        ({"WORLD_SIZE": "4"}, False),
        ({"WORLD_SIZE": "9" * 5000, "LOCAL_WORLD_SIZE": "2"}, False),
        ({"WORLD_SIZE": "4²", "LOCAL_WORLD_SIZE": "2"}, False),
    ],
)
def test_a_launchers_variables_tell_of_several_hosts(environment: dict[str, str], expected: bool) -> None:
    """Given torchrun's variables, then more ranks in all than here means several hosts."""
    assert network.is_several_hosts(environment) is expected


def test_a_master_that_only_this_host_can_be_is_a_problem_for_several() -> None:
    """Given MASTER_ADDR=localhost, then it will do on one host; on two it is a problem that says what it should be."""
    one = surroundings.network_of({"MASTER_ADDR": "localhost"}, 1, None)
    assert [each for each in one.problems if "MASTER_ADDR" in each.found] == []
    two = surroundings.network_of({"MASTER_ADDR": "localhost"}, 2, None)
    (problem,) = [each for each in two.problems if "MASTER_ADDR" in each.found]
    assert "other hosts find themselves" in problem.found
    assert two.network.address in problem.action


# --- what lies in the working directory ---


def _package(folder: Path, name: str, with_init: bool = True) -> Path:
    (folder / name).mkdir(parents=True)
    if with_init:
        (folder / name / "__init__.py").write_text("")
    return folder


def test_a_package_in_the_folder_hides_the_installed_one(tmp_path: Path) -> None:
    """Given a folder with a package of our name, then both places and what to do; one without __init__.py does not."""
    installed = _package(tmp_path / "site", "sglang_fl")
    hiding = _package(tmp_path / "hiding", "sglang_fl")
    (problem,) = shadowing.of_names(hiding, ["", str(installed)]).problems
    assert f"imports {hiding}/sglang_fl/__init__.py instead of the installed {installed}" in problem.found
    assert "sglang-fl" in problem.action
    harmless = shadowing.of_names(_package(tmp_path / "plain", "sglang_fl", with_init=False), [str(installed)])
    assert harmless.problems == [] and "without __init__.py" in harmless.warnings[0].found


def test_a_checkout_that_is_what_is_installed_hides_nothing(tmp_path: Path) -> None:
    """Given the working directory on the path by another name too, or a name that nobody imports, then no finding."""
    checkout = _package(tmp_path / "checkout", "sglang_fl")
    _package(checkout, "plugin")
    other_name = tmp_path / "link"
    other_name.symlink_to(checkout)
    found = shadowing.of_names(checkout, [str(checkout), str(other_name)])
    assert (found.problems, found.warnings) == ([], [])


def test_a_module_that_was_loaded_from_the_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given modules imported from the folder, then one that hides an installed one is a problem, another a warning."""
    for name in ("doctor_probe_both", "doctor_probe_here"):
        (tmp_path / f"{name}.py").write_text("")
    installed = tmp_path / "site"
    installed.mkdir()
    (installed / "doctor_probe_both.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("doctor_probe_both", "doctor_probe_here"):
        monkeypatch.setitem(sys.modules, name, importlib.import_module(name))
    found = shadowing.of_loaded(tmp_path, [str(tmp_path), str(installed)])
    assert [f"instead of the installed {installed}" in each.found for each in found.problems] == [True]
    assert [str(tmp_path / "doctor_probe_here.py") in each.found for each in found.warnings] == [True]


# --- children ---

HANGS = """
import ctypes, time
from sglang_fl.cli.doctor.report import Report

def parts():
    return [("the first", Report), ("what hangs", lambda: time.sleep(600)), ("the last", Report)]
"""
CRASHES = """
import ctypes, sys
from sglang_fl.cli.doctor.report import Report

def crash():
    print("about to fall", file=sys.stderr, flush=True)
    ctypes.string_at(0)

def parts():
    return [("the first", Report), ("what crashes", crash)]
"""
RAISES = """
import subprocess, sys
from pathlib import Path
from sglang_fl.cli.doctor.report import Report

def refuse():
    raise SystemExit("refused, in words")

def fail():
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(__file__).with_name("pid").write_text(str(started.pid))
    raise OSError("no such device")

def parts():
    return [("the first", Report), ("what refuses", refuse), ("what fails", fail), ("the last", Report)]
"""


def _run(source: str, folder: Path, monkeypatch: pytest.MonkeyPatch, limit_s: float = 60.0) -> Child:
    (folder / "planted_parts.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    child = Child("planted_parts", limit_s)
    child.wait(lambda: None)
    return child


def _reason(child: Child, name: str) -> str:
    found = child.results[name]
    assert isinstance(found, Failure)
    return found.reason


def test_a_look_that_hangs_ends_within_its_limit_and_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a part that hangs, then what came before is kept, and the reason has the limit and the line."""
    child = _run(HANGS, tmp_path, monkeypatch, limit_s=3.0)
    assert child.results["the first"] == Report()
    assert set(child.results) == {"the first", "what hangs"}
    assert _reason(child, "what hangs").startswith("it did not end within 3 s")
    assert 'planted_parts.py", line 6' in _reason(child, "what hangs")


def test_a_look_that_crashes_says_the_signal_and_what_it_said_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a part that falls over in C, then the signal and the last words are the reason."""
    child = _run(CRASHES, tmp_path, monkeypatch)
    assert child.results["the first"] == Report()
    assert "SIGSEGV" in _reason(child, "what crashes")
    assert "about to fall" in _reason(child, "what crashes")


def test_a_look_that_raises_costs_itself_and_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given parts that refuse and fail, then the next is looked at all the same, and what they started is gone."""
    child = _run(RAISES, tmp_path, monkeypatch)
    assert child.results["what refuses"] == Failure("refused, in words", is_refusal=True)
    assert _reason(child, "what fails").startswith("OSError: no such device (")
    assert child.results["the last"] == Report()
    started = int((tmp_path / "pid").read_text())
    end = time.monotonic() + 10.0  # a kill takes a moment
    while psutil.pid_exists(started) and psutil.Process(started).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, "it is still running"
        time.sleep(0.05)


FIRST_FAILS = """
def fail():
    raise ImportError("no torch")

def parts():
    return [("torch", fail), ("what needs it", fail)]
"""


@pytest.mark.parametrize(
    ("source", "name", "word"),
    [
        (FIRST_FAILS, "torch", "ImportError: no torch"),
        ("import a_module_of_nobody", "the start of a process", "a_module_of_nobody"),
    ],
)
def test_what_fails_at_first_is_told_once(
    source: str, name: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a first part, or a process, that fails, then the one reason is told, and what stands on it is not tried."""
    child = _run(source, tmp_path, monkeypatch)
    assert set(child.results) == {name}
    assert word in _reason(child, name)


# --- the report ---

FULL = Report(
    problems=[Finding("FlagCX", "it is [not] there", "Build it.")],
    warnings=[Finding("network", "odd", "")],
    versions=[Fact("torch", "2.11.0", "")],
    device=[Fact("platform", "cpu", "detected")],
    settings=[Setting("comm.mode", "all", "default")],
    layers=[Layer("layer 1", False, "no device"), Layer("layer 2", True, "order"), Layer("layer 3", None, "?")],
    operators=[Choice("topk", "reference", (Other("flagos", "no device"),)), Choice("rms_norm", "", (), "", "nothing")],
    collectives=[Choice("all_reduce", "torch")],
    hooks=[Hooks("main", 2, 3, ("x: not applied",)), Hooks("spawned", 0, 0, reason="no SGLang")],
    network=Network((LO, ETH0), "node0", ("127.0.0.1",), True, "eth0", "192.0.2.2", "it leads there"),
)


def test_the_json_has_every_key_always() -> None:
    """Given an empty and a full report, then both have the same keys in the same order, and the verdict."""
    empty, full = (json.loads(json.dumps(report.as_json())) for report in (Report(), FULL))
    keys = ["schema", "ok", "problems", "warnings", "versions", "device", "settings", "layers"]
    assert list(full) == list(empty) == [*keys, "operators", "collectives", "hooks", "network"]
    assert (empty["ok"], full["ok"], full["schema"]) == (True, False, 1)
    assert full["problems"] == [{"area": "FlagCX", "found": "it is [not] there", "action": "Build it."}]
    assert full["operators"][0]["passed_over"] == [{"name": "flagos", "reason": "no device"}]
    assert set(empty["network"]) == set(full["network"])


def _shown(report: Report, is_terminal: bool) -> str:
    out = io.StringIO()
    render.show(report, Console(file=out, force_terminal=is_terminal, width=120, highlight=False))
    return out.getvalue()


def test_the_problems_come_last_with_what_to_do() -> None:
    """Given a report, then every section is there, its texts are kept as they are, and the verdict is the last line."""
    text = _shown(FULL, is_terminal=False)
    places = [text.index(f"\n{title}") for title in ("Device", "Layers", "Hooks", "Network", "Warnings", "Problems")]
    assert places == sorted(places)
    assert "it is [not] there" in text and "What to do: Build it." in text
    assert "2 of 3" in text and "x: not applied" in text and "no SGLang" in text
    assert text.rstrip().splitlines()[-1] == "1 problem: see above, each with what to do."
    assert _shown(Report(), is_terminal=False).strip() == "OK: nothing that was asked for is in the way."


def test_colours_are_for_terminals_alone() -> None:
    """Given a terminal and a file, then only the terminal gets escape sequences."""
    assert "\x1b[" in _shown(FULL, is_terminal=True)
    assert "\x1b" not in _shown(FULL, is_terminal=False)


def test_what_two_looks_find_alike_is_told_once() -> None:
    """Given two parts with the same finding, then the report has it once, and the facts of both."""
    report = Report()
    for place in ("a", "b"):
        report.add(Report(problems=[Finding("SGLang", "absent", "Install it.")], versions=[Fact(place, "1")]))
        report.add(Report(problems=[Finding("SGLang", "refused: absent", "Install it.")]))
    assert [each.found for each in report.problems] == ["absent"]
    assert [each.name for each in report.versions] == ["a", "b"]


def test_the_doctor_itself_imports_neither_torch_nor_sglang() -> None:
    """Given this command's modules, when imported in a fresh process, then nothing heavy is."""
    code = "import sys, sglang_fl.cli.doctor; print(sorted({'torch', 'sglang', 'flag_gems'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
