"""NCCL's order between graphs and other calls is dropped where nothing needs it; every decision has its reason."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_fl.comm import graph_mixing
from sglang_fl.comm.graph_mixing import LIBRARIES, Decision, decide, prepare, refuses_windows, to_agree_on, variables
from sglang_fl.config import Settings, load_settings
from sglang_fl.sglang_hooks.graph_mixing import OPTIONS, hooks

NCCL = LIBRARIES["cuda"]
DROPPED = {"NCCL_GRAPH_MIXING_SUPPORT": "0", "NCCL_NET_DISABLE_INTRA": "1"}


def settings(value: str = "auto") -> Settings:
    """What the variable SGLANG_FL_COMM_GRAPH_MIXING gives."""
    return load_settings({"SGLANG_FL_COMM_GRAPH_MIXING": value})


def decided(
    setting: str = "auto",
    environment: dict[str, str] | None = None,
    hosts: int | None = 1,
    obstacles: tuple[str, ...] = (),
    is_late: bool = False,
) -> Decision:
    """For NCCL, with this environment and no files."""
    found = variables(NCCL, {"NCCL_CONF_FILE": "/nonexistent", **(environment or {})})
    return decide(settings(setting), NCCL, found, hosts, obstacles, is_late)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that has decided nothing, and in which no file and no variable says anything about NCCL."""
    monkeypatch.setattr(graph_mixing, "_decisions", {})
    monkeypatch.setenv("NCCL_CONF_FILE", str(tmp_path / "none"))
    for name in DROPPED:
        monkeypatch.delenv(name, raising=False)


# --- the decision ---


def test_on_one_host_the_order_is_dropped_and_the_network_shut_out() -> None:
    """Given one host and nothing else, then 0 is set, with what keeps NCCL from the network, and groups must not span
    hosts."""
    decision = decided()
    assert decision.sets == DROPPED
    assert decision.needs_one_host
    assert decision.line() == (
        "NCCL_GRAPH_MIXING_SUPPORT=0 and NCCL_NET_DISABLE_INTRA=1 set: comm.graph_mixing is auto (from "
        "SGLANG_FL_COMM_GRAPH_MIXING), and all ranks are on one host"
    )


KEPT = [
    ({"hosts": 2}, "there are ranks on 2 hosts: calls over a network need the order"),
    ({"hosts": None}, "an unknown number of hosts"),
    ({"setting": "keep"}, "comm.graph_mixing is keep (from SGLANG_FL_COMM_GRAPH_MIXING)"),
    ({"is_late": True}, "has groups of NCCL already"),
    ({"setting": "drop", "is_late": True}, "has groups of NCCL already"),
    ({"obstacles": ("--some-option uses two streams",)}, "and --some-option uses two streams"),
    *(
        ({"environment": {name: value}}, f"{name}={value} (the environment) ")
        for name, value in (
            ("NCCL_NET_DISABLE_INTRA", "0"),
            ("NCCL_NET_DISABLE_INTRA", ""),
            ("NCCL_SHM_DISABLE", "1"),
            ("NCCL_HOSTID", "a"),
            ("NCCL_P2P_USE_CUDA_MEMCPY", "1"),
            ("NCCL_SHM_USE_CUDA_MEMCPY", "1"),
            ("NCCL_PROFILER_PLUGIN", "inspector"),
            ("NCCL_LAUNCH_ORDER_IMPLICIT", "1"),
            ("NCCL_ENV_PLUGIN", "own"),
        )
    ),
    *(
        ({"setting": setting, "environment": {NCCL.variable: value}}, f"it is '{value}' in the environment, which wins")
        for setting in ("auto", "keep", "drop")
        for value in ("0", "1")
    ),
]


@pytest.mark.parametrize(("given", "reason"), KEPT, ids=[f"{case[0]}" for case in KEPT])
def test_elsewhere_everything_stays_as_it_is(given: dict[str, Any], reason: str) -> None:
    """Given what forbids it, or a value of the user's, then nothing is set and the reason is told."""
    decision = decided(**given)
    assert decision.sets == {}
    assert not decision.needs_one_host
    assert decision.line().startswith("NCCL_GRAPH_MIXING_SUPPORT left alone: ")
    assert reason in decision.line()


HARMLESS = [
    {"NCCL_NET_DISABLE_INTRA": "1"},
    {"NCCL_SHM_DISABLE": "0"},
    {"NCCL_P2P_USE_CUDA_MEMCPY": "0"},
    {"NCCL_P2P_DISABLE": "1"},
    {"NCCL_HOSTID": ""},
    {NCCL.variable: ""},
]


@pytest.mark.parametrize("environment", HARMLESS, ids=str)
def test_harmless_values_forbid_nothing(environment: dict[str, str]) -> None:
    """Given variables of NCCL that leave nothing to do on the host, then 0 is set and they stay as they are."""
    decision = decided(environment=environment)
    assert decision.sets[NCCL.variable] == "0"
    assert not set(decision.sets) & {name for name, value in environment.items() if value}


def test_drop_asks_for_nothing_else() -> None:
    """Given drop, when there are two hosts, then 0 alone is set, and groups may span hosts: it was asked for."""
    decision = decided("drop", hosts=2, obstacles=("two streams",))
    assert decision.sets == {NCCL.variable: "0"}
    assert not decision.needs_one_host


