"""Layer 1 against the real flag_gems, without a GPU: lists, profiles, registration, records; other versions' forms."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from aten_cases import PRETEND, SWITCH, answer, is_flag_gems, run, write_version

from sglang_fl.aten import gems
from sglang_fl.aten.layer import AtenError, before_import, is_asked_for
from sglang_fl.aten.records import path_of_rank
from sglang_fl.config import load_settings

_PLANS = """
from dataclasses import asdict
from sglang_fl.aten.gems import load
from sglang_fl.aten.plan import make_plan
gems = load()
answers = {}
for name, (variables, platform) in json.loads(sys.argv[1]).items():
    answers[name] = asdict(make_plan(load_settings(variables, platform), gems))
about = {"version": gems.version, "vendor": gems.vendor, "device": gems.device, "key": gems.dispatch_key}
about |= {"names": sorted(gems.names()), "keys": len(gems.entries), "excluded": sorted(gems.default_exclusions())}
print(json.dumps({"plans": answers, "gems": about}))
"""

YAML_BLACKLIST = "flagos_blacklist: [mul, sub]\n"
YAML_WHITELIST = "flagos_whitelist: [mul, sub]\n"


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Plans of many settings, made by one process that has the real flag_gems."""
    folder = tmp_path_factory.mktemp("yaml")
    (folder / "black.yaml").write_text(YAML_BLACKLIST)
    (folder / "white.yaml").write_text(YAML_WHITELIST)
    black, white = str(folder / "black.yaml"), str(folder / "white.yaml")
    full = {"SGLANG_FL_FLAGOS_PROFILE": "full"}
    verified = {"SGLANG_FL_FLAGOS_VERIFIED": "softmax,embedding,mul"}
    asked: dict[str, tuple[Mapping[str, str], str | None]] = {
        "full": (full, None),
        "full less a list": (full | {"SGLANG_FL_FLAGOS_BLACKLIST": "mul,div"}, None),
        "full less YAML": (full | {"SGLANG_FL_CONFIG": black}, None),
        "verified": (verified, None),
        "verified less a list": (verified | {"SGLANG_FL_FLAGOS_BLACKLIST": "mul"}, None),
        "white in the environment, black in YAML": (
            {"SGLANG_FL_FLAGOS_WHITELIST": "mul", "SGLANG_FL_CONFIG": black}, None
        ),
        "black in the environment, white in YAML": (
            full | {"SGLANG_FL_FLAGOS_BLACKLIST": "mul", "SGLANG_FL_CONFIG": white}, None
        ),
        "white list and profile": (verified | {"SGLANG_FL_FLAGOS_WHITELIST": "cat"}, None),
        "typos": (full | {"SGLANG_FL_FLAGOS_BLACKLIST": "masked_filll,mul"}, None),
        "idle lists": (
            verified | {"SGLANG_FL_FLAGOS_WHITELIST": "cat", "SGLANG_FL_FLAGOS_WRONG": "no_such_operator"}, None
        ),
        "profilers' spellings": (
            {"SGLANG_FL_FLAGOS_WHITELIST": "aten::softmax,aten.cumsum,mm.default,torch.ops.aten.div.Tensor"}, None
        ),
        "other overloads": ({"SGLANG_FL_FLAGOS_WHITELIST": "add.Scalar,sub.default,torch.softmax"}, None),
        "without schema": ({"SGLANG_FL_FLAGOS_WHITELIST": "add,copysign"}, None),
        "without schema in a black list": (full | {"SGLANG_FL_FLAGOS_BLACKLIST": "copysign"}, None),
        "ATen's spellings": ({"SGLANG_FL_FLAGOS_WHITELIST": "div.Tensor,_softmax,_to_copy,zeros"}, None),
    }  # fmt: skip
    return answer(run(PRETEND + _PLANS, json.dumps(asked)))


