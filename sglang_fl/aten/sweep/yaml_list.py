"""Writes the list of a platform's good operators, with its origin, into the platform's YAML."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from sglang_fl.aten.sweep.results import Table

KEY = "flagos_verified"
_WIDTH = 110
# The comment lines directly above the key belong to it.
_BLOCK = re.compile(rf"(?:^#[^\n]*\n)*^{KEY}:[^\n]*\n(?:^[ \t]+[^\n]*\n)*", re.MULTILINE)


class ListError(ValueError):
    """The list cannot be written; the message says why."""


def write_list(target: Path, table: Table, table_name: str) -> list[str]:
    """Put the good operators of ``table`` into the YAML file ``target``, in place of an older list, and return them.

    Raises:
        ListError: the table holds no good operator.
        OSError: ``target`` cannot be read or written.
    """
    names = table.verified()
    if not names:
        raise ListError("the table holds no operator that is right and not slower: nothing to write")
    text = target.read_text()
    block = _block(names, table, table_name)
    replaced, count = _BLOCK.subn(lambda _: block, text, count=1)
    target.write_text(replaced if count else text.rstrip("\n") + "\n" + block)
    return names


def _block(names: list[str], table: Table, table_name: str) -> str:
    about = (
        f"What profile verified replaces: found right and not slower with FlagGems {table.origin['flag_gems']} on "
        f"{table.origin['card']}, torch {table.origin['torch']}; {table_name} has the numbers. "
        "Written by aten-sweep --write-list."
    )
    comment = textwrap.fill(about, _WIDTH, initial_indent="# ", subsequent_indent="# ")
    listed = textwrap.fill(", ".join(names), _WIDTH, initial_indent="  ", subsequent_indent="  ")
    return f"{comment}\n{KEY}: [\n{listed}]\n"
