"""Reads the settings once, from the environment, YAML, the platform's YAML and the table, in that order."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_fl.config.chips import find_chip
from sglang_fl.config.fields import FIELD_BY_NAME, FIELD_BY_VARIABLE, FIELDS, Field
from sglang_fl.config.problems import Problem, SettingsError, closest
from sglang_fl.config.settings import AtenSettings, CommSettings, OpsSettings, Settings, SystemSettings
from sglang_fl.config.sources import DEFAULT_SOURCE, DETECTED_SOURCE, Source, SourceKind
from sglang_fl.config.value_types import InvalidValueError
from sglang_fl.config.values import CommBackend
from sglang_fl.config.yaml_file import read_yaml

CONFIG_DIR = Path(__file__).resolve().parent
_PREFIXES = ("SGLANG_FL_", "SGLANG_FLAGGEMS_")
_CONFIG_VARIABLE = FIELD_BY_NAME["system.config_file"].variable
_CORRECT_LINE = "Correct the line or remove it."


@dataclass(frozen=True)
class Found:
    """A value with its source."""

    value: Any
    source: Source


Level = dict[str, Found]
"""What one source holds: field name to value."""


def load_settings(environ: Mapping[str, str] | None = None, platform: str | None = None) -> Settings:
    """Read all settings; nothing is kept, printed or changed.

    environ: the variables, by default those of the process. platform: the detected platform, under any of its
    names (cuda, npu, cpu, ...), or None; SGLANG_FL_PLATFORM and the YAML field ``platform`` win over it. Per
    field the strongest source counts: environment, YAML (SGLANG_FL_CONFIG), the platform's YAML, the default.
    A white list replaces the black list of every weaker source, and the reverse.

    Raises SettingsError with every problem found.
    """
    variables = os.environ if environ is None else environ
    problems: list[Problem] = []
    environment = _read_environment(variables, problems)
    file_level = _read_user_file(environment, problems)
    chosen_platform = _choose_platform(environment, file_level, platform)
    platform_level = _read_platform_file(chosen_platform.value, problems)
    if problems:
        raise SettingsError(problems)

    levels = (environment, file_level, platform_level)
    for level in levels:
        _apply_flagcx_path(level)
    resolved = {field.name: _resolve(field, levels) for field in FIELDS}
    resolved["system.platform"] = chosen_platform
    warnings = (
        *_unknown_variables(variables),
        *_unknown_platform(chosen_platform),
        *_replaced_lists(environment, file_level),
        *_flagcx_path_conflicts(resolved, environment, file_level),
        *_idle_log_path(resolved),
    )
    return _build(resolved, warnings)


def _read_environment(variables: Mapping[str, str], problems: list[Problem]) -> Level:
    level: Level = {}
    for field in FIELDS:
        text = variables.get(field.variable, "").strip()
        if not text:
            continue
        try:
            value = field.type.from_text(text)
        except InvalidValueError as error:
            problems.append(_problem(error, field, field.variable, "Correct the variable or unset it."))
            continue
        level[field.name] = Found(value, Source(SourceKind.ENVIRONMENT, field.variable))
    _check_opposites(level, problems)
    return level


def _read_user_file(environment: Level, problems: list[Problem]) -> Level:
    config_file = environment.get("system.config_file")
    if config_file is None:
        return {}
    path = Path(config_file.value)
    return _read_file(path, str(path), _CONFIG_VARIABLE, SourceKind.YAML, problems)


def _read_platform_file(platform: str | None, problems: list[Problem]) -> Level:
    chip = find_chip(platform) if platform else None
    if chip is None or chip.defaults_file is None:
        return {}
    name = chip.defaults_file
    return _read_file(CONFIG_DIR / name, name, name, SourceKind.PLATFORM, problems)


def _read_file(path: Path, shown: str, opened_by: str, kind: SourceKind, problems: list[Problem]) -> Level:
    level: Level = {}
    for entry in read_yaml(path, shown, opened_by, problems):
        field = entry.field
        if field.user_only and kind is SourceKind.PLATFORM:
            found, allowed = f"the key {field.yaml_key}", "this key in the user's file only"
            problems.append(Problem(entry.where, field.name, found, allowed, _CORRECT_LINE))
            continue
        try:
            value = field.type.from_node(entry.node)
        except InvalidValueError as error:
            where = f"{shown}:{error.line}" if error.line else entry.where
            problems.append(_problem(error, field, where, _CORRECT_LINE))
            continue
        level[field.name] = Found(value, Source(kind, shown if kind is SourceKind.PLATFORM else entry.where))
    _check_opposites(level, problems)
    return level


def _problem(error: InvalidValueError, field: Field, where: str, action: str) -> Problem:
    suggestion = repr(error.suggestion) if error.suggestion else None
    return Problem(where, field.name, error.found, error.allowed, action, suggestion)


def _check_opposites(level: Level, problems: list[Problem]) -> None:
    for field in FIELDS:
        opposite = field.opposite
        if opposite is None or field.name > opposite or not {field.name, opposite} <= level.keys():
            continue
        where = f"{level[field.name].source.where} and {level[opposite].source.where}"
        names = f"{field.name}, {opposite}"
        problems.append(
            Problem(where, names, "a black and a white list", "one of the two in one source", "Remove one.")
        )


def _choose_platform(environment: Level, file_level: Level, detected: str | None) -> Found:
    for level in (environment, file_level):
        if "system.platform" in level:
            return level["system.platform"]
    if not detected:
        return Found(None, DEFAULT_SOURCE)
    chip = find_chip(detected)
    return Found(chip.platform if chip else detected, DETECTED_SOURCE)


def _apply_flagcx_path(level: Level) -> None:
    """A FlagCX path in a source that names no backend selects flagcx, on that source's behalf."""
    path = level.get("comm.flagcx_path")
    if path is not None and "comm.backend" not in level:
        level["comm.backend"] = Found(CommBackend.FLAGCX, path.source)