class TestPlan:
    """Which operators are replaced."""

    def test_flag_gems_is_read(self, real: Any) -> None:
        """Given the real package, when it is loaded, then its list and its device are there."""
        gems = real["gems"]
        assert (gems["vendor"], gems["device"], gems["key"]) == ("nvidia", "cuda", "CUDA")
        assert gems["keys"] > 400
        assert {"softmax", "mm", "true_divide", "count_nonzero"} <= set(gems["names"])

    def test_full_is_everything_less_flag_gems_own_exclusions(self, real: Any) -> None:
        """Given profile full, then every function is replaced but those that FlagGems leaves out itself."""
        plan = real["plans"]["full"]
        assert plan["is_everything"]
        missing = set(plan["without_schema"])
        assert "copysign" in missing
        assert plan["names"] == sorted(set(real["gems"]["names"]) - set(real["gems"]["excluded"]) - missing)

    def test_a_black_list_takes_away_and_its_aten_names_mean_all_functions(self, real: Any) -> None:
        """Given mul and div, when full, then mul and every function of ATen's div are left out."""
        plan = real["plans"]["full less a list"]
        assert {"mul", "true_divide", "div_mode"} <= set(plan["left_out"])
        assert not {"mul", "true_divide", "div_mode"} & set(plan["names"])
        # The in-place operator has a name of its own.
        assert "mul_" in plan["names"]
        assert "SGLANG_FL_FLAGOS_BLACKLIST" in plan["chosen_by"]

    def test_a_black_list_in_yaml_counts(self, real: Any) -> None:
        """Given flagos_blacklist in the user's file, when full, then its names are left out."""
        assert {"mul", "sub"} <= set(real["plans"]["full less YAML"]["left_out"])

    def test_verified_is_its_list(self, real: Any) -> None:
        """Given three verified names, then those are replaced, and the report names where they come from."""
        plan = real["plans"]["verified"]
        assert plan["names"] == ["embedding", "mul", "softmax"]
        assert plan["chosen_by"] == "profile verified (SGLANG_FL_FLAGOS_VERIFIED)"
        assert real["plans"]["verified less a list"]["names"] == ["embedding", "softmax"]

    def test_a_white_list_in_the_environment_beats_a_black_list_in_yaml(self, real: Any) -> None:
        """Given mul white in the environment and black in YAML, then mul is replaced, and only mul."""
        assert real["plans"]["white in the environment, black in YAML"]["names"] == ["mul"]

    def test_a_black_list_in_the_environment_beats_a_white_list_in_yaml(self, real: Any) -> None:
        """Given the reverse, then the profile counts less the black list."""
        plan = real["plans"]["black in the environment, white in YAML"]
        assert "mul" not in plan["names"]
        assert "sub" in plan["names"]
        assert plan["is_everything"]

    def test_an_explicit_white_list_beats_the_profile(self, real: Any) -> None:
        """Given a profile's list and a white list, then the white list alone counts."""
        assert real["plans"]["white list and profile"]["names"] == ["cat"]

    def test_a_typo_gets_a_suggestion_and_the_rest_counts(self, real: Any) -> None:
        """Given masked_filll, then the text asks for masked_fill, and mul is left out all the same."""
        plan = real["plans"]["typos"]
        (text,) = plan["unknown"]
        assert "SGLANG_FL_FLAGOS_BLACKLIST" in text
        assert "Did you mean 'masked_fill'?" in text
        assert "mul" in plan["left_out"]
        assert "masked_fill" in plan["names"]

    def test_atens_own_spellings_are_understood(self, real: Any) -> None:
        """Given keys of ATen, then FlagGems' functions of them are meant; a function's own name means only itself."""
        assert real["plans"]["ATen's spellings"]["names"] == ["softmax", "to_copy", "true_divide", "zeros"]

    def test_names_as_profilers_print_them_are_understood(self, real: Any) -> None:
        """Given aten::softmax and the like, then the operators are meant, and nothing is unknown."""
        plan = real["plans"]["profilers' spellings"]
        assert plan["names"] == ["cumsum", "mm", "softmax", "true_divide"]
        assert not plan["unknown"]

    def test_another_overload_gets_the_operators_own_as_a_suggestion(self, real: Any) -> None:
        """Given overloads that FlagGems does not have, then what it has of the same operator is suggested."""
        found = [
            text.partition("Did you mean ")[2].partition("?")[0] for text in real["plans"]["other overloads"]["unknown"]
        ]
        assert found == ["'add.Tensor'", "'sub.Tensor'", "'softmax'"]

    def test_a_list_that_does_not_count_is_not_checked(self, real: Any) -> None:
        """Given typos in lists that a white list replaces, then they are no problem."""
        assert not real["plans"]["idle lists"]["unknown"]

    def test_what_pytorch_has_no_operator_for_is_not_replaced(self, real: Any) -> None:
        """Given copysign, whose kernel FlagGems registers for no operator of PyTorch's, then it does not count."""
        plan = real["plans"]["without schema"]
        assert plan["names"] == ["add"]
        assert plan["without_schema"] == ["copysign"]
        (text,) = plan["unknown"]
        assert "SGLANG_FL_FLAGOS_WHITELIST: this PyTorch has no operator for FlagGems' 'copysign'" in text
        # To leave it out is what a black list asks for.
        assert not real["plans"]["without schema in a black list"]["unknown"]


