"""The conformance matrix and scenarios on real FlagCX, which FLAGCX_PATH names, with a GPU for each rank."""

from __future__ import annotations

import os

import pytest
import torch

from sglang_fl.testing.ranks import run_ranks
from tests.native.conformance import runs, scenarios

pytestmark = pytest.mark.gpu

_LIMIT_S = 150.0
_GPUS = torch.cuda.device_count()
_WORLD_SIZES = [size for size in (2, 3, 4) if size <= max(2, _GPUS)]


@pytest.fixture(autouse=True)
def real_flagcx() -> None:
    """Needs a library on device memory and two GPUs."""
    if _GPUS < 2 or not os.environ.get("FLAGCX_PATH"):
        pytest.skip(f"needs a GPU for each of two ranks ({_GPUS} here) and FLAGCX_PATH with real FlagCX")


@pytest.mark.parametrize("world_size", _WORLD_SIZES)
def test_native_every_function_dtype_operation_count_and_placement(world_size: int) -> None:
    """Given data that depends on the rank, when every case runs on GPUs, then each result is right."""
    reports = run_ranks(runs.matrix, world_size, timeout_s=_LIMIT_S, gloo=False, start_method="spawn")

    errors = [error for report in reports for error in report.errors]
    assert not errors, "\n".join([f"{len(errors)} wrong results", *errors])
    assert {report.memory for report in reports} == {"device"}
    assert min(report.cases_run for report in reports) >= 2000


@pytest.mark.parametrize("world_size", _WORLD_SIZES)
def test_native_all_to_all_with_uneven_counts(world_size: int) -> None:
    """Given counts that differ by pair, zeros and gaps, when all dtypes run, then blocks and gaps are right."""
    parts = run_ranks(runs.uneven, world_size, timeout_s=_LIMIT_S, gloo=False, start_method="spawn")

    errors = [error for part in parts for error in part]
    assert not errors, "\n".join(errors)


@pytest.mark.parametrize("world_size", _WORLD_SIZES)
def test_native_scenarios(world_size: int) -> None:
    """Given fresh communicators, when the scenarios run one after the other, then their assertions hold."""
    names = [scenario.__name__ for scenario in (*scenarios.EVERYWHERE, *scenarios.ON_DEVICE)]

    parts = run_ranks(runs.scenarios_in_turn, world_size, names, timeout_s=_LIMIT_S, gloo=False, start_method="spawn")

    failed = [f"{name}, {how}" for part in parts for name, how in part.items()]
    assert not failed, "\n".join(failed)
