"""The launcher of ranks: what comes back when ranks return, raise, hang, die or leave children behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sglang_fl.testing.ranks import FailureKind, RankContext, RanksFailed, run_ranks


def _sum_of_ranks(context: RankContext, factor: int) -> torch.Tensor:
    tensor = torch.full((3,), float(factor * (context.rank + 1)))
    dist.all_reduce(tensor)
    return tensor


def _environment(context: RankContext) -> dict[str, str | None]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OF_ALL", "OF_ONE", "OMP_NUM_THREADS")
    return {name: os.environ.get(name) for name in names}


def _local_rank(context: RankContext) -> int:
    return context.local_rank


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_results_come_back_in_rank_order(start_method: str) -> None:
    """Given ranks that reduce a tensor over gloo, when they return it, then each result is there."""
    results = run_ranks(_sum_of_ranks, 2, 10, start_method=start_method)

    assert [result.tolist() for result in results] == [[30.0] * 3, [30.0] * 3]


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_each_rank_has_its_environment(start_method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given variables for all and for one rank, when ranks start, then they are set and None unsets."""
    monkeypatch.setenv("OF_ONE", "outside")

    results = run_ranks(
        _environment,
        2,
        gloo=False,
        start_method=start_method,
        env=lambda rank: {"OF_ALL": "yes", "OF_ONE": "mine" if rank else None},
    )

    common = {"WORLD_SIZE": "2", "OF_ALL": "yes", "OMP_NUM_THREADS": "1"}
    assert results == [
        {"RANK": "0", "LOCAL_RANK": "0", "OF_ONE": None, **common},
        {"RANK": "1", "LOCAL_RANK": "1", "OF_ONE": "mine", **common},
    ]
    assert os.environ["OF_ONE"] == "outside"


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_a_local_rank_is_the_rank_or_what_the_environment_says(start_method: str) -> None:
    """Given LOCAL_RANK for one of two ranks, when they ask, then that one is told it, and the other its rank."""
    results = run_ranks(
        _local_rank, 2, gloo=False, start_method=start_method, env=lambda rank: {"LOCAL_RANK": "5"} if rank == 0 else {}
    )

    assert results == [5, 1]


def test_a_large_result_and_a_local_function() -> None:
    """Given a result larger than a pipe holds, when a rank returns it, then it comes back whole."""
    results = run_ranks(lambda context: bytes([context.rank]) * (1 << 20), 2, gloo=False)

    assert results == [bytes(1 << 20), b"\x01" * (1 << 20)]


def test_a_store_and_a_directory_are_shared() -> None:
    """Given a store and a folder of the launch, when one rank writes, then the other reads it."""

    def talk(context: RankContext) -> tuple[bytes, str]:
        store = context.store("mine")
        if context.rank == 0:
            (context.directory / "note").write_text("written by 0")
            store.set("key", "value")
        return store.get("key"), (context.directory / "note").read_text()

    assert run_ranks(talk, 2, gloo=False) == [(b"value", "written by 0")] * 2


def test_all_errors_are_listed() -> None:
    """Given two of three ranks that raise, when the launch ends, then both tracebacks are in one error."""

    def fail(context: RankContext) -> str:
        if context.rank > 0:
            raise ValueError(f"bad value on {context.rank}")
        return "well"

    with pytest.raises(RanksFailed) as caught:
        run_ranks(fail, 3, gloo=False)

    text = str(caught.value)
    assert text.startswith("2 of 3 ranks failed: 1, 2")
    assert "rank 1 raised" in text and "ValueError: bad value on 1" in text and "ValueError: bad value on 2" in text
    assert [(f.rank, f.kind, f.error_type) for f in caught.value.failures] == [
        (1, FailureKind.RAISED, "ValueError"),
        (2, FailureKind.RAISED, "ValueError"),
    ]
    assert caught.value.results == ("well", None, None)


def test_a_result_that_cannot_be_pickled_is_that_ranks_error() -> None:
    """Given a result that no pickle can hold, when a rank returns it, then the rank failed and says why."""
    with pytest.raises(RanksFailed, match=r"rank 0 raised(.|\n)*pickle"):
        run_ranks(lambda context: lambda: None, 1, gloo=False)


