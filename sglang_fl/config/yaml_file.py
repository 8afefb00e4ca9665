"""A YAML settings file as flat entries with line numbers; what is wrong with the file itself is said here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from sglang_fl.config.fields import FIELD_BY_YAML_KEY, FIELDS, YAML_SECTIONS, Field
from sglang_fl.config.problems import Problem, closest
from sglang_fl.config.value_types import describe, line_of


@dataclass(frozen=True)
class YamlEntry:
    """One known key of a file: its field, its value's node, and ``file.yaml:LINE`` of the key."""

    field: Field
    node: yaml.Node
    where: str


def read_yaml(path: Path, shown: str, opened_by: str, problems: list[Problem]) -> Iterator[YamlEntry]:
    """The entries of a settings file, in its order.

    shown: the file's name in messages; opened_by: the variable that named it (in messages about the file
    as a whole). Problems are appended to `problems`, and what is right is yielded all the same.
    """
    root = _parse(path, shown, opened_by, problems)
    if root is not None:
        yield from _entries(root, shown, "", problems)


def _parse(path: Path, shown: str, opened_by: str, problems: list[Problem]) -> yaml.MappingNode | None:
    def refuse(where: str, found: str, action: str, suggestion: str | None = None) -> None:
        allowed = "a readable YAML file that is a mapping of settings"
        problems.append(Problem(where, "", found, allowed, action, suggestion))

    try:
        content = path.read_bytes()
    except OSError as error:
        found = f"{str(path)!r}, {_reason(error)}"
        refuse(opened_by, found, f"Correct {opened_by} or unset it.", _similar_file(path))
        return None
    try:
        root = yaml.compose(content, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{shown}:{mark.line + 1}" if mark else shown
        details = ", ".join(part for part in (error.context, error.problem) if part)
        refuse(where, f"malformed YAML: {details}", "Correct the file.")
        return None
    except (yaml.YAMLError, RecursionError) as error:  # the latter: nested too deeply for the parser
        refuse(shown, f"malformed YAML: {' '.join(str(error).split())}", "Correct the file.")
        return None
    if root is None:
        refuse(shown, "an empty file", f"Set at least one field or unset {opened_by}.")
        return None
    if not isinstance(root, yaml.MappingNode):
        refuse(f"{shown}:{line_of(root)}", describe(root), "Write one 'key: value' a line.")
        return None
    return root


def _reason(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "which does not exist"
    if isinstance(error, IsADirectoryError):
        return "which is a directory"
    return f"which cannot be read ({error.strerror or error})"


def _similar_file(path: Path) -> str | None:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.is_file()]
    except OSError:
        return None
    name = closest(path.name, names)
    return repr(str(path.parent / name)) if name and name != path.name else None


def _entries(mapping: yaml.MappingNode, shown: str, section: str, problems: list[Problem]) -> Iterator[YamlEntry]:
    first_lines: dict[str, int] = {}
    for key_node, node in mapping.value:
        line = line_of(key_node)
        where = f"{shown}:{line}"
        key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else describe(key_node)
        path = f"{section}.{key}" if section else key
        if path in first_lines:
            found = f"the key a second time (first on line {first_lines[path]})"
            problems.append(Problem(where, path, found, "each key once", "Remove one of the two lines."))
            continue
        first_lines[path] = line
        if not section and key in YAML_SECTIONS:
            yield from _section_entries(node, shown, key, problems)
        elif "." not in key and path in FIELD_BY_YAML_KEY:
            yield YamlEntry(FIELD_BY_YAML_KEY[path], node, where)
        else:
            problems.append(_unknown_key(where, key, section))


def _section_entries(node: yaml.Node, shown: str, section: str, problems: list[Problem]) -> Iterator[YamlEntry]:
    if isinstance(node, yaml.MappingNode):
        yield from _entries(node, shown, section, problems)
        return
    keys = ", ".join(_keys_of(section))
    where = f"{shown}:{line_of(node)}"
    allowed = f"a mapping with any of the keys {keys}"
    problems.append(Problem(where, section, describe(node), allowed, "Correct the lines or remove them."))


def _keys_of(section: str) -> list[str]:
    """The keys that may stand inside a section, or for "" at the top level."""
    if section:
        return [key.partition(".")[2] for key in FIELD_BY_YAML_KEY if key.startswith(f"{section}.")]
    return list(dict.fromkeys(key.partition(".")[0] for key in FIELD_BY_YAML_KEY))


def _unknown_key(where: str, key: str, section: str) -> Problem:
    kind = f"the unknown key {key!r}" + (f" inside {section}" if section else "")
    allowed = f"the keys {', '.join(_keys_of(section))}"
    action = "Correct the key or remove it."
    return Problem(where, "", kind, allowed, action, _suggested_key(key))


def _suggested_key(key: str) -> str | None:
    """The key that was probably meant; a variable's or a nested key's name leads to its place."""
    meant: dict[str, str] = {}
    for field in FIELDS:
        if field.yaml_key is not None:
            section, dot, last = field.yaml_key.rpartition(".")
            place = f"{last!r} inside {section!r}" if dot else repr(last)
            meant.update(dict.fromkeys((field.variable, field.yaml_key, last), place))
    for section in YAML_SECTIONS:
        meant[section] = repr(section)
    name = closest(key, meant, cutoff=0.7)
    return meant[name] if name else None
