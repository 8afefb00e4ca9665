"""The commands of the documents that start no servers run as they stand; those of the others: tests/e2e."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.document_runs import check, run, script
from tests.documents import RUNS, Block


@pytest.mark.parametrize("page", [page for page, what in RUNS.items() if what.run and not what.starts_servers])
def test_the_blocks_of_a_page_run_in_order(page: str, tmp_path: Path) -> None:
    """Given a page, when its blocks without a mark run in order in a fresh folder, then each succeeds, prints what
    the page shows, and nothing is left running."""
    check(page, tmp_path)


def test_what_is_left_running_is_noticed(tmp_path: Path) -> None:
    """Given a block that leaves a process behind, when it has run, then that is an error, and the process is gone."""
    with pytest.raises(AssertionError, match="left running"):
        run("sleep 600 & echo $! > pid", tmp_path)
    left = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("text", ["false | cat\n", "echo $NOT_SET_ANYWHERE\n", "test -e of_another_page\n"])
def test_a_block_that_fails_is_noticed(text: str, tmp_path: Path) -> None:
    """Given a block that fails, also in a pipe or by a variable of another page, then the page fails there."""
    blocks = [Block("page", 1, "sh", "true\n"), Block("page", 2, "sh", text), Block("page", 3, "sh", "true\n")]
    code, output = run(script(blocks), tmp_path)
    assert code != 0
    assert output.count("end of block") == 1
