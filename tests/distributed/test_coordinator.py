"""SGLang's own groups with the plugin: each method by keyword keeps its contract, and which backend carries a group."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.coordinator_cases import CASES
from tests.distributed.coordinator_program import ROOT, ask

PAGE = ROOT / "docs/communication.md"
TABLE_TITLE = "### FLAGCX_PATH and SGLANG_FL_DIST_BACKEND on a CPU"
TYPO = "flagcxx"
PATHS = ("unset or empty", "right", "wrong")
BACKENDS = ("unset or empty", "auto", "flagcx", "nccl", "hccl", "torch", TYPO)
Cell = tuple[str, str]  # backend, path
# Beside the matrix of what is unset: the same cell with what is empty.
EMPTY: Mapping[str, Mapping[str, str]] = {
    "empty path": {"FLAGCX_PATH": ""},
    "empty backend": {"SGLANG_FL_DIST_BACKEND": ""},
    "both empty": {"FLAGCX_PATH": "", "SGLANG_FL_DIST_BACKEND": ""},
}
# Where nothing of the environment is set.
HOOKED: Mapping[str, Mapping[str, str]] = {
    "cuda": {"SGLANG_FL_PLATFORM": "cuda"},
    "cuda with torch": {"SGLANG_FL_PLATFORM": "cuda", "SGLANG_FL_DIST_BACKEND": "torch"},
    "cuda with a path": {"SGLANG_FL_PLATFORM": "cuda", "FLAGCX_PATH": "/nonexistent"},
    "cpu": {},
}


def _environments(hostcx: Path, empty: Path) -> dict[str, dict[str, str]]:
    """The matrix of the page, and what is empty: "backend | path" to the environment."""
    folders = {"right": str(hostcx), "wrong": str(empty)}

    def environment(backend: str, path: str) -> dict[str, str]:
        chosen = {} if backend == "unset or empty" else {"SGLANG_FL_DIST_BACKEND": backend}
        return chosen if path == "unset or empty" else {**chosen, "FLAGCX_PATH": folders[path]}

    matrix = {f"{backend} | {path}": environment(backend, path) for backend, path in product(BACKENDS, PATHS)}
    return {**matrix, **{name: dict(values) for name, values in EMPTY.items()}}


@pytest.fixture(scope="module")
def answer(hostcx: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process with SGLang found out, with ranks forked from it."""
    folder = tmp_path_factory.mktemp("coordinator")
    return ask({"calls": True, "selection": _environments(hostcx, folder), "hooked": HOOKED})


def test_every_method_is_called(answer: dict[str, Any]) -> None:
    """Given the installed SGLang, then the cases name all of its methods, or say why not."""
    assert answer["calls"]["names"] == answer["calls"]["called"]
    assert [found["carried by"] for found in answer["calls"]["plugin"]] == ["torch", "torch"]
    assert [found["carried by"] for found in answer["calls"]["native"]] == [None, None]


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_a_method_by_keyword_keeps_its_contract(name: str, answer: dict[str, Any]) -> None:
    """Given all parameters by SGLang's own names, then values, kind and what changed in place are as SGLang's own; or,
    where SGLang alone cannot do it on a CPU, as the sum and the order of the ranks say."""
    calls = answer["calls"]
    for rank in range(2):
        got, native = calls["plugin"][rank][name], calls["native"][rank][name]
        expected = calls["expected"][rank].get(name)
        assert "error" not in got
        assert ("error" in native) == (expected is not None), native
        assert got == (native if expected is None else expected)


def _promised() -> dict[Cell, str]:
    """The page's table: the backend in use, or ``error``. "the same" is what stands to the left."""
    lines = PAGE.read_text().split(TABLE_TITLE)[1].splitlines()
    table = [line for line in lines if line.startswith("|")][: 2 + len(BACKENDS)]
    found: dict[Cell, str] = {}
    for line in table[2:]:
        head, *cells = [cell.strip(" *`") for cell in line.strip("|").split("|")]
        backend = "unset or empty" if head.endswith("unset or empty") else head
        for path, cell in zip(PATHS, cells, strict=True):
            word = re.split("[;:]", cell)[0]
            found[backend, path] = found[backend, PATHS[PATHS.index(path) - 1]] if word == "the same" else word
    assert list(found) == list(product(BACKENDS, PATHS))
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_documented_backend_carries_each_group(backend: str, answer: dict[str, Any]) -> None:
    """Given FLAGCX_PATH and SGLANG_FL_DIST_BACKEND, when SGLang makes its groups on a CPU, then each is carried by
    the backend that the page's table names, and a choice that was passed over is reported with its reason."""
    promised = _promised()
    for path in PATHS:
        found = answer["selection"][f"{backend} | {path}"]
        if backend == TYPO:
            assert promised[backend, path] == "error"
            assert f"SGLANG_FL_DIST_BACKEND (comm.backend): found '{TYPO}'" in found
            assert "allowed: one of nccl, hccl, flagcx, torch, auto. Did you mean 'flagcx'?" in found
            continue
        for rank in found:
            shared = [rank[name] for name in ("world:0", "tp:0")]
            assert {report["backend"] for report in shared} == {promised[backend, path]}, (path, rank)
            if backend in ("flagcx", "nccl", "hccl") and promised[backend, path] != backend:
                assert all(any(r.startswith(f"not {backend}: ") for r in report["reasons"]) for report in shared)


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_variable_counts_as_unset(name: str, answer: dict[str, Any]) -> None:
    """Given a variable that is empty, then the groups are what they are without it."""
    assert answer["selection"][name] == answer["selection"]["unset or empty | unset or empty"]


def test_on_nvidia_nothing_is_hooked_unless_something_is_selected(answer: dict[str, Any]) -> None:
    """Given the settings of NVIDIA and nothing selected, then each method of GroupCoordinator is SGLang's own."""
    hooked = answer["hooked"]
    assert hooked["cuda"] == []
    for name in ("cuda with torch", "cuda with a path", "cpu"):
        assert {"all_reduce", "all_gather", "broadcast", "send_tensor_dict", "recv_tensor_dict"} <= set(hooked[name])
