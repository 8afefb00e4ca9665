"""The end-to-end benchmark's servers: their commands and variables, and that each is what its name says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.e2e import servers
from benchmarks.e2e.configurations import CONFIGURATIONS, NATIVE
from benchmarks.e2e.server_plugin import CPU_HOOKS_VARIABLE
from sglang_fl.testing.server import ServerError


@pytest.fixture
def site(tmp_path: Path) -> Callable[..., servers.Site]:
    """A site whose servers are never started."""

    def make(is_on_gpu: bool) -> servers.Site:
        return servers.Site(tmp_path, tmp_path / "plugin", tmp_path, 2, is_on_gpu, ("--mine",))

    return make


@pytest.mark.parametrize(
    ("name", "plugins", "is_piecewise_off"),
    [
        (NATIVE, "sglang_e2e_benchmark", True),
        ("native-defaults", "sglang_e2e_benchmark", False),
        ("verified", "sglang_fl,sglang_e2e_benchmark", True),
        ("flagcx", "sglang_fl,sglang_e2e_benchmark", True),
    ],
)
def test_native_has_the_weights_without_the_plugin(
    site: Callable[..., servers.Site], name: str, plugins: str, is_piecewise_off: bool
) -> None:
    """Given a configuration, then which plugins load, and the same arguments but for piecewise graphs."""
    server = site(True).server(CONFIGURATIONS[name], "0", 1.0, None)
    assert server.variables()["SGLANG_PLUGINS"] == plugins
    assert ("--disable-piecewise-cuda-graph" in server.command()) is is_piecewise_off
    assert {"--load-format=dummy", "--tp-size=2", "--mine", "--attention-backend=triton"} <= set(server.command())
    assert "--device=cpu" not in server.command()


@pytest.mark.parametrize("is_on_gpu", [True, False])
def test_stages_and_dp_attention_are_in_the_command(site: Callable[..., servers.Site], is_on_gpu: bool) -> None:
    """Given two stages, or DP attention, then SGLang is told so, and nothing of it where neither is asked for."""
    native = CONFIGURATIONS[NATIVE]
    plain = site(is_on_gpu)
    stages, attention = replace(plain, pp=2), replace(plain, has_dp_attention=True)
    commands = [" ".join(each.server(native, "0", 1.0, None).command()) for each in (plain, stages, attention)]
    assert all("--tp-size=2" in each for each in commands)
    assert ["--pp-size=2" in each for each in commands] == [False, True, False]
    assert ["--dp-size=2 " in each and "--enable-dp-attention" in each for each in commands] == [False, False, True]
    assert [plain.ranks, stages.ranks, attention.ranks] == [2, 4, 2]


def test_sglang_alone_has_hooks_for_dp_attention_on_a_cpu_only(site: Callable[..., servers.Site]) -> None:
    """Given DP attention on a CPU, then native alone has the hooks that it needs there; on GPUs none has them."""

    def have_hooks(place: servers.Site) -> list[bool]:
        several = (place.server(CONFIGURATIONS[name], "0", 1.0, None) for name in (NATIVE, "flagcx"))
        return [CPU_HOOKS_VARIABLE in each.variables() for each in several]

    assert have_hooks(replace(site(False), has_dp_attention=True)) == [True, False]
    assert have_hooks(replace(site(True), has_dp_attention=True)) == [False, False]
    assert have_hooks(site(False)) == [False, False]


def test_a_rank_of_the_second_stage_that_has_other_weights_is_seen(site: Callable[..., servers.Site]) -> None:
    """Given two stages of two ranks, when the last rank has no report of its weights, then that is an error."""
    place = replace(site(True), pp=2)
    server = place.server(CONFIGURATIONS[NATIVE], "0", 1.0, None)
    server.log_path().write_text("")
    for rank in range(3):
        (place.folder / f"0.weights.rank{rank}").write_text("{}")
    with pytest.raises(ServerError, match="rank 3 did not get the benchmark's weights"):
        place.check(server, CONFIGURATIONS[NATIVE])


@pytest.mark.parametrize(
    ("name", "log", "problem"),
    [
        (NATIVE, "", ""),
        (NATIVE, "[sglang_fl] layer 1, ATen operators: on: x", "native: the plugin is on"),
        ("verified", "", "verified: the plugin is off"),
        ("verified", "INFO [sglang_fl] layer 1, ATen operators: on: x", ""),
        ("verified", "[sglang_fl] layer 1, ATen operators: off: x", "layer 1 is not on"),
        ("layers-12", "[sglang_fl] layer 1, ATen operators: on: x", "layer 2 is not on"),
        (
            "verified",
            "[sglang_fl] layer 1, ATen operators: on: x\n[sglang_fl] layer 1, ATen operators: off: y",
            "layer 1 is not on",
        ),
    ],
)
def test_a_server_that_is_not_what_its_name_says_is_a_failure(
    site: Callable[..., servers.Site], name: str, log: str, problem: str
) -> None:
    """Given a log, then a plugin or layer that should not, or should, be on is an error."""
    place = site(True)
    server = place.server(CONFIGURATIONS[name], "0", 1.0, None)
    server.log_path().write_text(log)
    with pytest.raises(ServerError, match="rank 0 did not get the benchmark's weights"):
        place.check(server, CONFIGURATIONS[name])
    for rank in range(2):
        (place.folder / f"0.weights.rank{rank}").write_text("{}")
    if problem:
        with pytest.raises(ServerError, match=problem):
            place.check(server, CONFIGURATIONS[name])
    else:
        assert place.check(server, CONFIGURATIONS[name])["reports"] == {0: {}, 1: {}}


GROUPS = (
    "group world:0 ranks [0, 1]: flagcx; 140 KiB of memory taken",
    "group tp:0 ranks [0, 1]: flagcx; all_reduce up to 1 MiB: native, else flagcx",
    "group pp:0 ranks [0]: one rank, nothing to communicate",
)
NOT_FLAGCX = "group tp:0 ranks [0, 1]: torch; not flagcx: all ranks: FLAGCX_PATH is /nowhere, which does not exist"


@pytest.mark.parametrize("is_on_gpu", [True, False])
@pytest.mark.parametrize("name", ["fastest", "flagcx", "layers-12"])
@pytest.mark.parametrize(
    ("groups", "problem"),
    [
        (GROUPS, ""),
        ((GROUPS[0], NOT_FLAGCX), "not carried by flagcx: group tp:0 ranks [0, 1]: torch; not flagcx"),
        (("group world:0 ranks [0, 1]: native (SGLang's own methods)",), "not carried by flagcx: group world:0"),
        (GROUPS[2:], "2 ranks, and groups of several say what carries them for ranks none only"),
        ((), "2 ranks, and groups of several say what carries them for ranks none only"),
    ],
)
def test_a_group_that_flagcx_does_not_carry_is_a_failure_of_its_configurations(
    site: Callable[..., servers.Site], name: str, is_on_gpu: bool, groups: Sequence[str], problem: str
) -> None:
    """Given a log's groups, then those of several ranks must be FlagCX's where the configuration says so, CPU too."""
    place = site(is_on_gpu)
    server = place.server(CONFIGURATIONS[name], "0", 1.0, None)
    for rank in range(2):
        (place.folder / f"0.weights.rank{rank}").write_text("{}")
    lines = (*(f"layer {layer}, x: on: y" for layer in (1, 2, 3)), *groups)
    server.log_path().write_text("".join(f"[2026-01-01 TP0] [sglang_fl] {line}\n" for line in lines))
    if problem and name != "layers-12":
        with pytest.raises(ServerError) as raised:
            place.check(server, CONFIGURATIONS[name])
        assert f"{name}: {problem}" in str(raised.value)
    else:
        assert place.check(server, CONFIGURATIONS[name])["lines"] == list(lines)


def test_one_rank_needs_no_flagcx(site: Callable[..., servers.Site]) -> None:
    """Given one rank, then a log whose groups have nothing to communicate is right."""
    place = replace(site(False), tp=1)
    server = place.server(CONFIGURATIONS["flagcx"], "0", 1.0, None)
    (place.folder / "0.weights.rank0").write_text("{}")
    server.log_path().write_text("[sglang_fl] group tp:0 ranks [0]: one rank, nothing to communicate")
    assert place.check(server, CONFIGURATIONS["flagcx"])["reports"] == {0: {}}


def test_flagcx_s_place_is_a_variable_of_its_configurations_only(site: Callable[..., servers.Site]) -> None:
    """Given a place, then servers with FlagCX get it, and no other."""
    place = replace(site(False), flagcx="/opt/FlagCX")
    found = {
        name
        for name in CONFIGURATIONS
        if "FLAGCX_PATH" in place.server(CONFIGURATIONS[name], name, 1, None).environment
    }
    assert found == {"fastest", "flagcx"}


def test_what_an_earlier_start_of_the_same_name_reported_is_not_taken_for_this_one_s(
    site: Callable[..., servers.Site],
) -> None:
    """Given reports from before, when a server of the name is made, then they are gone, and those of others stay."""
    place = site(True)
    for name in ("0-native.weights.rank0", "0-native.operators", "1-native.weights.rank0"):
        (place.folder / name).write_text("{}")
    place.server(CONFIGURATIONS[NATIVE], "0-native", 1.0, None)
    assert [path.name for path in place.folder.iterdir()] == ["1-native.weights.rank0"]


def test_servers_at_the_same_time_have_as_much_memory_each(site: Callable[..., servers.Site]) -> None:
    """Given three servers one after another, then fractions of what is free give each the same, and equal tokens."""
    free, taken = 1.0, []
    for place in range(3):
        server = site(True).server(CONFIGURATIONS[NATIVE], "0", 1.0, None, servers.Share(place, 3))
        # The last one counts for SGLang.
        fractions = [
            float(each.split("=")[1]) for each in server.command() if each.startswith("--mem-fraction-static=")
        ]
        assert len(fractions) == 2 and f"--max-total-tokens={servers.TOGETHER_TOKENS}" in server.command()
        taken.append(free * fractions[-1])
        free -= taken[-1]
    assert taken == pytest.approx([servers.TOGETHER_MEMORY / 3] * 3, abs=1e-3)
    alone = site(True).server(CONFIGURATIONS[NATIVE], "0", 1.0, None).command()
    assert not any(each.startswith("--max-total-tokens") for each in alone)
