"""The conformance matrix and scenarios on hostcx, or on the host library that FLAGCX_PATH names."""

from __future__ import annotations

import os

import pytest

from sglang_fl.testing.ranks import run_ranks
from tests.native.conformance import runs, scenarios
from tests.native.conformance.matrix import MatrixReport
from tests.native.conformance.session import hostcx_path

_LIMIT_S = 300.0
_WORLD_SIZES = (2, 3, 4)


@pytest.fixture(scope="session")
def library() -> dict[str, str]:
    """FLAGCX_PATH for the ranks: the caller's, or this checkout's hostcx, built if need be."""
    return {"FLAGCX_PATH": os.environ.get("FLAGCX_PATH") or str(hostcx_path())}


def _assert_right(reports: list[MatrixReport], at_least: int) -> None:
    errors = [error for report in reports for error in report.errors]
    assert not errors, "\n".join([f"{len(errors)} wrong results", *errors])
    assert {report.cases_run for report in reports} == {reports[0].cases_run}
    assert reports[0].cases_run >= at_least


@pytest.mark.parametrize("world_size", [1, *_WORLD_SIZES])
def test_every_function_dtype_operation_count_and_placement(library: dict[str, str], world_size: int) -> None:
    """Given data that depends on the rank, when every case runs, then each result is right and nothing else moved."""
    _assert_right(run_ranks(runs.matrix, world_size, timeout_s=_LIMIT_S, gloo=False, env=library), at_least=2000)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_expected_results_are_those_of_torch_distributed(world_size: int) -> None:
    """Given the same matrix, when gloo runs what it has of it, then it gives what the matrix expects."""
    _assert_right(run_ranks(runs.matrix_on_torch, world_size, timeout_s=_LIMIT_S), at_least=1000)


@pytest.mark.parametrize("world_size", _WORLD_SIZES)
def test_all_to_all_with_uneven_counts(library: dict[str, str], world_size: int) -> None:
    """Given counts that differ by pair, zeros and gaps, when all dtypes run, then blocks are right and gaps kept."""
    errors = [
        error
        for part in run_ranks(runs.uneven, world_size, timeout_s=_LIMIT_S, gloo=False, env=library)
        for error in part
    ]
    assert not errors, "\n".join(errors)


@pytest.mark.parametrize("world_size", _WORLD_SIZES)
@pytest.mark.parametrize("scenario", [s.__name__ for s in (*scenarios.EVERYWHERE, *scenarios.ON_HOST)])
def test_scenario(library: dict[str, str], scenario: str, world_size: int) -> None:
    """Given a fresh communicator, when a scenario of conformance/scenarios.py runs, then its assertions hold."""
    run_ranks(runs.scenario, world_size, scenario, timeout_s=_LIMIT_S, gloo=False, env=library)
