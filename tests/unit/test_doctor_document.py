"""The page of the tools: its keys, options and numbers are those of the programs, in both languages."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from benchmarks.cluster import command as cluster
from benchmarks.e2e import command as end_to_end
from sglang_fl.cli.doctor import command
from sglang_fl.cli.doctor.report import Report
from sglang_fl.comm import bench, selftest
from sglang_fl.comm.tools import table, tune
from sglang_fl.config.route_type import MAX_ROUTES_PER_OP

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("tools.md", "tools_zh.md")


def read(page: str) -> str:
    """A page's text."""
    return (DOCS / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_the_table_of_keys_is_that_of_the_json(page: str) -> None:
    """Given the doctor's JSON, then the page's table has its keys, in their order, and their fields."""
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)?) \| ", read(page).split("doctor.json")[-1], flags=re.MULTILINE)
    keys = [key for row in rows for key in re.findall(r"\w+", row)]
    content = Report().as_json()
    assert keys[: len(content)] == list(content)
    for name in content["network"]:
        assert f"`{name}`" in read(page)


@pytest.mark.parametrize("page", PAGES)
def test_every_option_that_the_page_names_exists(page: str) -> None:
    """Given the options in the page's text, then one of the programs has each."""
    known = {option for parameter in command.params for option in parameter.opts}
    for parse in (bench.parse, selftest.parse, end_to_end.parse, cluster.parse):
        with pytest.raises(SystemExit), contextlib.redirect_stdout(io.StringIO()) as out:
            parse(["--help"])
        known |= set(re.findall(r"--?[a-z][a-z-]*", out.getvalue()))
    torchruns = {
        "--nproc-per-node",
        "--nnodes",
        "--node-rank",
        "--master-addr",
        "--master-port",
        "--local-addr",
        "--standalone",
    }
    others = {"--help", "--model-path", "--tp", "--dp-size", "--enable-dp-attention", "-m", "-s", "-c"}
    named = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*(?![\w-])", read(page)))
    assert named - known - torchruns - others == set()


@pytest.mark.parametrize("page", PAGES)
def test_the_rules_numbers_are_the_programs(page: str) -> None:
    """Given 5 % and eight routes, then that is what the code has."""
    assert "5 %" in read(page)
    assert (tune.MARGIN, table.CHANGE, MAX_ROUTES_PER_OP) == (0.05, 0.05, 8)
