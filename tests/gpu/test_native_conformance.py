"""The conformance matrix and scenarios on real FlagCX, which FLAGCX_PATH names, on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from sglang_fl.testing.ranks import run_ranks
from tests.gpu.places import Places, how, places
from tests.native.conformance import runs, scenarios
from tests.native.conformance.session import Session

pytestmark = pytest.mark.gpu

_LIMIT_S = 150.0
_SHARED_LIMIT_S = 420.0  # ranks of one GPU take turns: each of the matrix's thousands of calls waits for some
_WORLD_SIZES = [size for size in (2, 3, 4) if size <= max(2, torch.cuda.device_count())]
_WINDOW = scenarios.symmetric_window


@pytest.fixture(params=_WORLD_SIZES, ids=lambda size: f"{size}-{how(size)}")
def stand(request: pytest.FixtureRequest) -> Places:
    """Places for the ranks."""
    return places(request.param)


def _run(function: Callable[..., Any], stand: Places, *arguments: object) -> list[Any]:
    return run_ranks(
        function,
        stand.world_size,
        *arguments,
        timeout_s=_SHARED_LIMIT_S if stand.is_shared else _LIMIT_S,
        gloo=False,
        env=stand.environment,
        start_method="spawn",
    )


def test_native_every_function_dtype_operation_count_and_placement(stand: Places) -> None:
    """Given data that depends on the rank, when every case runs on GPUs, then each result is right."""
    reports = _run(runs.matrix, stand)

    errors = [error for report in reports for error in report.errors]
    assert not errors, "\n".join([f"{len(errors)} wrong results", *errors])
    assert {report.memory for report in reports} == {"device"}
    assert min(report.cases_run for report in reports) >= 2000


def test_native_all_to_all_with_uneven_counts(stand: Places) -> None:
    """Given counts that differ by pair, zeros and gaps, when all dtypes run, then blocks and gaps are right."""
    parts = _run(runs.uneven, stand)

    errors = [error for part in parts for error in part]
    assert not errors, "\n".join(errors)


def _assert_scenarios(stand: Places, chosen: Sequence[Callable[[Session], None]]) -> None:
    parts = _run(runs.scenarios_in_turn, stand, [scenario.__name__ for scenario in chosen])

    failed = [f"{name}, {story}" for part in parts for name, story in part.items()]
    assert not failed, "\n".join(failed)


def test_native_scenarios(stand: Places) -> None:
    """Given fresh communicators, when the scenarios run one after the other, then their assertions hold."""
    everywhere = [scenario for scenario in scenarios.EVERYWHERE if scenario is not _WINDOW]
    _assert_scenarios(stand, [*everywhere, *scenarios.ON_DEVICE])


def test_native_symmetric_window(stand: Places) -> None:
    """Given GPUs that reach each other's memory, when a window is registered, then it carries an all_reduce."""
    if stand.is_shared:
        pytest.skip("needs a GPU for each rank: hosts have no memory in common, NCCL then makes no window")
    _assert_scenarios(stand, [_WINDOW])