class TestSwitchOn:
    """FlagGems' operators under PyTorch's."""

    def test_the_verified_ones_are_replaced_while_graphs_are_captured(self) -> None:
        """Given two names, when switched on twice, then a capture has FlagGems' kernels for those, nothing else has."""
        variables = {"SGLANG_FL_FLAGOS_VERIFIED": "cumsum,embedding,no_such_operator"}
        found = answer(run(PRETEND + SWITCH, "cumsum", "embedding", "mm", **variables))
        assert found["is_on"]
        assert "profile verified (SGLANG_FL_FLAGOS_VERIFIED) replaces 2 operators" in found["reason"]
        assert "inside CUDA graphs" in found["reason"]
        assert any("no_such_operator" in text for text in found["warnings"])
        assert is_flag_gems(found["in_graphs"]["cumsum"])
        assert is_flag_gems(found["in_graphs"]["embedding"])
        assert not is_flag_gems(found["in_graphs"]["mm"])
        for outside in ("owners", "afterwards"):
            assert not any(is_flag_gems(owner) for owner in found[outside].values())

    def test_the_platforms_list_is_replaced_for_its_measured_calls(self) -> None:
        """Given NVIDIA's own list, when switched on, then a capture has ways of ours for its operators, outside only
        what saves enough, and the report has the share of calls; an operator that was wrong keeps PyTorch's."""
        script = PRETEND + SWITCH.replace("load_settings()", "load_settings({}, 'cuda')")
        found = answer(run(script, "cumsum", "embedding", "_to_copy", "index.Tensor", "mm"))
        assert found["is_on"], found["reason"]
        assert "profile verified (nvidia.yaml) replaces" in found["reason"]
        assert "for the calls that were measured" in found["reason"]
        assert "outside (cumsum" in found["reason"]
        assert not found["warnings"]
        replaced = {
            when: {name for name, owner in found[when].items() if is_flag_gems(owner)}
            for when in ("owners", "in_graphs", "afterwards")
        }
        assert replaced["owners"] == replaced["afterwards"] == {"cumsum"}
        assert replaced["in_graphs"] == {"cumsum", "embedding", "_to_copy"}

    def test_a_triton_that_launches_otherwise_turns_the_profile_off(self) -> None:
        """Given a Triton without the launcher that is watched, when switched on, then the reason says so."""
        change = "import triton.compiler.compiler as c\ndel c.CompiledKernel.run\n"
        found = answer(run(PRETEND + change + SWITCH.replace("load_settings()", "load_settings({}, 'cuda')"), "cumsum"))
        assert not found["is_on"]
        assert "launches its kernels another way" in found["reason"]
        assert not is_flag_gems(found["owners"]["cumsum"])

    def test_a_white_list_replaces_everywhere(self) -> None:
        """Given a white list, when switched on, then its operators are FlagGems' in graphs, before and after them."""
        found = answer(run(PRETEND + SWITCH, "cumsum", "mm", SGLANG_FL_FLAGOS_WHITELIST="cumsum"))
        assert "inside CUDA graphs" not in found["reason"]
        for when in ("owners", "in_graphs", "afterwards"):
            assert is_flag_gems(found[when]["cumsum"])
            assert not is_flag_gems(found[when]["mm"])

    def test_a_failure_at_a_capture_leaves_the_graphs_to_pytorch(self, tmp_path: Path) -> None:
        """Given a FlagGems that registers once and then raises, when captured, then a warning says so."""
        more = (
            "calls = []\n"
            "def only_enable(lib, include, **_):\n"
            "    lib.impl('cumsum', cumsum, 'CUDA')\n"
            "    calls.append(1)\n"
            "    if len(calls) > 1: raise ValueError('no more')\n"
        )
        write_version(tmp_path, "5.0.2", "device", more=more)
        script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})" + PRETEND + SWITCH
        done = run(script, "cumsum", SGLANG_FL_FLAGOS_VERIFIED="cumsum")
        assert not is_flag_gems(answer(done)["in_graphs"]["cumsum"])
        assert "none is replaced in these graphs" in done.stderr
        assert "ValueError: no more" in done.stderr

    def test_the_hooks_fit_sglang(self) -> None:
        """Given either kind of profile, then the hooks' targets exist, and only verified has one around the capture."""
        from sglang_fl.sglang_hooks import aten
        from sglang_fl.sglang_hooks.registration import misfits

        for profile, count in (("verified", 2), ("full", 1)):
            found = aten.hooks(load_settings({"SGLANG_FL_FLAGOS_PROFILE": profile}), print)
            assert not misfits(found)
            assert len(found) == count

    def test_full_replaces_all_but_the_black_list(self) -> None:
        """Given full less mm, when switched on, then mm stays PyTorch's and hundreds of others are FlagGems'."""
        variables = {"SGLANG_FL_FLAGOS_PROFILE": "full", "SGLANG_FL_FLAGOS_BLACKLIST": "mm"}
        found = answer(run(PRETEND + SWITCH, "add.Tensor", "mm", **variables))
        assert is_flag_gems(found["owners"]["add.Tensor"])
        assert not is_flag_gems(found["owners"]["mm"])
        assert "left to PyTorch: mm" in found["reason"]

    def test_a_report_counts_what_pytorch_has(self) -> None:
        """Given profile full, when switched on, then as many operators are registered as the report says."""
        count = (
            # Before: afterwards there would be names that have a kernel and no operator.
            "names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith('aten::')]\n"
            "found = switch_on(load_settings())\n"
            "real = sum('sglang_fl' in owner(name) for name in names)\n"
            "print(json.dumps([real, found.reason, found.warnings]))"
        )
        real, reason, warnings = answer(run(PRETEND + count, SGLANG_FL_FLAGOS_PROFILE="full"))
        assert f"({real} ATen overloads)" in reason
        assert "has no operators for FlagGems' bitwise_left_shift, " in reason
        assert not warnings

    def test_the_platforms_own_names_are_no_error_where_flag_gems_has_them_not(self, tmp_path: Path) -> None:
        """Given a FlagGems with two operators, strict, and nothing set of layer 1, when switched on with NVIDIA's own
        lists, then it is on without a warning, and the report says which names are not here.
        """
        write_version(tmp_path, "5.0.0", "device")
        variables = {"SGLANG_FL_STRICT": "1"}
        script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})" + PRETEND + SWITCH
        found = answer(run(script.replace("load_settings()", f"load_settings({variables}, 'cuda')"), "cumsum"))
        assert found["is_on"], found["reason"]
        assert not found["warnings"]
        assert "replaces 1 operators" in found["reason"]
        assert "this FlagGems has not add, add_, cat, " in found["reason"]

    def test_an_unknown_name_is_an_error_where_nothing_may_fall_back(self) -> None:
        """Given a typo and strict, when switched on, then the error names it."""
        variables = {"SGLANG_FL_FLAGOS_WHITELIST": "mull", "SGLANG_FL_STRICT": "1"}
        done = run(PRETEND + SWITCH, **variables)
        assert done.returncode != 0
        assert "no operator 'mull'" in done.stderr

    def test_a_white_list_of_unknown_names_is_off_with_its_reason(self) -> None:
        """Given only a typo, when switched on, then the layer is off and says why."""
        found = answer(run(PRETEND + SWITCH, "mul.Tensor", SGLANG_FL_FLAGOS_WHITELIST="mull"))
        assert not found["is_on"]
        assert "leaves no operator to replace" in found["reason"]
        assert not is_flag_gems(found["owners"]["mul.Tensor"])


