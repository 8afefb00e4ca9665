"""Writes the tables of docs/configuration*.md from the table of fields: ``python -m sglang_fl.config.pages docs``."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from sglang_fl.config.fields import FIELDS, Field
from sglang_fl.config.reference import defaults_in_words

_MARKED = re.compile(r"(<!-- settings: (\w+) -->\n).*?(<!-- end of settings -->)", re.DOTALL)
Phrases = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Language:
    """What the tables of one page say.

    page: the file's name; yes, no: whether the ranks' values are compared; meanings, allowed, defaults: what
    stands in place of the fields' own English, the first by the field's name, the others as patterns with their
    translations. None and (): the English stays.
    """

    page: str
    columns: tuple[str, ...]
    yes: str
    no: str
    meanings: Mapping[str, str] | None = None
    allowed: Phrases = ()
    defaults: Phrases = ()


ENGLISH = Language(
    "configuration.md", ("variable", "YAML", "meaning", "allowed", "default", "equal on all ranks"), "yes", "may differ"
)


def chinese() -> Language:
    """The language of fields_zh.yaml."""
    data = yaml.safe_load(Path(__file__).with_name("fields_zh.yaml").read_text(encoding="utf-8"))
    allowed, defaults = (tuple((pattern, text) for pattern, text in data[key]) for key in ("allowed", "defaults"))
    return Language(
        "configuration_zh.md", tuple(data["columns"]), data["yes"], data["no"], data["meanings"], allowed, defaults
    )


def allowed_in_words(text: str, language: Language) -> str:
    """What ``ValueType.allowed`` says, in a language; KeyError where that has no translation of it."""
    if not language.allowed:
        return text
    for pattern, translation in language.allowed:
        match = re.fullmatch(pattern, text)
        if match:
            return match.expand(translation)
    raise KeyError(f"fields_zh.yaml has no translation of the allowed values {text!r}: add one to its list allowed")


def _default(text: str, language: Language) -> str:
    for pattern, translation in language.defaults:
        text = re.sub(pattern, translation, text)
    return text


def _row(setting: Field, language: Language) -> str:
    cells = (
        f"`{setting.variable}`",
        f"`{setting.yaml_key}`" if setting.yaml_key else "-",
        setting.doc if language.meanings is None else language.meanings[setting.name],
        allowed_in_words(setting.type.allowed, language),
        _default(defaults_in_words(setting), language),
        language.yes if setting.compared else language.no,
    )
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def table(section: str, language: Language) -> str:
    """The Markdown table of one section's settings; KeyError names what the language lacks."""
    head = [f"| {' | '.join(language.columns)} |", "|" + "---|" * len(language.columns)]
    rows = [_row(setting, language) for setting in FIELDS if setting.section == section]
    return "\n".join([*head, *rows]) + "\n"


def filled(text: str, language: Language) -> str:
    """A page with its tables as they must be; each stands between two comments, which stay."""
    return _MARKED.sub(lambda match: f"{match[1]}\n{table(match[2], language)}\n{match[3]}", text)


def main(folder: Path) -> None:
    """Write the tables into the pages of ``folder``."""
    for language in (ENGLISH, chinese()):
        path = folder / language.page
        path.write_text(filled(path.read_text(encoding="utf-8"), language), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
