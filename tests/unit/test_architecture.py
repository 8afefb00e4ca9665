"""docs/architecture.md is true of the code: imports go down its floors, and SGLang is imported where it says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from tests.documents import ROOT, read

PACKAGE = ROOT / "sglang_fl"
PAGES = ("docs/architecture.md", "docs/architecture_zh.md")
WITH_SGLANG = {"sglang_hooks", "plugin", "platform", "cli", "testing"}
WITH_TESTING = {"cli", "bisect", "testing"}
LAYERS = {"comm", "dispatch", "aten"}
APART = ("testing", "__init__", "__main__")  # no floor: the tests' helpers, and the package's two ways in


def floors(page: str) -> dict[str, int]:
    """Part to floor, by the page's table."""
    rows = re.findall(r"^\| (\d) \| ([^|]*) \|", read(page), flags=re.MULTILINE)
    return {part: int(floor) for floor, names in rows for part in re.findall(r"`([\w.]+)`", names)}


def part_of(module: str, floor_of: dict[str, int]) -> str:
    """The part of a module of the package, such as ``comm.backends`` for sglang_fl.comm.backends.flagcx.types."""
    parts = module.split(".")[1:]
    candidates = [".".join(parts[:length]) for length in (2, 1)]
    return next((name for name in candidates if name in floor_of), parts[0] if parts else "__init__")


def modules(node: ast.AST) -> list[str]:
    """What an import statement may import: each name of ``from x import y`` may be a module of x."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


@cache
def imports() -> tuple[tuple[str, str], ...]:
    """Every import of the package, also inside functions: the importing module and the imported."""

    def found() -> Iterator[tuple[str, str]]:
        for path in sorted(PACKAGE.rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                yield from ((module, name) for name in modules(node))

    return tuple(found())


def upward(floor_of: dict[str, int], pairs: tuple[tuple[str, str], ...]) -> list[str]:
    """The imports that do not go down."""
    wrong = []
    for module, name in pairs:
        if not name.startswith("sglang_fl."):
            continue
        here, there = part_of(module, floor_of), part_of(name, floor_of)
        if here in APART or there in (here, *APART) or there not in floor_of:
            continue
        layers = {here.partition(".")[0], there.partition(".")[0]}
        if floor_of[there] > floor_of[here] or (len(layers) == 2 and layers < LAYERS):
            wrong.append(f"{module} imports {name}: {here} is on floor {floor_of[here]}, {there} on {floor_of[there]}")
    return wrong


def test_every_part_has_a_floor() -> None:
    """Given the package, then each file and folder directly in it is on a floor of the page, or stands apart."""
    names = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert names - set(APART) == {part for part in floors(PAGES[0]) if "." not in part} - {"_flagcx"}


def test_imports_go_down() -> None:
    """Given all imports of the package, then none goes up, and the three layers do not know each other."""
    assert upward(floors(PAGES[0]), imports()) == []


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("sglang_fl.comm.policy", "sglang_fl.dispatch.types"),
        ("sglang_fl.comm.backends.flagcx.backend", "sglang_fl.comm.communicator"),
        ("sglang_fl.selection.select", "sglang_fl.comm.types"),
        ("sglang_fl.dispatch.manager", "sglang_fl.plugin"),
    ],
)
def test_an_import_that_goes_up_is_noticed(module: str, name: str) -> None:
    """Given an import that is not allowed, then the check above names it."""
    assert len(upward(floors(PAGES[0]), ((module, name),))) == 1


def test_sglang_is_imported_where_the_page_says() -> None:
    """Given all imports of the package, then SGLang's and ``testing``'s are in the floor_of that may have them."""
    floor_of = floors(PAGES[0])
    with_sglang = {part_of(module, floor_of) for module, name in imports() if name.partition(".")[0] == "sglang"}
    with_testing = {part_of(module, floor_of) for module, name in imports() if name.startswith("sglang_fl.testing")}
    assert with_sglang <= WITH_SGLANG
    assert with_testing <= WITH_TESTING


def test_both_languages_have_the_same_floors() -> None:
    """Given both pages, then their tables put the same floor_of on the same floors."""
    assert floors(PAGES[0]) == floors(PAGES[1])