_RECORD = """
import logging
outcome = switch_on(load_settings())
assert outcome.is_on, outcome
for name in ("flag_gems.ops.add", "flag_gems.fused.silu_and_mul", "flag_gems.ops.add", "flag_gems.ops.cumsum"):
    logging.getLogger(name).debug("GEMS CALL")
hopper = [n for n in logging.root.manager.loggerDict if n.startswith("hopper.ops.")]
for name in hopper:
    logging.getLogger(name).debug("GEMS CALL")
print(json.dumps({"hopper": hopper, "reason": outcome.reason, "warnings": outcome.warnings}))
"""


class TestRecords:
    """SGLANG_FLAGGEMS_RECORD."""

    @pytest.mark.parametrize(("once", "adds"), [("1", 1), ("0", 2)])
    def test_only_aten_operators_are_recorded(self, tmp_path: Path, once: str, adds: int) -> None:
        """Given records on, when kernels of both layers log, then layer 1's are in the file, also the chip's own."""
        path = tmp_path / "gems_aten.txt"
        found = answer(
            run(
                PRETEND + _RECORD,
                SGLANG_FL_FLAGOS_WHITELIST="cumsum",
                SGLANG_FLAGGEMS_RECORD="1",
                SGLANG_FLAGGEMS_LOG_PATH=str(path),
                SGLANG_FLAGGEMS_LOG_ONCE=once,
            )
        )
        lines = path.read_text().splitlines()
        assert sum("flag_gems.ops.add" in line for line in lines) == adds
        assert lines[0] == "[DEBUG] flag_gems.ops.add.<module>: GEMS CALL"
        assert not any("silu_and_mul" in line for line in lines)
        assert found["hopper"]
        assert all(any(name in line for line in lines) for name in found["hopper"])

    def test_without_records_no_file_is_made_and_no_logger_is_changed(self, tmp_path: Path) -> None:
        """Given records off, when switched on, then FlagGems' logger has no handler and writes nothing."""
        script = PRETEND + _RECORD.replace("print(", "assert not logging.getLogger('flag_gems').handlers; print(")
        answer(run(script, SGLANG_FL_FLAGOS_WHITELIST="cumsum", HOME=str(tmp_path)))
        assert not list(tmp_path.rglob("*.log"))

    def test_a_file_that_cannot_be_written_is_reported_and_the_layer_is_on(self, tmp_path: Path) -> None:
        """Given a path in a folder that does not exist, when switched on, then the report says so."""
        path = tmp_path / "missing" / "x.txt"
        variables = {"SGLANG_FLAGGEMS_RECORD": "1", "SGLANG_FLAGGEMS_LOG_PATH": str(path)}
        found = answer(run(PRETEND + _RECORD, SGLANG_FL_FLAGOS_WHITELIST="cumsum", **variables))
        assert "SGLANG_FLAGGEMS_LOG_PATH" in found["warnings"][0]
        assert "No such file or directory" in found["warnings"][0]

    def test_other_ranks_write_beside_it(self) -> None:
        """Given ranks 0 and 3, then the names are PATH and PATH.rank3."""
        assert [path_of_rank(Path("/tmp/x.txt"), rank).name for rank in (0, 3)] == ["x.txt", "x.txt.rank3"]