def test_a_rank_that_hangs_is_killed_and_its_stack_reported() -> None:
    """Given a rank that waits in C with the interpreter locked, at the limit its stack is told."""

    def hang_in_c(context: RankContext) -> int:
        context.note("about to pause")
        if context.rank == 1:
            ctypes.PyDLL(None).pause()
        return os.getpid()

    with pytest.raises(RanksFailed) as caught:
        run_ranks(hang_in_c, 2, gloo=False, timeout_s=1.0)

    (failure,) = caught.value.failures
    assert (failure.rank, failure.kind) == (1, FailureKind.TIMED_OUT)
    assert all(words in failure.text for words in ("limit of 1 s", "hang_in_c", "its last note: about to pause"))


def test_a_rank_that_waits_for_a_failed_one_is_not_waited_for_until_the_limit() -> None:
    """Given a rank that raises while its peer waits, when a minute is allowed, then it ends long before."""

    def fail_or_wait(context: RankContext) -> None:
        if context.rank == 0:
            raise KeyError("gone")
        time.sleep(600)

    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(fail_or_wait, 2, gloo=False, timeout_s=60.0)

    assert time.monotonic() - start < 30
    assert [f.kind for f in caught.value.failures] == [FailureKind.RAISED, FailureKind.LEFT_WAITING]
    assert "fail_or_wait" in caught.value.failures[1].text


@pytest.mark.parametrize(
    ("end", "kind", "words"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), FailureKind.KILLED, "SIGKILL (9)"),
        (lambda: ctypes.string_at(0), FailureKind.KILLED, "SIGSEGV (11)"),
        (lambda: os._exit(7), FailureKind.EXITED, "code 7"),
        (lambda: os._exit(0), FailureKind.EXITED, "without a result"),
        (lambda: sys.exit(3), FailureKind.EXITED, "code 3"),
    ],
    ids=["killed", "crashed", "exited", "exited with 0", "sys.exit"],
)
def test_signals_and_exit_codes_are_reported(end: object, kind: FailureKind, words: str) -> None:
    """Given a rank that ends without returning, when the launch ends, then its signal or code is told."""
    with pytest.raises(RanksFailed) as caught:
        run_ranks(lambda context: end(), 1, gloo=False)

    (failure,) = caught.value.failures
    assert failure.kind is kind
    assert words in failure.text


def test_a_crash_shows_where_it_was() -> None:
    """Given a rank that reads address 0, when it dies, then the Python stack of the crash is in the error."""

    def read_null(context: RankContext) -> None:
        ctypes.string_at(0)

    with pytest.raises(RanksFailed, match=r"Segmentation fault(.|\n)*in read_null"):
        run_ranks(read_null, 1, gloo=False)


def test_a_rank_may_be_expected_to_die() -> None:
    """Given a rank that is to be killed, if it is, the others' results count; if not, it is a failure."""

    def die(context: RankContext, dies: bool) -> str:
        if context.rank == 1 and dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return "lives"

    assert run_ranks(die, 2, True, gloo=False, expect_killed=[1]) == ["lives", None]
    with pytest.raises(RanksFailed, match="rank 1 should have been ended by SIGKILL, it exited with code 0"):
        run_ranks(die, 2, False, gloo=False, expect_killed=[1])


def test_children_of_a_rank_end_with_it() -> None:
    """Given a rank that leaves a child running, when it returns, then the child is gone too."""
    (pid,) = run_ranks(lambda context: subprocess.Popen(["sleep", "600"]).pid, 1, gloo=False)

    assert not _is_alive(pid)


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    """Given a launcher killed by SIGKILL, when its ranks sleep, then they end as well."""
    script = (
        "import os, pathlib, sys, time\n"
        "from sglang_fl.testing.ranks import run_ranks\n"
        "def note(context):\n"
        "    path = pathlib.Path(sys.argv[1], str(context.rank))\n"
        "    path.with_suffix('.new').write_text(str(os.getpid()))\n"
        "    path.with_suffix('.new').rename(path)\n"
        "    time.sleep(600)\n"
        "run_ranks(note, 2, gloo=False, timeout_s=600)\n"
    )
    launcher = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)])
    notes = [tmp_path / "0", tmp_path / "1"]
    _wait_until(lambda: all(note.exists() for note in notes))
    pids = [int(note.read_text()) for note in notes]
    assert all(_is_alive(pid) for pid in pids)

    launcher.kill()
    launcher.wait()

    _wait_until(lambda: not any(_is_alive(pid) for pid in pids))


def _wait_until(condition: object, limit_s: float = 60.0) -> None:
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until, "nothing happened within the liveness limit"
        time.sleep(0.01)