def _resolve(field: Field, levels: tuple[Level, ...]) -> Found:
    for level in levels:
        if field.name in level:
            return level[field.name]
        if field.opposite in level:
            return Found(field.default, level[field.opposite].source)
    return Found(field.default, DEFAULT_SOURCE)


def _unknown_variables(variables: Mapping[str, str]) -> Iterator[str]:
    stems = {_stem(name): name for name in FIELD_BY_VARIABLE} | {
        name.removeprefix("SGLANG_"): name for name in FIELD_BY_VARIABLE
    }
    for name in sorted(variables):
        known = name in FIELD_BY_VARIABLE or not name.startswith(_PREFIXES)
        if known or not variables[name].strip():
            continue
        match = closest(_stem(name), stems, cutoff=0.7)
        suggestion = f"Did you mean {stems[match]}? " if match else ""
        yield f"{name} is no variable of sglang_fl and has no effect. {suggestion}Correct it or unset it."


def _stem(variable: str) -> str:
    for prefix in _PREFIXES:
        variable = variable.removeprefix(prefix)
    return variable


def _unknown_platform(chosen: Found) -> Iterator[str]:
    if chosen.value is not None and find_chip(chosen.value) is None:
        yield (
            f"The detected platform {chosen.value!r} has no defaults of its own; the general ones are used. "
            "Set SGLANG_FL_PLATFORM to use those of another."
        )


def _replaced_lists(environment: Level, file_level: Level) -> Iterator[str]:
    for field in FIELDS:
        if field.opposite in environment and field.name in file_level and field.name not in environment:
            weaker, stronger = file_level[field.name].source, environment[field.opposite].source
            yield f"{field.yaml_key} in {weaker.where} is not used: {stronger.where} replaces it."


def _flagcx_path_conflicts(resolved: Mapping[str, Found], environment: Level, file_level: Level) -> Iterator[str]:
    backend, path = resolved["comm.backend"], resolved["comm.flagcx_path"]
    if path.value is not None and backend.value not in (CommBackend.FLAGCX, CommBackend.AUTO):
        yield (
            f"{path.source.where}={path.value} is not used: {backend.source.where} selects {backend.value} "
            "and wins over the path. Unset one of the two."
        )
    replaced = file_level.get("comm.backend")
    implied = environment.get("comm.backend")
    if replaced and implied and implied.source == path.source and replaced.value != implied.value:
        yield (
            f"comm.backend={replaced.value} in {replaced.source.where} is not used: {path.source.where} "
            "selects flagcx, and the environment wins over YAML. "
            f"Unset {path.source.where} or set {FIELD_BY_NAME['comm.backend'].variable}."
        )


def _idle_log_path(resolved: Mapping[str, Found]) -> Iterator[str]:
    path = resolved["aten.log_path"]
    if path.value is not None and not resolved["aten.record"].value:
        yield (
            f"{path.source.where}={path.value} is not used: recording is off. "
            "Set SGLANG_FLAGGEMS_RECORD=1 to write that file."
        )


def _idle_aten_lists(aten: AtenSettings, resolved: Mapping[str, Found]) -> Iterator[str]:
    """What of layer 1's profile a user set that its white list, or the other profile, leaves without an effect."""
    whitelist, profile = resolved["aten.whitelist"], resolved["aten.profile"]
    for name in ("aten.profile", "aten.verified", "aten.wrong"):
        source = resolved[name].source
        if source.kind not in (SourceKind.ENVIRONMENT, SourceKind.YAML) or name in aten.used_lists():
            continue
        if whitelist.value is not None:
            yield f"{name} (from {source.where}) is not used: the white list ({whitelist.source.where}) replaces it."
        elif name != "aten.profile":
            yield f"{name} (from {source.where}) is not used: the profile is {profile.value} ({profile.source.where})."


def _build(resolved: Mapping[str, Found], warnings: tuple[str, ...]) -> Settings:
    def section(name: str) -> dict[str, Any]:
        return {field.attribute: resolved[field.name].value for field in FIELDS if field.section == name}

    aten = AtenSettings(**section("aten"))
    return Settings(
        ops=OpsSettings(**section("ops")),
        aten=aten,
        comm=CommSettings(**section("comm")),
        system=SystemSettings(**section("system")),
        sources=tuple((field.name, resolved[field.name].source) for field in FIELDS),
        warnings=(*warnings, *_idle_aten_lists(aten, resolved)),
    )
