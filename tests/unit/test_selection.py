"""Selection: order by policy, the first usable wins, every other candidate keeps its reason."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from sglang_fl.selection import (
    Availability,
    Candidate,
    Kind,
    Policy,
    SelectionError,
    discover_entry_points,
    discover_folders,
    select,
)


def candidate(name: str, kind: Kind, reason: str = "", vendor: str = "", priority: int = 0) -> Candidate:
    """One that is available, or not for ``reason``."""
    availability = Availability.no(reason) if reason else Availability.yes()
    return Candidate(name, kind, lambda: availability, vendor=vendor, priority=priority)


FLAGCX = candidate("flagcx", Kind.FLAGOS)
NO_FLAGCX = candidate("flagcx", Kind.FLAGOS, "no library")
NCCL = candidate("nccl", Kind.VENDOR, vendor="nvidia")
TORCH = candidate("torch", Kind.REFERENCE)


@pytest.mark.parametrize(
    ("policy", "candidates", "chosen"),
    [
        (Policy(), [TORCH, NCCL, FLAGCX], "flagcx"),
        (Policy(prefer=Kind.VENDOR), [TORCH, NCCL, FLAGCX], "nccl"),
        (Policy(prefer=Kind.REFERENCE), [TORCH, NCCL, FLAGCX], "torch"),
        (Policy(), [TORCH, NCCL, NO_FLAGCX], "nccl"),
        (Policy(deny_vendors=frozenset({"nvidia"})), [TORCH, NCCL, NO_FLAGCX], "torch"),
        (Policy(allow_vendors=frozenset({"ascend"})), [TORCH, NCCL, NO_FLAGCX], "torch"),
        (Policy(allow_vendors=frozenset({"nvidia"})), [TORCH, NCCL, NO_FLAGCX], "nccl"),
        (Policy(per_item={"x": ("reference",)}), [TORCH, NCCL, FLAGCX], "torch"),
        (Policy(per_item={"x": ("vendor:nvidia", "flagos")}), [TORCH, NCCL, FLAGCX], "nccl"),
        (Policy(per_item={"y": ("reference",)}), [TORCH, NCCL, FLAGCX], "flagcx"),
    ],
)
def test_the_first_usable_of_the_policys_order_is_chosen(
    policy: Policy, candidates: list[Candidate], chosen: str
) -> None:
    """Given candidates and a policy, when one is selected, then it is the first usable in the policy's order."""
    selection = select("x", candidates, policy)
    assert selection.chosen is not None and selection.chosen.impl_id == chosen
    assert {entry.impl_id for entry in selection.passed_over} == {c.impl_id for c in candidates} - {chosen}


def test_priority_breaks_ties_and_names_break_equal_priorities() -> None:
    """Given two of one kind, when selected, then the higher priority wins, and the name among equals."""
    low, high = candidate("a", Kind.VENDOR, priority=1), candidate("b", Kind.VENDOR, priority=2)
    assert select("x", [low, high], Policy()).chosen is high
    twin = candidate("c", Kind.VENDOR, priority=2)
    assert select("x", [twin, high], Policy()).chosen is high


def test_every_passed_over_candidate_has_its_reason() -> None:
    """Given an unusable, a denied and an unnamed candidate, when selected, then each reason is told."""
    policy = Policy(per_item={"x": ("flagos", "vendor", "torch")}, deny_vendors=frozenset({"nvidia"}))
    other = candidate("other", Kind.REFERENCE)
    text = select("x", [NO_FLAGCX, NCCL, TORCH, other], policy).explain()
    assert text.splitlines()[0] == "x: torch"
    assert "not flagcx: no library" in text
    assert "not nccl: vendor nvidia is denied" in text
    assert "not other: not named by the order flagos, vendor, torch" in text


def test_strict_forbids_any_but_the_first_choice() -> None:
    """Given strict mode and an unusable first choice, when selected, then the error names it and the reason."""
    with pytest.raises(SelectionError, match=r"strict mode.*flagcx.*no library"):
        select("x", [NO_FLAGCX, TORCH], Policy(strict=True))
    assert select("x", [FLAGCX, TORCH], Policy(strict=True)).chosen is FLAGCX


def test_nothing_available_says_so() -> None:
    """Given no usable candidate, when selected, then the message begins as the documents promise."""
    with pytest.raises(SelectionError, match=r"^No available implementation for x: nothing"):
        select("x", [NO_FLAGCX], Policy())


def _write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package with a good backend, one nested deeper, one that fails to import and one without the function."""
    for folder in ("chips", "chips/good", "chips/vendor", "chips/vendor/deep", "chips/broken", "chips/empty"):
        _write(tmp_path, f"{folder}/__init__.py", "")
    _write(tmp_path, "chips/good/register_comm.py", "def register_comm(registry): registry.append('good')")
    _write(tmp_path, "chips/vendor/deep/register_comm.py", "def register_comm(registry): registry.append('deep')")
    _write(tmp_path, "chips/broken/register_comm.py", "import no_such_sdk")
    _write(tmp_path, "chips/empty/register_comm.py", "")
    monkeypatch.syspath_prepend(tmp_path)
    import chips  # type: ignore[import-not-found]  # written above

    found: ModuleType = chips
    yield found  # type: ignore[misc]  # a generator fixture
    for name in [name for name in sys.modules if name.split(".")[0] == "chips"]:
        del sys.modules[name]


def test_folders_are_discovered_and_a_broken_one_costs_only_itself(package: ModuleType) -> None:
    """Given backends in folders, when discovered, then the good ones register and the others keep their error."""
    found = {entry.name: entry for entry in discover_folders(package, "register_comm", "register_comm")}
    registered: list[str] = []
    for entry in found.values():
        if entry.register is not None:
            entry.register(registered)
    assert sorted(registered) == ["deep", "good"]
    assert "no_such_sdk" in found["broken"].error
    assert "AttributeError" in found["empty"].error


def test_installed_distributions_are_discovered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a distribution with an entry point, when discovered, then it is found by the entry point's name."""
    _write(tmp_path, "my_chip_comm.py", "def register_comm(registry): registry.append('my_chip')")
    _write(tmp_path, "my_chip-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: my-chip\nVersion: 1.0\n")
    _write(tmp_path, "my_chip-1.0.dist-info/entry_points.txt", "[test.comm]\nmy_chip = my_chip_comm:register_comm\n")
    monkeypatch.syspath_prepend(tmp_path)
    (entry,) = discover_entry_points("test.comm")
    registered: list[str] = []
    assert entry.register is not None
    entry.register(registered)
    assert (entry.name, registered) == ("my_chip", ["my_chip"])
