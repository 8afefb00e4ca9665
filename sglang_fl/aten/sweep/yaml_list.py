"""Writes the lists of a platform's good and wrong operators, with their origin, into the platform's YAML."""

from __future__ import annotations

import shutil
import tempfile
import textwrap
from pathlib import Path

import yaml

from sglang_fl.aten.sweep.results import Table

GOOD, WRONG = "flagos_verified", "flagos_wrong"
_WIDTH = 110
_MEANING = {
    GOOD: "What profile verified replaces, for the calls that were measured: found right and not slower",
    WRONG: "What profile full leaves to PyTorch: seen to fail or to give wrong values",
}
_WRITTEN_BY = "Written by aten-sweep --write-list."


class ListError(ValueError):
    """The list cannot be written; the message says why."""


def write_list(target: Path, table: Table, table_name: str) -> list[str]:
    """Put the good and the wrong operators of ``table`` into the YAML file ``target``; return the good ones.

    Older lists are replaced with the comment that this wrote above them, or removed where there is none now; all else
    stays as it is, and nothing is written that YAML does not read as that.

    Raises:
        ListError: the table holds no good operator, or ``target`` is no YAML mapping in block style.
        OSError: ``target`` cannot be read or written.
    """
    names = table.verified()
    if not names:
        raise ListError("the table holds no operator that is right and not slower: nothing to write")
    lists = {GOOD: names, WRONG: table.wrong()}
    try:
        before = text = target.read_bytes().decode()
        for key, listed in lists.items():
            text = _with_list(text, key, *(_written(key, listed, table, table_name) if listed else ("", "")))
        wanted = {key: value for key, value in (yaml.safe_load(before) or {}).items() if key not in lists}
        if yaml.safe_load(text) != wanted | {key: listed for key, listed in lists.items() if listed}:
            raise ListError("with the lists it would not be the same settings. Write them by hand")
    except (yaml.YAMLError, UnicodeDecodeError, AttributeError) as error:
        raise ListError(f"{target} is no YAML file of settings: {' '.join(str(error).split())}") from error
    except ListError as error:
        raise ListError(f"{target}: {error}; nothing is written") from error
    _replace(target, text)
    return names


def _with_list(text: str, key: str, comment: str, entry: str) -> str:
    """``text`` with ``comment`` and ``entry``, or nothing, in the place of ``key`` and of our own comment above it."""
    newline = "\r\n" if "\r\n" in text else "\n"
    comment, entry = comment.replace("\n", newline), entry.replace("\n", newline)
    span = _span(text, key)
    if span is None:
        gap = newline if entry and text and not text.endswith("\n") else ""
        return text + gap + comment + entry
    start, end = span
    # What stands behind the value, a comment or nothing, stays.
    line_end = text.find("\n", end) + 1 or len(text)
    behind = text[end:line_end]
    if behind.strip() and not behind.lstrip().startswith("#"):
        raise ListError(f"{key} is not alone in its lines. Write it by hand")
    entry = entry.removesuffix(newline) + behind if entry else behind.lstrip()
    older = _own_comment(text, start)
    return text[: older.start] + comment + text[older.stop : start] + entry + text[line_end:]


def _span(text: str, key: str) -> tuple[int, int] | None:
    """Where the line of ``key`` begins and where its value ends; None without it."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is None:
        return None
    if not isinstance(root, yaml.MappingNode) or root.flow_style:
        raise ListError("it is no mapping with a line for each key. Write the lists by hand")
    found = [pair for pair in root.value if pair[0].value == key]
    if not found:
        return None
    (name, value), *more = found
    start = text.rfind("\n", 0, name.start_mark.index) + 1
    is_plain = start == name.start_mark.index and value.start_mark.index >= name.end_mark.index
    if more or not is_plain:
        raise ListError(f"{key} stands there twice, is indented or an alias. Remove it, and call again")
    return start, _end(text, value)


def _end(text: str, node: yaml.Node) -> int:
    """Where a value ends. A block ends for the parser where the next begins, behind the comments between them."""
    is_block = isinstance(node, yaml.CollectionNode) and not node.flow_style
    if is_block and node.value:
        last = node.value[-1]
        return _end(text, last[1] if isinstance(node, yaml.MappingNode) else last)
    end: int = node.end_mark.index
    return len(text[:end].rstrip()) if isinstance(node, yaml.ScalarNode) and node.style in ("|", ">") else end


def _own_comment(text: str, start: int) -> slice:
    """Where an older comment of ours is among the comment lines right above ``start``; empty, there, if none is."""
    places = [start]
    while places[-1]:
        above = text.rfind("\n", 0, places[-1] - 1) + 1
        if not text.startswith("#", above):
            break
        places.append(above)
    for stop in places:
        for begin in places[places.index(stop) + 1 :]:
            words = _bare(text[begin:stop])
            if words.startswith("Whatprofile") and words.endswith(_bare(_WRITTEN_BY)):
                return slice(begin, stop)
    return slice(start, start)


def _bare(comment: str) -> str:
    """A comment without what its wrapping depends on."""
    return "".join(comment.replace("#", " ").split())


def _replace(target: Path, text: str) -> None:
    """Write at once or not at all."""
    real = target.resolve()
    with tempfile.NamedTemporaryFile(dir=real.parent, prefix=f".{real.name}.", delete=False) as file:
        new = Path(file.name)
        try:
            file.write(text.encode())
            file.flush()
            shutil.copymode(real, new)
            new.replace(real)
        except BaseException:
            new.unlink()
            raise


def _written(key: str, names: list[str], table: Table, table_name: str) -> tuple[str, str]:
    """The comment and the lines of the list."""
    about = (
        f"{_MEANING[key]} with FlagGems {table.origin['flag_gems']} on {table.origin['card']}, torch "
        f"{table.origin['torch']}; {table_name} has the numbers. {_WRITTEN_BY}"
    )
    comment = textwrap.fill(about, _WIDTH, initial_indent="# ", subsequent_indent="# ")
    listed = textwrap.fill(", ".join(names), _WIDTH, initial_indent="  ", subsequent_indent="  ")
    return f"{comment}\n", f"{key}: [\n{listed}]\n"
