"""Writes the lists of a platform's good and wrong operators, with their origin, into the platform's YAML."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from sglang_fl.aten.sweep.results import Table

GOOD, WRONG = "flagos_verified", "flagos_wrong"
_WIDTH = 110
_MEANING = {
    GOOD: "What profile verified replaces, for the calls that were measured: found right and not slower",
    WRONG: "What profile full leaves to PyTorch: seen to fail or to give wrong values",
}


class ListError(ValueError):
    """The list cannot be written; the message says why."""


def write_list(target: Path, table: Table, table_name: str) -> list[str]:
    """Put the good and the wrong operators of ``table`` into the YAML file ``target``; return the good ones.

    Older lists are replaced, or removed where there is none now.

    Raises:
        ListError: the table holds no good operator.
        OSError: ``target`` cannot be read or written.
    """
    names = table.verified()
    if not names:
        raise ListError("the table holds no operator that is right and not slower: nothing to write")
    text = target.read_text()
    for key, listed in ((GOOD, names), (WRONG, table.wrong())):
        text = _with_block(text, key, _block(key, listed, table, table_name) if listed else "")
    target.write_text(text)
    return names


def _with_block(text: str, key: str, block: str) -> str:
    # The comment lines directly above the key belong to it.
    older = re.search(rf"(?:^#[^\n]*\n)*^{key}:[^\n]*\n(?:^[ \t]+[^\n]*\n)*", text, re.MULTILINE)
    if older is None:
        return text.rstrip("\n") + "\n" + block
    return text[: older.start()] + block + text[older.end() :]


def _block(key: str, names: list[str], table: Table, table_name: str) -> str:
    about = (
        f"{_MEANING[key]} with FlagGems {table.origin['flag_gems']} on {table.origin['card']}, torch "
        f"{table.origin['torch']}; {table_name} has the numbers. Written by aten-sweep --write-list."
    )
    comment = textwrap.fill(about, _WIDTH, initial_indent="# ", subsequent_indent="# ")
    listed = textwrap.fill(", ".join(names), _WIDTH, initial_indent="  ", subsequent_indent="  ")
    return f"{comment}\n{key}: [\n{listed}]\n"
