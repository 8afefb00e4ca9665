"""Which source wins, per field: environment, YAML, platform, default; opposite lists; FLAGCX_PATH."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_fl.config import FIELDS, Field, Settings, SettingsError, SourceKind, load_settings
from sglang_fl.config.route_type import CommRoutes
from sglang_fl.config.value_types import Boolean, Choice, Names, OpOrders, Seconds

ENVIRONMENT, YAML, PLATFORM, DEFAULT = SourceKind
PAIRS = [(ENVIRONMENT, YAML), (ENVIRONMENT, PLATFORM), (YAML, PLATFORM)]
UNSET = "unset"


def other_text(field: Field) -> str:
    """A value in the variable's notation that is not the field's example."""
    if isinstance(field.type, Boolean):
        return field.type.to_text(field.default)
    if isinstance(field.type, Choice):
        return next(word for word in field.type.shown if word != field.example)
    if isinstance(field.type, Names):
        return "another_name"
    if isinstance(field.type, CommRoutes):
        return "reduce_scatter=another:1KiB"
    if isinstance(field.type, Seconds):
        return "7.5"
    return "another_op=reference" if isinstance(field.type, OpOrders) else "another"


def write(path: Path, field: Field, text: str) -> None:
    """A YAML file that sets one field to a value given in the variable's notation."""
    section, nested, key = str(field.yaml_key).rpartition(".")
    value = field.type.to_yaml(field.type.from_text(text))
    path.write_text(f"{section}:\n  {key}: {value}\n" if nested else f"{key}: {value}\n")


@pytest.fixture
def platform_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the test's own from which platform files are read; it begins with an nvidia.yaml."""
    folder = tmp_path / "platforms"
    folder.mkdir()
    (folder / "nvidia.yaml").write_text("log_level: INFO\n")
    monkeypatch.setattr("sglang_fl.config.loader.CONFIG_DIR", folder)
    return folder


def load_with(field: Field, texts: dict[SourceKind, str], tmp_path: Path, platforms: Path) -> Settings:
    """Settings where each of these sources sets the field to its text."""
    environ: dict[str, str] = {}
    if PLATFORM in texts:
        write(platforms / "nvidia.yaml", field, texts[PLATFORM])
    if YAML in texts:
        write(tmp_path / "user.yaml", field, texts[YAML])
        environ["SGLANG_FL_CONFIG"] = str(tmp_path / "user.yaml")
    if ENVIRONMENT in texts:
        environ[field.variable] = texts[ENVIRONMENT]
    return load_settings(environ, "cuda")


LAYERED_FIELDS = [field for field in FIELDS if field.yaml_key is not None and not field.user_only]


