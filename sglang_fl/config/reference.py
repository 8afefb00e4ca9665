"""Writes sample.yaml from the table of fields: ``python -m sglang_fl.config.reference > sample.yaml``."""

from __future__ import annotations

import sys
import textwrap

from sglang_fl.config.chips import CHIPS
from sglang_fl.config.fields import FIELDS, SECTIONS, Field
from sglang_fl.config.loader import load_settings
from sglang_fl.config.sources import SourceKind

_HEAD = """\
# Every setting of sglang_fl. Copy this file, uncomment what you need, name the copy in SGLANG_FL_CONFIG.
# Per field the strongest source counts: environment variable, this file, the platform's defaults
# (nvidia.yaml, ascend.yaml, cpu.yaml), the default given here. A line that stays a comment leaves its field
# to the weaker sources.
"""


def sample_yaml() -> str:
    """The text of sample.yaml: each field with its meaning, choices, defaults, variable and a value.

    A value that is shown is the default, or an example where the default is "not set". Only ``prefer`` is
    active: a file without any setting is an error, and this one changes nothing.
    """
    parts = [_HEAD]
    for section, title in SECTIONS.items():
        parts.append(f"\n# ==== {title} ====\n")
        fields = [field for field in FIELDS if field.section == section and field.yaml_key is not None]
        parts.extend(_group(fields))
    return "".join(parts)


def _group(fields: list[Field]) -> list[str]:
    parts: list[str] = []
    opened: set[str] = set()
    for field in fields:
        section, nested, key = str(field.yaml_key).rpartition(".")
        if nested and section not in opened:
            opened.add(section)
            parts.append(f"\n#{section}:")
        parts.append(_block(field, key, "  " if nested else ""))
    return parts


def _block(field: Field, key: str, indent: str) -> str:
    prefix = f"#{indent}" if indent else ""
    comment = [*textwrap.wrap(field.doc, 105), *textwrap.wrap(f"Allowed: {field.type.allowed}.", 105)]
    comment.append(f"Default: {defaults_in_words(field)}. Variable: {field.variable}.")
    lines = [f"{prefix}# {line}" for line in comment]
    shown = field.default if has_shown_default(field) else field.type.from_text(field.example)
    value = field.type.to_yaml(shown)
    active = "" if field.name == "ops.prefer" else "#"
    separator = "" if value.startswith("\n") else " "
    setting = f"{indent}{key}:{separator}{value}"
    lines.extend(f"{active}{line}" for line in setting.split("\n"))
    return "\n" + "\n".join(lines) + "\n"


def has_shown_default(field: Field) -> bool:
    """Whether the sample shows a field's default; otherwise it shows the example."""
    return field.default not in (None, ())


# A longer default of a platform is left to its file.
_LONGEST_DEFAULT = 60


def defaults_in_words(field: Field) -> str:
    """The default in words, with what the platforms' files hold instead."""
    words = [field.type.to_text(field.default)]
    for chip in CHIPS:
        settings = load_settings({}, chip.platform)
        if settings.source(field.name).kind is SourceKind.PLATFORM and field.name != "system.platform":
            text = settings.text(field.name)
            shown = text if len(text) <= _LONGEST_DEFAULT else f"the list of {chip.defaults_file}"
            words.append(f"{shown} on {chip.platform}")
    return ", ".join(words)


if __name__ == "__main__":
    sys.stdout.write(sample_yaml())
