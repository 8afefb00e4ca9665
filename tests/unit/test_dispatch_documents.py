"""docs/operators.md: its tables are the code's, its Python runs, its lines are those that are written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_fl import dispatch
from sglang_fl.cli.frame import COMMANDS
from sglang_fl.dispatch.registry import FUNCTION_OPERATORS, KNOWN_OPERATORS
from sglang_fl.selection import Kind
from sglang_fl.sglang_hooks.operators.table import TABLE

ROOT = Path(__file__).parents[2]
PAGES = ("docs/operators.md", "docs/operators_zh.md")
LIMIT_S = 120.0  # against a hang


def read(page: str) -> str:
    """A page."""
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_the_table_has_every_operator_and_its_class(page: str) -> None:
    """Given the operators and the bridges, then the page's first table has them, and no others."""
    rows = re.findall(r"^\| `(\w+)` \| (\w+)", read(page), flags=re.MULTILINE)
    rows = [(operator, cls) for operator, cls in rows if operator in KNOWN_OPERATORS]
    assert sorted(rows) == sorted((row.op_name, row.name) for row in TABLE)
    assert {operator for operator, _ in rows} == set(KNOWN_OPERATORS)
    assert all(f"`{name}`" in read(page) for name in FUNCTION_OPERATORS)


@pytest.mark.parametrize("page", PAGES)
def test_the_names_in_python_exist(page: str) -> None:
    """Given the table of names, then each is in ``sglang_fl.dispatch``, and the command is one."""
    names = re.findall(r"^\| `(\w+)\(", read(page), flags=re.MULTILINE)
    assert len(names) == 5
    assert all(hasattr(dispatch, name) for name in names)
    assert "explain" in COMMANDS


@pytest.mark.parametrize("page", PAGES)
def test_the_log_lines_are_those_that_are_written(page: str) -> None:
    """Given the page's lines of the log, then they have the form and the kinds of the code."""
    lines = re.findall(r"^\[OOT-DISPATCH\] .*$", read(page), flags=re.MULTILINE)
    found = [re.fullmatch(r"\[OOT-DISPATCH\] (\w+) → (\w+)\(([\w.]+)\)", line) for line in lines]
    assert len(found) == 3
    for match in found:
        assert match is not None
        assert match[1] in {row.name for row in TABLE}
        assert match[2] in set(Kind)


def test_the_comparison_runs() -> None:
    """Given the page's Python with implementations that are here, when run, then it prints the difference."""
    (code,) = re.findall(r"```python\n(.*?)```", read(PAGES[0]), flags=re.DOTALL)
    assert code.count('"flagos"') == 2
    code = code.replace('("reference", "flagos")', '("reference",)').replace('"flagos"', '"reference"')
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "tensor(0.)\n"), done.stderr