class TestVersions:
    """Versions whose parts lie elsewhere."""

    @pytest.mark.parametrize(
        ("version", "detector", "extra"),
        [("5.0.2", "device", ""), ("5.3.4", "device_finder", ", None, ('AutogradCUDA',)")],
    )
    def test_older_and_newer_forms_are_understood(
        self, tmp_path: Path, version: str, detector: str, extra: str
    ) -> None:
        """Given DeviceDetector in either place and entries of either form, when switched on, then both are replaced."""
        write_version(tmp_path, version, detector, extra)
        script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})" + PRETEND + SWITCH
        found = answer(run(script, "mul.Tensor", "cumsum", "relu", SGLANG_FL_FLAGOS_PROFILE="full"))
        assert found["reason"].startswith(f"FlagGems {version} on nvidia: profile full")
        assert "replaces 2 operators (2 ATen overloads)" in found["reason"]
        assert is_flag_gems(found["owners"]["cumsum"])
        assert not is_flag_gems(found["owners"]["relu"])

    def test_an_operator_that_is_not_registered_is_reported(self, tmp_path: Path) -> None:
        """Given a FlagGems that passes over an operator in silence, when switched on, then it is named."""
        more = "def enable(lib=None, **_): lib.impl('cumsum', cumsum, 'CUDA')\n"
        write_version(tmp_path, "5.0.2", "device", more=more)
        script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})" + PRETEND + SWITCH
        found = answer(run(script, "cumsum", "mul.Tensor", SGLANG_FL_FLAGOS_PROFILE="full"))
        assert found["is_on"]
        assert any("did not register mul.Tensor; PyTorch's own" in text for text in found["warnings"])
        assert "(1 ATen overloads)" in found["reason"]
        assert not is_flag_gems(found["owners"]["mul.Tensor"])