@pytest.mark.parametrize("place", ["named", "home"])
def test_a_value_in_a_file_of_nccl_wins(place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Given the variable in the file that NCCL reads, then nothing is set, and the reason names the file."""
    file = tmp_path / "nccl.conf"
    file.write_text("# a comment\nNCCL_DEBUG=WARN\nNCCL_GRAPH_MIXING_SUPPORT=1\n")
    monkeypatch.setattr(graph_mixing, "in_home", lambda name: (file,) * (name == ".nccl.conf"))
    environment = {"NCCL_CONF_FILE": str(file)} if place == "named" else {"NCCL_CONF_FILE": ""}
    decision = decided(environment=environment)
    assert decision.sets == {}
    assert f"it is '1' in {file}, which wins" in decision.line()


# --- in a process ---


def test_a_process_decides_once() -> None:
    """Given a decision, when it is asked for again with two hosts, then it stays: NCCL has read its variables."""
    environment = {"NCCL_CONF_FILE": "/nonexistent"}
    first = prepare(settings(), "cuda", 1, environment=environment)
    assert environment.items() >= DROPPED.items()
    assert first is not None and prepare(settings(), "cuda", 2, environment=environment) is first


def test_other_devices_have_no_such_order() -> None:
    """Given a device whose library is not NCCL, then nothing is decided, set or compared."""
    environment: dict[str, str] = {}
    assert prepare(settings(), "npu", 1, environment=environment) is None
    assert environment == {}
    assert to_agree_on("npu") == {} and refuses_windows("npu") == ""


def test_ranks_agree_on_the_value_and_on_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a value of the user's, then it alone is compared; given one that rests on one host, the host, too."""
    assert to_agree_on("cuda") == {NCCL.variable: "no value"}
    monkeypatch.setenv(NCCL.variable, "0")
    assert to_agree_on("cuda") == {NCCL.variable: "0"}
    monkeypatch.delenv(NCCL.variable)
    environment: dict[str, str] = {}
    prepare(settings(), "cuda", 1, environment=environment)
    monkeypatch.setenv(NCCL.variable, environment[NCCL.variable])
    value, host = to_agree_on("cuda").items()
    assert value == (NCCL.variable, "0")
    assert host[0].startswith("the host, which must be one with NCCL_GRAPH_MIXING_SUPPORT=0 ") and host[1]


WINDOWS = [
    ((2, 27, 7), "0", True),
    ((2, 28, 0), "0", False),
    ((2, 28, 9), "0", False),
    ((2, 28, 9), "0x0", False),
    ((2, 28, 9), "off", False),
    ((2, 30, 6), "0", False),
    ((2, 30, 7), "0", True),
    ((2, 28, 9), "1", True),
    ((2, 28, 9), "-1", True),
    ((2, 28, 9), "010", True),
    ((2, 28, 9), "0x10", True),
    ((2, 28, 9), "", True),
    ((2, 28, 9), None, True),
]


@pytest.mark.parametrize(("version", "value", "may"), WINDOWS)
def test_memory_is_not_registered_where_kernels_would_not_wait(
    version: tuple[int, int, int], value: str | None, may: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given NCCL's release and the variable, as NCCL reads it, then windows are refused where both together sum stale
    values."""
    monkeypatch.setattr(graph_mixing, "nccl_version", lambda: version)
    if value is not None:
        monkeypatch.setenv(NCCL.variable, value)
    reason = refuses_windows("cuda")
    assert (reason == "") is may
    assert may or "mended in 2.30.7" in reason


# --- SGLang's options ---

ARGUMENTS = {
    "nnodes": 1,
    "pp_size": 1,
    "enable_pdmux": False,
    "enable_symm_mem": False,
    "disable_overlap_schedule": False,
}
GATHER = "SGLANG_NCCL_ALL_GATHER_IN_OVERLAP_SCHEDULER_SYNC_BATCH"


def told(arguments: dict[str, Any]) -> list[str]:
    """What is told before SGLang's first group, twice: a draft model has a runner of its own."""
    lines: list[str] = []
    (found,) = hooks(settings(), "cuda", lines.append)
    decide_first = found.function
    for _ in range(2):
        decide_first(SimpleNamespace(server_args=SimpleNamespace(**{**ARGUMENTS, **arguments})))
    return lines


@pytest.mark.parametrize(
    ("arguments", "variable", "words"),
    [
        ({}, None, "NCCL_GRAPH_MIXING_SUPPORT=0 and NCCL_NET_DISABLE_INTRA=1 set: "),
        ({"nnodes": 2}, None, "2 hosts"),
        ({"pp_size": 2}, None, "--pp-size over 1"),
        ({"enable_pdmux": True}, None, "--enable-pdmux"),
        ({"enable_symm_mem": True}, None, "--enable-symm-mem"),
        ({}, "1", GATHER),
        ({"disable_overlap_schedule": True}, "1", "NCCL_GRAPH_MIXING_SUPPORT=0 and "),
    ],
)
def test_options_of_sglang_that_need_the_order_keep_it(
    arguments: dict[str, Any], variable: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given SGLang's arguments, when its groups are about to be made, then the process's environment has 0 only where
    no option needs the order, and one line says why."""
    for name in DROPPED:
        monkeypatch.setenv(name, "")  # put back afterwards, whatever is set in between
        monkeypatch.delenv(name)
    if variable is not None:
        monkeypatch.setenv(GATHER, variable)
    (line,) = told(arguments)
    assert words in line
    assert (os.environ.get(NCCL.variable) == "0") is (" set: " in line)


def test_a_device_whose_library_keeps_no_such_order_needs_no_hook() -> None:
    """Given a CPU, when the hooks are asked for, then there is none, and SGLang's model runner need not be imported."""
    assert hooks(settings(), "cpu", print) == []


def test_the_options_exist() -> None:
    """Given the installed SGLang, then its ServerArgs has what the options look at."""
    from sglang.srt.server_args import ServerArgs

    assert set(ARGUMENTS) <= set(ServerArgs.__dataclass_fields__)
    assert len({option.words for option in OPTIONS}) == len(OPTIONS)
