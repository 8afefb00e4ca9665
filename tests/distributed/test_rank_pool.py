"""Ranks that stay for several functions: results, environment, failures, and fresh ranks after one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from sglang_fl.testing.ranks import FailureKind, RankContext, RanksFailed
from tests.rank_pool import RankPool

LIMIT_S = 20.0


@pytest.fixture
def pool() -> Iterator[RankPool]:
    """Two ranks."""
    made = RankPool(2, lambda rank: {"OWN": str(rank), "COMMON": "pool"}, LIMIT_S)
    yield made
    made.close()


def seen(context: RankContext, addend: int) -> tuple[int, int, str, str | None]:
    """The process, a sum over the ranks, and what the environment says."""
    total = torch.tensor(context.rank + addend)
    dist.all_reduce(total)
    return os.getpid(), int(total), os.environ["OWN"], os.environ.get("COMMON")


def fail(context: RankContext, rank: int) -> None:
    """One rank raises, the other waits for it."""
    if context.rank == rank:
        raise ValueError(f"rank {rank} has had enough")
    dist.barrier()


def hang(context: RankContext) -> None:
    """Longer than any limit."""
    time.sleep(600)


def test_the_same_processes_run_one_function_after_the_other(pool: RankPool) -> None:
    """Given several functions, then the same two processes run them, each under its own environment on top of the
    pool's, which it has back afterwards."""
    first, second, third = (pool.run(seen, 5, env=env) for env in ({}, {"COMMON": "task"}, {"COMMON": None}))
    assert [pid for pid, *_ in first] == [pid for pid, *_ in second] == [pid for pid, *_ in third]
    assert os.getpid() not in [pid for pid, *_ in first] and first[0][0] != first[1][0]
    assert [rest for _, *rest in first] == [[11, "0", "pool"], [11, "1", "pool"]]
    assert [common for *_, common in (*second, *third)] == ["task", "task", None, None]
    assert [common for *_, common in pool.run(seen, 5, env={})] == ["pool", "pool"]


def test_a_failure_is_the_functions_own(pool: RankPool) -> None:
    """Given a function that raises on one rank, then the error has its text, and the next function gets fresh ranks."""
    before = pool.run(seen, 1, env={})
    with pytest.raises(RanksFailed, match="rank 1 has had enough") as raised:
        pool.run(fail, 1, env={})
    assert {failure.rank: failure.error_type for failure in raised.value.failures}[1] == "ValueError"
    after = pool.run(seen, 2, env={"COMMON": "fresh"})
    assert [rest for _, *rest in after] == [[5, "0", "fresh"], [5, "1", "fresh"]]
    assert not {pid for pid, *_ in before} & {pid for pid, *_ in after}


def test_a_function_that_hangs_ends(capfd: pytest.CaptureFixture[str]) -> None:
    """Given a function that is not done within the limit, then its ranks end and the stack says where they stood."""
    pool = RankPool(2, lambda rank: {}, limit_s=1.0)
    with pytest.raises(RanksFailed) as raised:
        pool.run(hang, env={})
    pool.close()
    assert FailureKind.EXITED in {failure.kind for failure in raised.value.failures}
    assert "in hang" in capfd.readouterr().err
