"""docs/troubleshooting.md: each message that it explains is one that the code can print; its numbers are right."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from sglang_fl.bisect.parts import LAYERS
from sglang_fl.bisect.search import most_asked
from sglang_fl.config.fields import FIELD_BY_VARIABLE
from sglang_fl.sglang_hooks.operators.table import known_classes

ROOT = Path(__file__).parents[2]
PAGES = ("docs/troubleshooting.md", "docs/troubleshooting_zh.md")
GAP = "\0"
# Where a text comes from elsewhere: the stand-in is a package of its own.
SOURCES = ("sglang_fl", "standin")


def text_of(node: ast.expr) -> str:
    """A literal; GAP stands for what an f-string puts in, and for what % formats put in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%(\.\d+)?[sdrg]", GAP, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) if isinstance(part, ast.Constant) else GAP for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return GAP


@cache
def literals() -> tuple[str, ...]:
    """Every text in the source."""

    def found() -> Iterator[str]:
        for folder in SOURCES:
            for path in sorted((ROOT / folder).rglob("*.py")):
                nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                yield from (text_of(node) for node in nodes if isinstance(node, ast.expr))

    return tuple(text for text in dict.fromkeys(found()) if text.strip(GAP))


def messages(page: str) -> list[str]:
    """The messages in the first column of the tables below "Messages"."""
    below = re.split(r"^## (?:Messages|报错信息)$", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE)[1]
    rows = [line for line in below.splitlines() if line.startswith("| `")]
    return [message for row in rows for message in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


def occurs(message: str) -> bool:
    """Whether a text of the source has the parts of ``message`` between dots, in order, with a gap between them."""
    parts = [re.escape(part.strip()) for part in message.split("...") if part.strip()]
    pattern = re.compile(f"[^\\w]*{GAP}.*?".join(parts), re.DOTALL)
    return any(pattern.search(text) for text in literals())


@pytest.mark.parametrize("message", messages(PAGES[0]))
def test_a_message_is_one_of_the_code(message: str) -> None:
    """Given a message of the page, then the code can print it."""
    assert occurs(message), f"no text of {SOURCES} has {message!r}"


def test_a_message_that_nobody_prints_is_noticed() -> None:
    """Given a text that is in no source, then the check above fails for it."""
    assert not occurs("the moon is ... made of cheese")
    assert not occurs("a setting is ... wrong.")


def test_both_languages_explain_the_same_messages() -> None:
    """Given both pages, then they have the same messages in the same order."""
    assert messages(PAGES[0]) == messages(PAGES[1])


@pytest.mark.parametrize("page", PAGES)
def test_the_numbers_of_starts_are_the_programs(page: str) -> None:
    """Given the page's table of starts, then its numbers are what the search asks at most."""
    sections = re.split(r"^### ", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    (section,) = (section for section in sections if "`report.json`" in section)
    promised = [int(number) for number in re.findall(r"(?:at most|最多) (\d+)", section)]
    assert promised == [
        most_asked(1 + len(LAYERS)),
        most_asked(len(known_classes())) + 1,
        most_asked(512) + 1,
        most_asked(4) + 1,
    ]


@pytest.mark.parametrize("page", PAGES)
def test_variables_of_ours_exist(page: str) -> None:
    """Given the page, then each variable with our prefix is a setting."""
    text = (ROOT / page).read_text(encoding="utf-8")
    named = set(re.findall(r"\b(?:SGLANG_FL|SGLANG_FLAGGEMS|USE_FLAGGEMS)\w*", text))
    assert named <= set(FIELD_BY_VARIABLE)
