"""The platforms' lists of verified operators against the stored tables that they come from."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from sglang_fl.aten.layer import STORED_TABLES
from sglang_fl.aten.sweep.forms import form_of_text
from sglang_fl.aten.sweep.results import ALLOWED_RATIO, Table
from sglang_fl.aten.sweep.timing import NOT_TIMED
from sglang_fl.config import CHIPS, load_settings
from sglang_fl.config.loader import CONFIG_DIR

PLATFORMS = {chip.defaults_file: chip.platform for chip in CHIPS if chip.defaults_file}


@pytest.mark.parametrize("defaults_file", sorted(PLATFORMS))
def test_a_list_is_what_its_table_found_good(defaults_file: str) -> None:
    """Given a platform's YAML, then its lists are its table's good and wrong operators; without a table it has none."""
    aten = load_settings({}, PLATFORMS[defaults_file]).aten
    table_file = STORED_TABLES.get(defaults_file)
    if table_file is None or not table_file.exists():
        assert not aten.verified and not aten.wrong, f"{defaults_file} has lists without a table: aten-sweep makes both"
        return
    table = Table.read(table_file)
    found = list(aten.verified), list(aten.wrong)
    assert found == (table.verified(), table.wrong()), f"aten-sweep --write-list {defaults_file} --table {table_file}"
    comment = " ".join((CONFIG_DIR / defaults_file).read_text().replace("#", " ").split())
    for name in ("flag_gems", "card"):
        assert table.origin[name] in comment


def test_the_stored_verdicts_are_those_of_the_rule() -> None:
    """Given the stored tables, then their column of reasons is what their own numbers give."""
    for table_file in STORED_TABLES.values():
        if not table_file.exists():
            continue
        table = Table.read(table_file)
        verified, taken = set(table.verified()), 0
        for row, result in zip(rows(table_file), table.results, strict=True):
            assert row["excluded_because"] == result.verdict()
            if result.function in verified and table.forms().take(form_of_text(result.call)):
                assert result.how == NOT_TIMED or result.ratio <= ALLOWED_RATIO
                assert result.gems_error <= result.allowed_error
                taken += 1
        assert taken > 0


def test_every_table_belongs_to_a_platform() -> None:
    """Given the tables, then each is named for a platform's YAML that exists."""
    assert STORED_TABLES.keys() <= PLATFORMS.keys()


def rows(path: Path) -> list[dict[str, str]]:
    """The lines of a table as they are written."""
    with path.open(newline="") as file:
        file.readline()
        return list(csv.DictReader(file))