@pytest.mark.parametrize(("stronger", "weaker"), PAIRS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("field", LAYERED_FIELDS, ids=lambda field: field.name)
def test_stronger_source_wins(
    field: Field, stronger: SourceKind, weaker: SourceKind, tmp_path: Path, platform_folder: Path
) -> None:
    for strong_text, weak_text in ((field.example, other_text(field)), (other_text(field), field.example)):
        texts = {stronger: strong_text, weaker: weak_text}
        settings = load_with(field, texts, tmp_path, platform_folder)
        assert settings.value(field.name) == field.type.from_text(strong_text)
        assert settings.source(field.name).kind is stronger


@pytest.mark.parametrize("kind", [ENVIRONMENT, YAML, PLATFORM], ids=lambda kind: kind.name)
@pytest.mark.parametrize("field", LAYERED_FIELDS, ids=lambda field: field.name)
def test_any_source_wins_over_the_default(
    field: Field, kind: SourceKind, tmp_path: Path, platform_folder: Path
) -> None:
    settings = load_with(field, {kind: field.example}, tmp_path, platform_folder)
    assert settings.value(field.name) == field.type.from_text(field.example)
    assert settings.source(field.name).kind is kind


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
@pytest.mark.parametrize("empty", ["", "  "])
def test_empty_variable_counts_as_unset(field: Field, empty: str, tmp_path: Path, platform_folder: Path) -> None:
    assert load_settings({field.variable: empty}) == load_settings({})
    if field in LAYERED_FIELDS:
        texts = {ENVIRONMENT: empty, YAML: field.example}
        assert load_with(field, texts, tmp_path, platform_folder).source(field.name).kind is YAML


def test_one_line_file_keeps_the_platforms_lists(tmp_path: Path, platform_folder: Path) -> None:
    (platform_folder / "nvidia.yaml").write_text("flagos_blacklist: [mm, addmm]\ncomm:\n  backend: nccl\n")
    (tmp_path / "user.yaml").write_text("comm:\n  mode: fastest\n")
    settings = load_settings({"SGLANG_FL_CONFIG": str(tmp_path / "user.yaml")}, "cuda")
    assert settings.aten.blacklist == ("mm", "addmm")
    assert settings.source("aten.blacklist").where == "nvidia.yaml"
    assert (settings.comm.backend, settings.comm.mode) == ("nccl", "fastest")


def test_empty_list_in_yaml_drops_the_platforms_list(tmp_path: Path, platform_folder: Path) -> None:
    (platform_folder / "nvidia.yaml").write_text("flagos_blacklist: [mm, addmm]\n")
    (tmp_path / "user.yaml").write_text("flagos_blacklist: []\n")
    settings = load_settings({"SGLANG_FL_CONFIG": str(tmp_path / "user.yaml")}, "cuda")
    assert (settings.aten.blacklist, settings.source("aten.blacklist").kind) == ((), YAML)


OPPOSITES = [field for field in FIELDS if field.opposite]


@pytest.mark.parametrize(("stronger", "weaker"), PAIRS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("field", OPPOSITES, ids=lambda field: field.name)
def test_list_replaces_the_opposite_list_of_weaker_sources(
    field: Field, stronger: SourceKind, weaker: SourceKind, tmp_path: Path, platform_folder: Path
) -> None:
    # given a list in one source and its opposite in a weaker one
    opposite = next(other for other in FIELDS if other.name == field.opposite)
    load_with(opposite, {weaker: "mm"}, tmp_path, platform_folder)
    settings = load_with(field, {stronger: "mul"}, tmp_path, platform_folder)
    if weaker is YAML:
        environ = {field.variable: "mul", "SGLANG_FL_CONFIG": str(tmp_path / "user.yaml")}
        settings = load_settings(environ, "cuda")
    # then only the stronger list is left, and the other's emptiness has its source too
    assert settings.value(field.name) == ("mul",)
    assert settings.value(opposite.name) == opposite.default
    assert settings.source(opposite.name) == settings.source(field.name)
    assert settings.source(field.name).kind is stronger
    # and the user's own list that lost is named
    warned = any(f"{opposite.yaml_key} in" in warning for warning in settings.warnings)
    assert warned == (weaker is YAML)


def test_black_list_of_one_layer_leaves_the_other_layers_white_list(tmp_path: Path) -> None:
    settings = load_settings({"SGLANG_FL_OOT_BLACKLIST": "RMSNorm", "SGLANG_FL_FLAGOS_WHITELIST": "mul"})
    assert (settings.ops.blacklist, settings.aten.whitelist) == (("RMSNorm",), ("mul",))


@pytest.mark.parametrize("detected", [None, "cpu"])
def test_platform_variable_wins_over_yaml_and_detection(detected: str | None, tmp_path: Path) -> None:
    (tmp_path / "user.yaml").write_text("platform: npu\n")
    environ = {"SGLANG_FL_CONFIG": str(tmp_path / "user.yaml")}
    from_yaml = load_settings(environ, detected)
    assert (from_yaml.system.platform, from_yaml.comm.backend) == ("ascend", "hccl")
    assert from_yaml.source("system.platform").where.endswith("user.yaml:1")
    from_variable = load_settings(environ | {"SGLANG_FL_PLATFORM": "cuda"}, detected)
    assert (from_variable.system.platform, from_variable.comm.backend) == ("cuda", "nccl")
    detected_only = load_settings({}, detected)
    assert detected_only.system.platform == detected
    assert str(detected_only.source("system.platform")) == ("platform detected" if detected else "default")


def test_platform_that_the_table_does_not_hold_is_named() -> None:
    settings = load_settings({}, "xpu")
    assert (settings.system.platform, settings.comm.backend) == ("xpu", "auto")
    assert any("'xpu'" in warning for warning in settings.warnings)


# The values of FLAGCX_PATH in the table FLAGCX_PATH x SGLANG_FL_DIST_BACKEND, and whether each counts as set.
FLAGCX_PATHS = {UNSET: False, "": False, "/opt/FlagCX": True, "/does/not/exist": True}


@pytest.mark.parametrize("backend", [UNSET, "", "nccl", "hccl", "flagcx", "torch", "auto"])
@pytest.mark.parametrize("path", FLAGCX_PATHS)
def test_flagcx_path_and_backend(path: str, backend: str) -> None:
    # given one cell of the table
    environ = {"FLAGCX_PATH": path, "SGLANG_FL_DIST_BACKEND": backend}
    settings = load_settings({name: text for name, text in environ.items() if text != UNSET}, "cuda")
    # then the variable wins, the path alone means flagcx, and neither is NVIDIA's default
    path_is_set = FLAGCX_PATHS[path]
    if backend not in (UNSET, ""):
        expected = (backend, "environment SGLANG_FL_DIST_BACKEND")
    elif path_is_set:
        expected = ("flagcx", "environment FLAGCX_PATH")
    else:
        expected = ("nccl", "platform nvidia.yaml")
    assert (settings.comm.backend, str(settings.source("comm.backend"))) == expected
    # and a path that is not used is said to be so
    ignored = path_is_set and backend in ("nccl", "hccl", "torch")
    assert [path in w and f"selects {backend}" in w for w in settings.warnings] == [True] * ignored


@pytest.mark.parametrize("path", FLAGCX_PATHS)
def test_backend_with_a_typing_error_names_the_choices(path: str) -> None:
    environ = {"SGLANG_FL_DIST_BACKEND": "typo"} | ({} if path == UNSET else {"FLAGCX_PATH": path})
    with pytest.raises(SettingsError) as caught:
        load_settings(environ, "cuda")
    text = str(caught.value)
    for part in (
        "SGLANG_FL_DIST_BACKEND",
        "comm.backend",
        "'typo'",
        "one of nccl, hccl, flagcx, torch, auto",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("environ", "yaml_text", "expected"),
    [
        # a path in the file means flagcx, on the file's behalf
        ({}, "comm: {flagcx_path: /f}", ("flagcx", "YAML")),
        # a backend in the same file, or in the environment, wins over it
        ({}, "comm: {flagcx_path: /f, backend: nccl}", ("nccl", "YAML")),
        ({"SGLANG_FL_DIST_BACKEND": "torch"}, "comm: {flagcx_path: /f}", ("torch", "SGLANG_FL_DIST_BACKEND")),
        # the path in the environment wins over the file's backend
        ({"FLAGCX_PATH": "/e"}, "comm: {backend: nccl}", ("flagcx", "FLAGCX_PATH")),
    ],
)
def test_flagcx_path_across_sources(
    environ: dict[str, str], yaml_text: str, expected: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "user.yaml").write_text(yaml_text)
    settings = load_settings(environ | {"SGLANG_FL_CONFIG": str(tmp_path / "user.yaml")}, "cuda")
    backend, where = expected
    assert settings.comm.backend == backend
    assert where in str(settings.source("comm.backend"))
    # whatever the user wrote and does not get is named
    assert len(settings.warnings) == (0 if (environ, backend) == ({}, "flagcx") else 1)


def test_backend_of_the_file_that_the_path_replaces_is_named(tmp_path: Path) -> None:
    (tmp_path / "user.yaml").write_text("comm:\n  backend: nccl\n")
    settings = load_settings({"FLAGCX_PATH": "/opt/FlagCX", "SGLANG_FL_CONFIG": str(tmp_path / "user.yaml")}, "cuda")
    (warning,) = settings.warnings
    for part in ("comm.backend=nccl", "user.yaml:2", "FLAGCX_PATH selects flagcx", "SGLANG_FL_DIST_BACKEND"):
        assert part in warning


@pytest.mark.parametrize(
    ("variable", "suggestion"),
    [
        ("SGLANG_FL_DIST_BACKND", "SGLANG_FL_DIST_BACKEND"),
        ("SGLANG_FL_FLAGCX_PATH", "FLAGCX_PATH"),
        ("SGLANG_FL_USE_FLAGGEMS", "USE_FLAGGEMS"),
        ("SGLANG_FL_FLAGGEMS_RECORD", "SGLANG_FLAGGEMS_RECORD"),
        ("SGLANG_FLAGGEMS_LOGPATH", "SGLANG_FLAGGEMS_LOG_PATH"),
        ("SGLANG_FL_QWERTZ", None),
    ],
)
def test_unknown_variable_is_a_warning(variable: str, suggestion: str | None) -> None:
    (warning,) = load_settings({variable: "1"}).warnings
    assert variable in warning
    assert ("Did you mean" in warning) == (suggestion is not None)
    assert suggestion is None or f"Did you mean {suggestion}?" in warning


@pytest.mark.parametrize("environ", [{"SGLANG_FL_QWERTZ": ""}, {"SGLANG_PLUGINS": "x"}, {"FLAGCX_DEBUG": "INFO"}])
def test_empty_and_foreign_variables_are_no_warning(environ: dict[str, str]) -> None:
    assert load_settings(environ).warnings == ()


@pytest.mark.parametrize(
    ("variables", "idle"),
    [
        ({"SGLANG_FL_FLAGOS_VERIFIED": "mul", "SGLANG_FL_FLAGOS_PROFILE": "full"}, ["aten.verified"]),
        ({"SGLANG_FL_FLAGOS_WRONG": "mul"}, ["aten.wrong"]),
        ({"SGLANG_FL_FLAGOS_WRONG": "mul", "SGLANG_FL_FLAGOS_PROFILE": "full"}, []),
        (
            {"SGLANG_FL_FLAGOS_WHITELIST": "mul", "SGLANG_FL_FLAGOS_PROFILE": "full", "SGLANG_FL_FLAGOS_VERIFIED": "a"},
            ["aten.profile", "aten.verified"],
        ),
        ({"SGLANG_FL_FLAGOS_WHITELIST": "mul"}, []),
        ({"SGLANG_FL_FLAGOS_VERIFIED": "mul", "SGLANG_FL_FLAGOS_BLACKLIST": "cat"}, []),
    ],
)
def test_lists_of_operators_that_do_not_count_are_named(variables: dict[str, str], idle: list[str]) -> None:
    warnings = load_settings(variables, "cuda").warnings
    assert [warning.partition(" (from SGLANG_FL_FLAGOS_")[0] for warning in warnings] == idle
    assert all("is not used: the" in warning for warning in warnings)


def test_log_path_without_recording_is_named() -> None:
    (warning,) = load_settings({"SGLANG_FLAGGEMS_LOG_PATH": "/tmp/a"}).warnings
    assert "SGLANG_FLAGGEMS_LOG_PATH=/tmp/a" in warning and "SGLANG_FLAGGEMS_RECORD=1" in warning
    assert load_settings({"SGLANG_FLAGGEMS_LOG_PATH": "/tmp/a", "SGLANG_FLAGGEMS_RECORD": "1"}).warnings == ()


def test_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_FL_COMM_MODE", "fastest")
    assert load_settings().comm.mode == "fastest"
    assert load_settings({}).comm.mode == "all"