class TestBeforeImport:
    """What is said when the plugin is loaded."""

    @pytest.mark.parametrize(
        ("variables", "platform", "reason"),
        [
            ({"USE_FLAGGEMS": "0"}, "cuda", "USE_FLAGGEMS switches it off"),
            ({}, "cpu", "runs on the CPU"),
            ({}, None, "no operator has been verified on this platform; SGLANG_FL_FLAGOS_PROFILE=full"),
        ],
    )
    def test_off_with_its_reason(self, variables: dict[str, str], platform: str | None, reason: str) -> None:
        """Given a switch, a platform without a device, or one without a list, then the layer is off and says why."""
        outcome = before_import(load_settings(variables, None), platform)
        assert not outcome.is_on
        assert reason in outcome.reason

    def test_nothing_is_imported(self) -> None:
        """Given a profile, when the plugin asks, then the answer is on, and flag_gems is not imported for it."""
        script = (
            "import sys\nfrom sglang_fl.aten.layer import before_import\nfrom sglang_fl.config import load_settings\n"
            "print(before_import(load_settings(), 'cuda').reason); assert 'flag_gems' not in sys.modules"
        )
        done = run(script, SGLANG_FL_FLAGOS_PROFILE="full")
        assert done.returncode == 0, done.stderr
        assert "profile full; in processes that run a model" in done.stdout

    def test_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Given no flag_gems, then the layer is off, and strict makes it an error where it was asked for."""
        monkeypatch.setattr(gems, "is_installed", lambda: False)
        asked = {"SGLANG_FL_FLAGOS_PROFILE": "full"}
        assert "not installed" in before_import(load_settings(asked, None), "cuda").reason
        with pytest.raises(AtenError, match=r"not installed.*SGLANG_FL_STRICT makes that an error"):
            before_import(load_settings(asked | {"SGLANG_FL_STRICT": "1"}, None), "cuda")
        # On by default is not asked for: strict is often set for the other layers.
        assert not before_import(load_settings({"SGLANG_FL_STRICT": "1"}, "cuda"), "cuda").is_on

    def test_what_counts_as_asked_for(self) -> None:
        """Given nothing, a platform's list, or a user's own setting, then only the last is asked for."""
        assert not is_asked_for(load_settings({}, "cuda"))
        assert is_asked_for(load_settings({"USE_FLAGGEMS": "1"}, "cuda"))
        assert is_asked_for(load_settings({"SGLANG_FL_FLAGOS_WHITELIST": "mul"}, "cuda"))
        assert not is_asked_for(load_settings({"USE_FLAGGEMS": "0"}, "cuda"))
