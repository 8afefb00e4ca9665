"""The commands of the documents that start servers run as they stand; those of the others: tests/distributed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.document_runs import check
from tests.documents import RUNS


@pytest.mark.parametrize("page", [page for page, what in RUNS.items() if what.starts_servers])
def test_the_blocks_of_a_page_run_in_order(page: str, tmp_path: Path) -> None:
    """Given a page, when its blocks without a mark run in order in a fresh folder, then each succeeds, prints what
    the page shows, and nothing is left running."""
    check(page, tmp_path)
