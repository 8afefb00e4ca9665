"""SGLANG_FL_DISPATCH_LOG: the lines of the public documents, by one process, by several ranks, and by none."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_fl.config import load_settings
from sglang_fl.dispatch import configure, dispatch_log, policy
from sglang_fl.testing.ranks import RankContext, run_ranks
from tests.unit.dispatch_cases import Counted

# The public documents' form: class → kind(implementation).
LINE = re.compile(r"\[OOT-DISPATCH\] \w+ → (flagos|vendor|reference)\([\w.]+\)")


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Configure this process for a file of that name in an empty folder; afterwards it is as before."""
    monkeypatch.setattr(policy, "_settings", None)
    monkeypatch.setattr(policy, "_process_policy", None)

    def configure_for(name: str) -> Path:
        path = tmp_path / name
        configure(load_settings({"SGLANG_FL_DISPATCH_LOG": str(path)}))
        return path

    yield configure_for
    policy.forget_resolved()


def test_each_class_and_implementation_is_a_line(configured: Callable[[str], Path]) -> None:
    """Given layers that are bound, then the lines of the public documents, one for each class and implementation."""
    path = configured("dispatch.log")
    for _ in range(3):
        dispatch_log.write("SiluAndMul", Counted("flagos").impl)
        dispatch_log.write("RMSNorm", Counted("vendor.nvidia").impl)
    dispatch_log.write("RMSNorm", Counted("reference").impl)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines == [
        "[OOT-DISPATCH] SiluAndMul → flagos(flagos)",
        "[OOT-DISPATCH] RMSNorm → vendor(vendor.nvidia)",
        "[OOT-DISPATCH] RMSNorm → reference(reference)",
    ]
    assert all(LINE.fullmatch(line) for line in lines)


def test_a_file_that_is_there_is_continued(configured: Callable[[str], Path]) -> None:
    """Given a file of an earlier server, then its lines stay."""
    path = configured("dispatch.log")
    path.write_text("an earlier server\n")
    dispatch_log.write("RMSNorm", Counted("reference").impl)
    assert path.read_text().splitlines()[0] == "an earlier server"
    assert len(path.read_text().splitlines()) == 2


def test_without_the_setting_nothing_is_written(
    tmp_path: Path, configured: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given no file, then none appears."""
    monkeypatch.chdir(tmp_path)
    configure(load_settings({}))
    dispatch_log.write("RMSNorm", Counted("reference").impl)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_an_error_in_the_log_and_not_more(
    configured: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Given a folder that does not exist, when layers are bound, then one line names file and cause."""
    path = configured("nowhere/dispatch.log")
    with caplog.at_level(logging.ERROR, "sglang_fl"):
        dispatch_log.write("RMSNorm", Counted("reference").impl)
        dispatch_log.write("SiluAndMul", Counted("reference").impl)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"[sglang_fl] SGLANG_FL_DISPATCH_LOG: {path} cannot be written: [Errno 2]")


def write_as_rank(context: RankContext, path: str, lines: int) -> int:
    """In a rank's process: bind ``lines`` classes of layers."""
    configure(load_settings({"SGLANG_FL_DISPATCH_LOG": path}))
    for number in range(lines):
        dispatch_log.write(f"Layer{number}", Counted("reference").impl)
    return os.getpid()


def test_rank_0_writes_the_file_and_the_others_their_own(tmp_path: Path) -> None:
    """Given three ranks of one server, then rank 0 writes the named file and rank N the one with .rankN behind it."""
    path = tmp_path / "dispatch.log"
    assert len(set(run_ranks(write_as_rank, 3, str(path), 2))) == 3
    expected = [f"[OOT-DISPATCH] Layer{number} → reference(reference)" for number in range(2)]
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "dispatch.log",
        "dispatch.log.rank1",
        "dispatch.log.rank2",
    ]
    for file in tmp_path.iterdir():
        assert file.read_text().splitlines() == expected, file


def test_processes_without_ranks_share_the_file_line_by_line(tmp_path: Path) -> None:
    """Given servers of one rank each that write the same file at once, then every line is whole."""
    path = tmp_path / "dispatch.log"
    run_ranks(write_as_rank, 4, str(path), 300, gloo=False)
    lines = path.read_text().splitlines()
    assert len(lines) == 1200
    assert all(LINE.fullmatch(line) for line in lines)
