"""What is wrong with a setting is said with source, field, value, choices, suggestion and what to do."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from sglang_fl.config import FIELDS, Field, Problem, SettingsError, load_settings
from sglang_fl.config.value_types import Boolean

BOOLEANS = [field for field in FIELDS if isinstance(field.type, Boolean)]


def refusal(environ: dict[str, str], platform: str | None = None) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        load_settings(environ, platform)
    return caught.value


def refusal_of_file(path: Path, content: str | bytes) -> SettingsError:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return refusal({"SGLANG_FL_CONFIG": str(path)})


def single(error: SettingsError) -> Problem:
    (problem,) = error.problems
    return problem


@pytest.mark.parametrize(
    ("variable", "text", "found", "allowed", "suggestion"),
    [
        ("SGLANG_FL_PREFER", "vender", "'vender'", "one of flagos, vendor, reference", "'vendor'"),
        ("SGLANG_FL_DIST_BACKEND", "ncll", "'ncll'", "one of nccl, hccl, flagcx, torch, auto", "'nccl'"),
        ("SGLANG_FL_DIST_BACKEND", "mpi", "'mpi'", "one of nccl, hccl, flagcx, torch, auto", None),
        ("SGLANG_FL_COMM_MODE", "fast", "'fast'", "one of all, fastest", "'fastest'"),
        ("SGLANG_FL_LOG_LEVEL", "warn", "'warn'", "one of DEBUG, INFO, WARNING, ERROR", "'WARNING'"),
        ("SGLANG_FL_PLATFORM", "cdua", "'cdua'", "one of cuda, ascend, musa, cpu", "'cuda'"),
        ("SGLANG_FL_STRICT", "ture", "'ture'", "1, true, yes, on or 0, false, no, off", "'true'"),
        ("SGLANG_FL_STRICT", "2", "'2'", "1, true, yes, on or 0, false, no, off", None),
        ("SGLANG_FL_FLAGOS_BLACKLIST", "mul,,sub", "an empty entry", "separated by commas", None),
        ("SGLANG_FL_FLAGOS_BLACKLIST", "mul,", "an empty entry", "separated by commas", None),
        ("SGLANG_FL_FLAGOS_BLACKLIST", "mul sub", "'mul sub'", "separated by commas", None),
        ("SGLANG_FL_OOT_WHITELIST", "[RMSNorm]", "'[RMSNorm]'", "operator class names", None),
        ("SGLANG_FL_DENY_VENDORS", "cuda;npu", "'cuda;npu'", "vendor names", None),
        ("SGLANG_FL_PER_OP", "rms_norm", "'rms_norm'", "op=vendor|flagos;op2=reference", None),
        ("SGLANG_FL_PER_OP", "rms_norm=", "''", "op=vendor|flagos;op2=reference", None),
        ("SGLANG_FL_PER_OP", "=flagos", "an empty entry", "op=vendor|flagos;op2=reference", None),
        ("SGLANG_FL_PER_OP", "rms_norm=flagos;", "an empty entry", "op=vendor|flagos;op2=reference", None),
        ("SGLANG_FL_PER_OP", "rms_norm=flagos|flagos", "an entry twice for rms_norm", "different", None),
        ("SGLANG_FL_PER_OP", "a=flagos;a=vendor", "the operator a twice", "per operator", None),
        ("SGLANG_FL_PER_OP", "a=flagos|vendor|reference|vendor:x", "4 entries for a", "1 to 3", None),
        ("SGLANG_FL_PER_OP", "rms_norm=flagoss", "'flagoss'", "flagos, vendor, reference", "'flagos'"),
        ("SGLANG_FL_PER_OP", "rms_norm=cuda", "'cuda'", "vendor:NAME", "'vendor:cuda'"),
        ("SGLANG_FL_PER_OP", "rms_norm=vendor.nvidia", "'vendor.nvidia'", "vendor:NAME", "'vendor:nvidia'"),
        ("SGLANG_FL_PER_OP", "rms_norm=vendor:", "'vendor:'", "vendor:NAME", "'vendor'"),
        ("SGLANG_FL_PER_OP", "rms_norm=flagos:x", "'flagos:x'", "vendor:NAME", "'flagos'"),
        ("SGLANG_FL_COMM_ROUTES", "all_reduce", "'all_reduce'", "BACKEND[:MAX_BYTES]", None),
        ("SGLANG_FL_COMM_ROUTES", "all_reduc=native", "'all_reduc'", "all_gather, all_reduce", "'all_reduce'"),
        ("SGLANG_FL_COMM_ROUTES", "all_reduce=native:8MB", "'native:8MB'", "KiB, MiB, GiB", None),
        ("SGLANG_FL_COMM_ROUTES", "all_reduce=native@captured", "'native@captured'", "@graph or @eager", None),
        ("SGLANG_FL_COMM_ROUTES", "all_reduce=native|", "''", "BACKEND[:MAX_BYTES]", None),
        (
            "SGLANG_FL_COMM_ROUTES",
            "all_reduce=flagcx|native:1KiB",
            "native:1024 for all_reduce, which is never",
            "",
            None,
        ),
        ("SGLANG_FL_COMM_ROUTES", "all_reduce=a:9;all_reduce=b", "the operation all_reduce twice", "", None),
        ("SGLANG_FL_COMM_ROUTES", "all_reduce=" + "|".join(f"a:{n}" for n in range(1, 10)), "9 routes", "1 to 8", None),
        ("SGLANG_FL_COMM_TIMEOUT_S", "0", "'0'", "a number of seconds from 0.001", None),
        ("SGLANG_FL_COMM_TIMEOUT_S", "1e-320", "'1e-320'", "a number of seconds from 0.001", None),
        ("SGLANG_FL_COMM_TIMEOUT_S", "-1", "'-1'", "a number of seconds from 0.001", None),
        ("SGLANG_FL_COMM_TIMEOUT_S", "inf", "'inf'", "at most 31536000", None),
        ("SGLANG_FL_COMM_TIMEOUT_S", "1e9", "'1e9'", "at most 31536000", None),
        ("SGLANG_FL_COMM_TIMEOUT_S", "nan", "'nan'", "a number of seconds from 0.001", None),
        ("SGLANG_FL_COMM_TIMEOUT_S", "90s", "'90s'", "a number of seconds from 0.001", "'90'"),
        ("SGLANG_FL_COMM_CREATE_TIMEOUT_S", "2m", "'2m'", "a number of seconds from 0.001", None),
        ("FLAGCX_PATH", "~no_such_user_here/x", "'~no_such_user_here/x'", "a path whose ~user exists", None),
    ],
)
def test_wrong_variable(variable: str, text: str, found: str, allowed: str, suggestion: str | None) -> None:
    error = refusal({variable: text})
    problem = single(error)
    field = next(field for field in FIELDS if field.variable == variable)
    assert (problem.where, problem.field, problem.suggestion) == (variable, field.name, suggestion)
    assert problem.found.startswith(found)
    assert allowed in problem.allowed
    assert problem.action == "Correct the variable or unset it."
    # and the message holds all of it
    for part in (variable, field.name, found, allowed, problem.action, suggestion or ""):
        assert part in str(error)
    assert ("Did you mean" in str(error)) == (suggestion is not None)


def yaml_line(field: Field, value: str) -> str:
    section, nested, key = str(field.yaml_key).rpartition(".")
    return f"{section}: {{{key}: {value}}}\n" if nested else f"{key}: {value}\n"


@pytest.mark.parametrize("field", BOOLEANS, ids=lambda field: field.name)
@pytest.mark.parametrize("word", ["maybe", "2", "-1", "y", "enabled", "0.0", "None"])
def test_boolean_that_is_none(field: Field, word: str, tmp_path: Path) -> None:
    assert single(refusal({field.variable: word})).found == repr(word)
    problem = single(refusal_of_file(tmp_path / "user.yaml", yaml_line(field, word)))
    assert f"{tmp_path}/user.yaml:" in problem.where and word in problem.found


WRONG_NODES = {
    "null": "nothing", "[a]": "a list", "{a: b}": "a mapping", "7.5": "the number 7.5",
    "2026-01-01": "the date 2026-01-01", "!thing x": "'x'", '""': "''",
}  # fmt: skip


@pytest.mark.parametrize("field", [f for f in FIELDS if f.yaml_key], ids=lambda field: field.name)
@pytest.mark.parametrize("node", WRONG_NODES)
def test_wrong_type_in_yaml(field: Field, node: str, tmp_path: Path) -> None:
    # given a node that is of the field's own form, this is no wrong type
    own_form = {"Names": "[a]", "OpOrders": "{a: b}", "CommRoutes": "{a: b}", "Seconds": "7.5"}.get(
        type(field.type).__name__
    )
    if own_form == "7.5" == node:
        node, found = "-7.5", "'-7.5'"
    elif node == own_form:
        node, found = "[[a]]" if node == "[a]" else "{a: {b: c}}", "a list" if node == "[a]" else "a mapping"
    else:
        found = WRONG_NODES[node]
    # when it stands on the third line, inside its section or not
    section, nested, key = str(field.yaml_key).rpartition(".")
    text = f"# comment\n{section}:\n  {key}: {node}\n" if nested else f"# comment\n\n{key}: {node}\n"
    problem = single(refusal_of_file(tmp_path / "user.yaml", text))
    # then line, field, value and choices are named
    assert problem.where == f"{tmp_path / 'user.yaml'}:3"
    assert (problem.field, problem.found) == (field.name, found)
    assert problem.allowed == field.type.allowed
    assert problem.action == "Correct the line or remove it."


@pytest.mark.parametrize(
    ("text", "line", "found"),
    [
        ("flagos_blacklist:\n  - mul\n  - ''\n", 3, "an empty entry"),
        ("flagos_blacklist:\n  - mul\n  -\n", 3, "nothing"),
        ("flagos_blacklist:\n  - mul\n  - 5\n", 3, "the integer 5"),
        ("flagos_blacklist: mul,sub\n", 1, "'mul,sub'"),
        ("flagos_whitelist: []\n", 1, "an empty list"),
        ("oot_whitelist: []\n", 1, "an empty list"),
        ("allow_vendors: []\n", 1, "an empty list"),
        ("op_backends:\n  rms_norm: flagos\n", 2, "'flagos'"),
        ("op_backends:\n  rms_norm: []\n", 2, "0 entries for rms_norm"),
        ("op_backends:\n  rms_norm:\n    - flagos\n    - vendorr\n", 4, "'vendorr'"),
        ("op_backends:\n  a: [flagos]\n  a: [vendor]\n", 3, "the operator a twice"),
        ("op_backends:\n  5: [flagos]\n", 2, "the integer 5"),
        ("comm:\n  backend: &x nccl\n  mode: *x\n", 2, "'nccl'"),
        ("flagos_blacklist: &x [*x]\n", 1, "a list"),
    ],
)
def test_wrong_entry_is_found_on_its_own_line(text: str, line: int, found: str, tmp_path: Path) -> None:
    problem = single(refusal_of_file(tmp_path / "user.yaml", text))
    assert (problem.where, problem.found) == (f"{tmp_path / 'user.yaml'}:{line}", found)


@pytest.mark.parametrize(
    ("text", "line", "key", "suggestion"),
    [
        ("prefr: flagos\n", 1, "prefr", "'prefer'"),
        ("prefer: flagos\nflagos_blaklist: [mul]\n", 2, "flagos_blaklist", "'flagos_blacklist'"),
        ("SGLANG_FL_STRICT: 1\n", 1, "SGLANG_FL_STRICT", "'strict'"),
        ("backend: nccl\n", 1, "backend", "'backend' inside 'comm'"),
        ("comm.backend: nccl\n", 1, "comm.backend", "'backend' inside 'comm'"),
        ("com:\n  backend: nccl\n", 1, "com", "'comm'"),
        ("comm:\n  backnd: nccl\n", 2, "backnd", "'backend' inside 'comm'"),
        ("comm:\n  prefer: flagos\n", 2, "prefer", "'prefer'"),
        ("config: other.yaml\n", 1, "config", None),
        ("<<: {prefer: flagos}\n", 1, "<<", None),
        ("7: 8\n", 1, "7", None),
        ("[a, b]: 8\n", 1, "a list", None),
    ],
)
def test_unknown_key(text: str, line: int, key: str, suggestion: str | None, tmp_path: Path) -> None:
    error = refusal_of_file(tmp_path / "user.yaml", text)
    problem = single(error)
    assert problem.where == f"{tmp_path / 'user.yaml'}:{line}"
    assert "unknown key" in problem.found and key in problem.found
    assert problem.suggestion == suggestion
    inside_comm = text.startswith("comm:")
    assert ("backend, mode, routes, graph_mixing, flagcx_path" in problem.allowed) == inside_comm
    assert ("prefer, op_backends" in problem.allowed) == (not inside_comm)


@pytest.mark.parametrize(
    ("content", "where", "found"),
    [
        ("", "user.yaml", "an empty file"),
        ("# nothing but a comment\n", "user.yaml", "an empty file"),
        ("- prefer\n", "user.yaml:1", "a list"),
        ("prefer\n", "user.yaml:1", "'prefer'"),
        ("prefer: flagos\ncomm: [\n", "user.yaml:3", "malformed YAML"),
        ("prefer: flagos\n\tstrict: 1\n", "user.yaml:2", "malformed YAML"),
        ("prefer: flagos\n---\nprefer: vendor\n", "user.yaml:2", "malformed YAML"),
        ("prefer: *nowhere\n", "user.yaml:1", "malformed YAML"),
        (b"prefer: \xff\xfe\n", "user.yaml", "malformed YAML"),
        ("prefer: fl\x00agos\n", "user.yaml", "malformed YAML"),
        ("prefer: flagos\nstrict: 1\nprefer: vendor\n", "user.yaml:3", "a second time (first on line 1)"),
        ("comm:\n  mode: all\n  mode: all\n", "user.yaml:3", "a second time (first on line 2)"),
        ("comm:\n  mode: all\ncomm:\n  backend: nccl\n", "user.yaml:3", "a second time (first on line 1)"),
        ("comm: nccl\n", "user.yaml:1", "'nccl'"),
        ("comm:\n", "user.yaml:1", "nothing"),
    ],
)
def test_wrong_file(content: str | bytes, where: str, found: str, tmp_path: Path) -> None:
    problem = single(refusal_of_file(tmp_path / "user.yaml", content))
    assert problem.where == str(tmp_path / where)
    assert found in problem.found
    assert problem.allowed and problem.action


def test_missing_file_names_variable_path_and_a_similar_file(tmp_path: Path) -> None:
    (tmp_path / "my_config.yaml").write_text("prefer: flagos\n")
    error = refusal({"SGLANG_FL_CONFIG": str(tmp_path / "my_confg.yaml")})
    assert single(error).where == "SGLANG_FL_CONFIG"
    for part in ("my_confg.yaml", "does not exist", f"Did you mean '{tmp_path / 'my_config.yaml'}'?"):
        assert part in str(error)


def test_folder_as_file(tmp_path: Path) -> None:
    problem = single(refusal({"SGLANG_FL_CONFIG": str(tmp_path)}))
    assert "is a directory" in problem.found and problem.where == "SGLANG_FL_CONFIG"


def test_file_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    problem = single(refusal({"SGLANG_FL_CONFIG": str(tmp_path / "file" / "user.yaml")}))
    assert "cannot be read (Not a directory)" in problem.found


@pytest.mark.parametrize(
    ("first", "second"),
    [("SGLANG_FL_OOT_BLACKLIST", "SGLANG_FL_OOT_WHITELIST"),
     ("SGLANG_FL_FLAGOS_BLACKLIST", "SGLANG_FL_FLAGOS_WHITELIST")],
)  # fmt: skip
def test_black_and_white_list_in_one_source(first: str, second: str, tmp_path: Path) -> None:
    # given both lists in the environment, then in one file, even when the environment would replace one
    in_environment = single(refusal({first: "A", second: "B"}))
    assert first in in_environment.where and second in in_environment.where
    assert "a black and a white list" in in_environment.found
    keys = [field.yaml_key for field in FIELDS if field.variable in (first, second)]
    path = tmp_path / "user.yaml"
    path.write_text("".join(f"{key}: [A]\n" for key in keys))
    in_file = single(refusal({"SGLANG_FL_CONFIG": str(path), first: "A"}))
    assert "user.yaml:1" in in_file.where and "user.yaml:2" in in_file.where


def test_all_problems_of_one_load_are_in_one_message(tmp_path: Path) -> None:
    path = tmp_path / "user.yaml"
    path.write_text("prefr: flagos\ncomm:\n  backend: ncll\n")
    error = refusal({"SGLANG_FL_CONFIG": str(path), "USE_FLAGGEMS": "maybe", "SGLANG_FL_STRICT": "x"})
    assert [problem.where for problem in error.problems] == [
        "SGLANG_FL_STRICT", "USE_FLAGGEMS", f"{path}:1", f"{path}:3",
    ]  # fmt: skip
    lines = str(error).splitlines()
    assert "4 settings are wrong" in lines[0]
    assert [line.split(".")[0].strip() for line in lines[1:]] == ["1", "2", "3", "4"]


def test_wrong_platform_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_fl.config.loader.CONFIG_DIR", tmp_path)
    (tmp_path / "nvidia.yaml").write_text("prefer: flagos\nplatform: cpu\n")
    problem = single(refusal({}, "cuda"))
    assert (problem.where, problem.field) == ("nvidia.yaml:2", "system.platform")
    (tmp_path / "nvidia.yaml").unlink()
    assert "does not exist" in single(refusal({}, "cuda")).found


def test_error_survives_the_way_between_processes() -> None:
    error = refusal({"SGLANG_FL_STRICT": "x"})
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.problems == error.problems


def test_error_without_a_problem_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one problem"):
        SettingsError([])
