"""SGLANG_FLAGGEMS_RECORD without FlagGems: files that cannot be written, a disk that is full, calls that are tried."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sglang_fl.aten import records
from sglang_fl.aten.gems import Entry
from sglang_fl.aten.launches import try_out
from sglang_fl.config import load_settings
from sglang_fl.plugin import check_files

OPERATORS = logging.getLogger("flag_gems.ops.add")
GEMS = logging.getLogger(records.GEMS_LOGGER)


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """FlagGems' loggers as they were before the test."""
    before = GEMS.level, GEMS.propagate, list(GEMS.handlers)
    yield
    for handler in set(GEMS.handlers) - set(before[2]):
        GEMS.removeHandler(handler)
        handler.close()
    GEMS.setLevel(before[0])
    GEMS.propagate = before[1]


@pytest.mark.parametrize("kind", ["missing/x.txt", ".", "file/x.txt", "/"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, kind: str, rank: int) -> None:
    """Given a missing folder, a folder, a file in a folder's place, or no file's name, then the error names it."""
    (tmp_path / "file").touch()
    path = tmp_path / kind
    if kind == "." and rank == 1:
        path.with_name(f"{path.name}.rank1").mkdir()
    with pytest.raises(records.RecordError, match=str(path)):
        records.start(path, rank, True, [])
    assert not GEMS.handlers


def test_flag_gems_own_file_in_a_home_that_is_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given no path, and a home that is a file, then the error names FlagGems' file in it."""
    (tmp_path / "home").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with pytest.raises(records.RecordError, match=r"home/\.flaggems/oplist\.log"):
        records.start(None, 0, True, [])


@pytest.mark.parametrize("more", [{"SGLANG_FLAGGEMS_RECORD": "1"}, {}, {"USE_FLAGGEMS": "0"}])
def test_a_server_is_not_refused_for_it(tmp_path: Path, more: dict[str, str]) -> None:
    """Given a path in a missing folder, with recording on, off, or the layer off, then the settings are accepted."""
    check_files(load_settings({"SGLANG_FLAGGEMS_LOG_PATH": str(tmp_path / "missing" / "x.txt"), **more}, "cpu"))


def test_a_full_disk_ends_the_record_with_one_warning(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Given a disk that is full, when calls are recorded, then one warning, and FlagGems' loggers are as before."""
    before = GEMS.level, GEMS.propagate
    records.start(Path("/dev/full"), 0, False, [])
    assert OPERATORS.isEnabledFor(logging.DEBUG)
    with caplog.at_level(logging.WARNING, "sglang_fl.aten"):
        for _ in range(3):
            OPERATORS.debug("GEMS ADD")
    (warning,) = (record.getMessage() for record in caplog.records if record.name == "sglang_fl.aten")
    assert "not recorded from here on: /dev/full cannot be written: [Errno 28]" in warning
    assert not GEMS.handlers
    assert (GEMS.level, GEMS.propagate) == before
    assert "Logging error" not in capsys.readouterr().err


def test_a_call_that_is_only_tried_is_not_recorded(tmp_path: Path) -> None:
    """Given every call recorded, when a function is tried and then called twice, then two lines are written."""

    def add(tensor: torch.Tensor) -> torch.Tensor:
        OPERATORS.debug("GEMS ADD")
        return tensor + 1

    target = records.start(tmp_path / "x.txt", 0, False, [Entry("add.Tensor", "add", add)])
    with records.rehearsal():
        try_out(add, [torch.ones(2)], {}, [])
    add(torch.ones(2))
    add(torch.ones(2))
    assert len(target.read_text().splitlines()) == 2
