"""Which backend a group gets: by the settings, by vendor rules, in strict mode, and why it got no other."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pytest
import torch

from sglang_fl.comm.errors import AgreementError
from sglang_fl.config import SettingsError
from sglang_fl.testing.ranks import RankContext, run_ranks
from tests.distributed.groups import call_everything, communicator_of_all

CHIP = '''
"""A vendor's backend, as a distribution of its own brings it."""
from sglang_fl.comm.backends.torch_dist import TorchBackend
from sglang_fl.selection import Kind

def register_comm(registry):
    registry.register(TorchBackend("chip_collectives", Kind.VENDOR, vendor="chipmaker"))
'''


@pytest.fixture
def chip(tmp_path: Path) -> Path:
    """A folder with an installed distribution whose entry point brings a vendor's backend that works on the CPU."""
    package, info = tmp_path / "chip_package", tmp_path / "chip_package-1.0.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").write_text('"""A chip."""\n')
    (package / "register_comm.py").write_text(CHIP)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: chip-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sglang_fl.comm]\nchip = chip_package.register_comm:register_comm\n")
    return tmp_path


def _selected(context: RankContext, folder: str | None = None) -> tuple[str, dict[str, str]]:
    if folder is not None:
        sys.path.insert(0, folder)
    communicator = communicator_of_all(context)
    call_everything(communicator)
    communicator.destroy()
    return communicator.backend, {entry.impl_id: entry.reason for entry in communicator.agreed.selection.passed_over}


# FLAGCX_PATH and SGLANG_FL_DIST_BACKEND with the backend that follows; "right" is hostcx, "wrong" a folder without it.
SELECTIONS = [
    (None, None, "torch"),
    ("", None, "torch"),
    ("right", None, "flagcx"),
    ("wrong", None, "torch"),
    (None, "auto", "torch"),
    ("right", "auto", "flagcx"),
    ("right", "torch", "torch"),
    ("right", "nccl", "torch"),
    ("right", "hccl", "torch"),
    ("right", "flagcx", "flagcx"),
    ("wrong", "flagcx", "torch"),
    (None, "flagcx", "torch"),
    ("right", "", "flagcx"),
]


@pytest.mark.parametrize(("path", "selected", "expected"), SELECTIONS)
def test_settings_select_the_backend(
    path: str | None, selected: str | None, expected: str, hostcx: Path, tmp_path: Path
) -> None:
    """Given FLAGCX_PATH and SGLANG_FL_DIST_BACKEND, when CPU ranks make a communicator, then the group reports the
    backend that it has, whose operations are right, and a reason for every other one; empty counts as unset."""
    paths = {"right": str(hostcx), "wrong": str(tmp_path)}
    environment = {
        "FLAGCX_PATH": path if path is None else paths.get(path, path),
        "SGLANG_FL_DIST_BACKEND": selected,
        "LD_LIBRARY_PATH": None,
    }
    for backend, reasons in run_ranks(_selected, 2, env=environment):
        assert backend == expected
        assert all(reasons.values()), reasons
        if path == "wrong" and selected != "torch":
            assert f"FLAGCX_PATH is the folder {tmp_path}, which has no library" in reasons["flagcx"]


def _typo(context: RankContext) -> str:
    with pytest.raises(SettingsError) as raised:
        communicator_of_all(context)
    return str(raised.value)


def test_a_typo_names_the_choices() -> None:
    """Given a backend that does not exist, when the ranks make a communicator, then all get an error with the
    choices."""
    texts = run_ranks(_typo, 2, env={"SGLANG_FL_DIST_BACKEND": "flagcxx"})
    for text in texts:
        assert "flagcxx" in text and all(name in text for name in ("auto", "flagcx", "nccl", "hccl", "torch"))


def test_an_installed_distribution_brings_a_backend(chip: Path) -> None:
    """Given a distribution with an entry point in sglang_fl.comm, when the ranks choose by themselves, then the
    vendor's backend comes before torch."""
    for backend, reasons in run_ranks(_selected, 2, str(chip), env={"SGLANG_FL_DIST_BACKEND": "auto"}):
        assert backend == "chip_collectives"
        assert reasons["torch"] == "chip_collectives comes first"


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("SGLANG_FL_DENY_VENDORS", "chipmaker", "vendor chipmaker is denied"),
        ("SGLANG_FL_ALLOW_VENDORS", "nvidia", "vendor chipmaker is not among the allowed: nvidia"),
    ],
)
def test_vendor_rules_govern_communication(variable: str, value: str, reason: str, chip: Path) -> None:
    """Given a vendor that is denied or not among the allowed, on one rank or on all, when the ranks agree, then all
    take the next backend and say why."""
    for ranks, where in (((0, 1), "all ranks"), ((1,), "global rank 1")):
        ruled = {"SGLANG_FL_DIST_BACKEND": "auto", variable: value}
        environments = [ruled if rank in ranks else {"SGLANG_FL_DIST_BACKEND": "auto"} for rank in (0, 1)]
        found = run_ranks(_selected, 2, str(chip), env=environments.__getitem__)
        for backend, reasons in found:
            assert backend == "torch"
            assert reasons["chip_collectives"] == f"{where}: {reason}"


def test_an_allowed_vendor_is_used(chip: Path) -> None:
    """Given a list of allowed vendors, when a backend is one of theirs, then it is used."""
    environment = {"SGLANG_FL_ALLOW_VENDORS": "nvidia,chipmaker", "SGLANG_FL_DIST_BACKEND": "auto"}
    assert [backend for backend, _ in run_ranks(_selected, 2, str(chip), env=environment)] == ["chip_collectives"] * 2


def test_one_rank_with_a_wrong_path(hostcx: Path, tmp_path: Path) -> None:
    """Given one rank whose FLAGCX_PATH is wrong, when the ranks agree, then all take the next backend together, and
    each says which rank could not and why."""
    wrong = str(tmp_path / "nothing")
    found = run_ranks(_selected, 3, env=lambda rank: {"FLAGCX_PATH": wrong if rank == 2 else str(hostcx)})
    for backend, reasons in found:
        assert backend == "torch"
        assert reasons["flagcx"].startswith("global rank 2: ")
        assert f"FLAGCX_PATH is {wrong}, which does not exist" in reasons["flagcx"]


def _strict(context: RankContext) -> str:
    with pytest.raises(AgreementError) as raised:
        communicator_of_all(context)
    return str(raised.value)


def test_strict_mode_forbids_the_next_one(hostcx: Path, tmp_path: Path) -> None:
    """Given SGLANG_FL_STRICT=1 and one rank that cannot, when the ranks agree, then all raise the same error, which
    names group, rank, reason and what to do."""
    wrong = str(tmp_path / "nothing")
    texts = run_ranks(
        _strict,
        3,
        env=lambda rank: {"FLAGCX_PATH": wrong if rank == 1 else str(hostcx), "SGLANG_FL_STRICT": "1"},
    )
    assert texts == [texts[0]] * 3
    for part in ("group tp:0", "flagcx: global rank 1: ", wrong, "Strict mode allows only the first choice"):
        assert part in texts[0]


def test_strict_mode_with_what_works(hostcx: Path) -> None:
    """Given SGLANG_FL_STRICT=1, when the first choice works on all ranks, then it is used."""
    environment = {"FLAGCX_PATH": str(hostcx), "SGLANG_FL_STRICT": "1"}
    assert [backend for backend, _ in run_ranks(_selected, 2, env=environment)] == ["flagcx"] * 2


def _differs(context: RankContext) -> str:
    with pytest.raises(AgreementError) as raised:
        communicator_of_all(context)
    return str(raised.value)


@pytest.mark.parametrize(
    ("variable", "values"),
    [
        ("SGLANG_FL_DIST_BACKEND", ("torch", "auto")),
        ("SGLANG_FL_DIST_BACKEND", ("flagcx", "torch")),
        ("SGLANG_FL_STRICT", ("1", "0")),
    ],
)
def test_different_settings_are_one_error(variable: str, values: tuple[str, str], hostcx: Path) -> None:
    """Given ranks with different settings, when they make a communicator, then all raise the same error, which names
    what each has."""
    texts = run_ranks(
        _differs, 2, env=lambda rank: {"FLAGCX_PATH": str(hostcx), variable: values[rank]}, timeout_s=30.0
    )
    assert texts[0] == texts[1]
    assert "group tp:0" in texts[0] and "global rank 0 has" in texts[0] and "global rank 1 has" in texts[0]


def _ranks_in_environment(context: RankContext) -> list[int]:
    os.environ["RANK"] = "9"  # what a launcher says of the process is not what the group says
    communicator = communicator_of_all(context)
    return communicator.all_gather(torch.tensor([communicator.rank_in_group])).tolist()  # type: ignore[union-attr]


def test_the_groups_ranks_count(backend: dict[str, str]) -> None:
    """Case 6. Given RANK=9 in the environment, when ranks make a communicator, then the group's own ranks count."""
    assert run_ranks(_ranks_in_environment, 2, env=backend) == [[0, 1], [0, 1]]


def _told(context: RankContext) -> list[str]:
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Lines()
    logging.getLogger("sglang_fl").addHandler(handler)
    logging.getLogger("sglang_fl").setLevel(logging.INFO)
    communicator_of_all(context)
    return lines


def test_a_passed_over_choice_is_told(hostcx: Path, tmp_path: Path) -> None:
    """Given one rank that cannot use what was asked for, when all take the next backend, then it is said once, with
    the rank and the reason: nothing is silent."""
    wrong = str(tmp_path / "nothing")
    found = run_ranks(_told, 2, env=lambda rank: {"FLAGCX_PATH": wrong if rank else str(hostcx)})
    told = [line for lines in found for line in lines if "flagcx" in line and "global rank 1" in line]
    assert len(told) == 1 and wrong in told[0], found
