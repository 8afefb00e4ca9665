"""Real ranks that make different calls: the comparison of their dumps names the call and what was done instead."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from sglang_fl.comm import CommunicatorFL, dump_calls
from sglang_fl.comm.difference import Kind, compare
from sglang_fl.comm.dump_files import choose_dumps
from sglang_fl.comm.dumps import PATTERN
from sglang_fl.comm.errors import CollectiveTimeout, CommError
from sglang_fl.testing.ranks import RankContext, run_ranks
from tests.distributed.groups import communicator_of_all

LIMIT_S = 2.0
Step = Callable[[CommunicatorFL], object]


def embed(group: CommunicatorFL) -> None:
    """The first of two calls that are alike but for their place."""
    group.all_reduce(torch.ones(64))


def attention(group: CommunicatorFL) -> None:
    """The second."""
    group.all_reduce(torch.ones(64))


def route(group: CommunicatorFL) -> None:
    """As many bytes as those before, of another dtype."""
    group.all_reduce(torch.ones(64, dtype=torch.int32))


def gather(group: CommunicatorFL) -> None:
    """A call of its own size."""
    group.all_gather(torch.ones(32))


def tell(group: CommunicatorFL) -> None:
    """From rank 0 of the group to the others."""
    group.broadcast(torch.ones(4, dtype=torch.int64), src=0)


def gather_less(group: CommunicatorFL) -> None:
    """gather in another shape."""
    group.all_gather(torch.ones(24))


def tell_more(group: CommunicatorFL) -> None:
    """tell in another shape; gloo accepts a receiver that has more room."""
    group.broadcast(torch.ones(8, dtype=torch.int64), src=0)


def attention_wrong(group: CommunicatorFL) -> None:
    """attention in another dtype; gloo accepts as many bytes."""
    group.all_reduce(torch.ones(64, dtype=torch.int32))


FORWARD: tuple[Step, ...] = (embed, attention, route, gather, tell)


@dataclass(frozen=True)
class Deviation:
    """What the last rank does in the third of four forwards, and what the comparison must say of it.

    Attributes:
        name: the test's id.
        steps: of its third forward.
        kind, number: of the difference; the number counts from the first forward, as a backend may warm up before.
        words: parts of the sentence; ``{odd}`` is the last rank, ``{n}`` the call, ``{after}`` the next.
        backends: on which it can be done: gloo ends a process that receives more than it expects, and does not notice
            other differences; hostcx notices each at once.
    """

    name: str
    steps: tuple[Step, ...]
    kind: Kind
    number: int
    words: tuple[str, ...]
    backends: tuple[str, ...] = ("flagcx", "torch")


DEVIATIONS = (
    Deviation(
        "skips a call",
        (embed, attention, route, tell),
        Kind.SKIPPED,
        14,
        ("rank {odd} skipped all_gather float32[32], or swapped it with the call", "already in broadcast int64[4]"),
    ),
    Deviation(
        "skips one of two calls that are alike",
        (attention, route, gather, tell),
        Kind.SKIPPED,
        11,
        ("rank {odd} skipped call {n}: all_reduce float32[64] at ", "test_dumps.py:", "embed"),
        ("flagcx",),
    ),
    Deviation(
        "sends another shape",
        (embed, attention, route, gather_less, tell),
        Kind.SHAPE,
        14,
        ("shape", "all_gather float32[24]", "all_gather float32[32]"),
        ("flagcx",),
    ),
    Deviation(
        "sends another shape",
        (embed, attention, route, gather, tell_more),
        Kind.SHAPE,
        15,
        ("shape", "broadcast int64[8] rank 0", "broadcast int64[4] rank 0"),
    ),
    Deviation(
        "sends another dtype",
        (embed, attention_wrong, route, gather, tell),
        Kind.DTYPE,
        12,
        ("dtype", "all_reduce int32[64]", "all_reduce float32[64]"),
    ),
    Deviation(
        "swaps two calls that the library notices",
        (embed, attention, route, tell, gather),
        Kind.SKIPPED,
        14,
        ("rank {odd} skipped all_gather float32[32], or swapped it with the call that follows it",),
    ),
    Deviation(
        "swaps two calls that the library does not notice",
        (embed, route, attention, gather, tell),
        Kind.SWAPPED,
        12,
        ("rank {odd} swapped calls {n} and {after}: all_reduce int32[64] at", "came before all_reduce float32[64] at"),
        ("torch",),
    ),
)
CASES = [
    pytest.param(backend, deviation, id=f"{backend}-{deviation.name}-{deviation.number}")
    for deviation in DEVIATIONS
    for backend in deviation.backends
]


def environment(backend: str, hostcx: Path, folder: Path) -> dict[str, str]:
    """Of the ranks."""
    folder.chmod(0o700)
    return {
        "SGLANG_FL_DIST_BACKEND": backend,
        "FLAGCX_PATH": str(hostcx),
        "HOSTCX_QUIET": "1",
        "SGLANG_FL_COMM_DUMP_DIR": str(folder),
        "SGLANG_FL_COMM_TIMEOUT_S": f"{LIMIT_S}",
    }


def trap_torch() -> None:
    """torch's collectives cannot carry what is FlagCX's."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("a collective of torch.distributed was called")

    for name in ("all_reduce", "all_gather_into_tensor", "broadcast", "all_gather"):
        setattr(dist, name, refuse)


def calls_so_far(group: CommunicatorFL) -> int:
    """Of the group's collectives."""
    return group.recorders()[0].entered()


def deviate(context: RankContext, steps: Sequence[Step], backend: str) -> tuple[int, str]:
    """Four forwards, the last rank's third with its own steps; then a dump, of the time-out or on request.

    Returns:
        the calls before, and how it ended.
    """
    group = communicator_of_all(context)
    assert group.backend == backend
    before = calls_so_far(group)
    if backend == "flagcx":
        trap_torch()
    is_odd = context.rank == context.world_size - 1
    start_s, ended = time.monotonic(), "returned"
    try:
        for forward in (FORWARD, FORWARD, steps if is_odd else FORWARD, FORWARD):
            for step in forward:
                step(group)
    except CommError as error:
        ended = f"{type(error).__name__}: {error}"
        if not isinstance(error, CollectiveTimeout):
            dump_calls(f"a call failed: {type(error).__name__}")
    else:
        dump_calls()
    assert time.monotonic() - start_s < LIMIT_S + 2
    everyone_is_done(context)
    return before, ended


def everyone_is_done(context: RankContext) -> None:
    """No rank ends before all have left their dumps, which would be another fault."""
    store = context.store("dumped")
    store.set(str(context.rank), "")
    store.wait([str(rank) for rank in range(context.world_size)])


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(("backend", "deviation"), CASES)
def test_what_a_rank_did_instead_is_named(
    hostcx: Path, tmp_path: Path, backend: str, deviation: Deviation, world_size: int
) -> None:
    """Given the last rank that deviates, when all have left a dump, then the comparison names call, rank and how."""
    env = environment(backend, hostcx, tmp_path)
    ended = run_ranks(deviate, world_size, deviation.steps, backend, env=env)
    found = compare(choose_dumps([tmp_path]).dumps)
    assert len(found.differences) == 1, (found, ended)
    difference = found.differences[0]
    number = ended[0][0] + deviation.number
    assert (difference.kind, difference.number) == (deviation.kind, number), (difference.words, ended)
    assert difference.group == f"tp:0 {backend}" and difference.ranks == tuple(range(world_size))
    named = tuple(range(2)) if world_size == 2 and deviation.kind in (Kind.SHAPE, Kind.DTYPE) else (world_size - 1,)
    assert difference.who == named
    for part in deviation.words:
        assert part.format(odd=world_size - 1, n=number, after=number + 1) in difference.words
    assert found.notes == ()


def stay_away(context: RankContext, backend: str) -> tuple[int, str]:
    """The last rank does something else while the others make one more call; their monitors ask its for a dump.

    Returns:
        the calls before that one, and the error.
    """
    group = communicator_of_all(context)
    assert group.backend == backend
    for step in FORWARD:
        step(group)
    before = calls_so_far(group)
    if context.rank == context.world_size - 1:
        while not list(Path(os.environ["SGLANG_FL_COMM_DUMP_DIR"]).glob(f"*-pid{os.getpid()}-*.json")):
            time.sleep(0.01)
        everyone_is_done(context)
        return before, ""
    with pytest.raises(CollectiveTimeout) as raised:
        embed(group)
    everyone_is_done(context)
    return before, str(raised.value)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", ["flagcx", "torch"])
def test_who_is_missing_from_a_call_is_named_and_where_it_was(
    hostcx: Path, tmp_path: Path, name: str, world_size: int
) -> None:
    """Given ranks that time out in a call, and one elsewhere, then it leaves a dump as well and is named as missing."""
    errors = run_ranks(stay_away, world_size, name, env=environment(name, hostcx, tmp_path))
    odd, before = world_size - 1, errors[0][0]
    (difference,) = compare(choose_dumps([tmp_path]).dumps).differences
    assert (difference.kind, difference.number, difference.who) == (Kind.MISSING, before + 1, (odd,)), errors
    assert difference.words.startswith(
        f"rank {odd} did not enter it; rank {odd}'s last was call {before}, broadcast int64[4] rank 0 at "
    )
    others = [rank for rank in range(world_size) if rank != odd]
    assert all(difference.calls[rank] is not None for rank in others) and difference.calls[odd] is None
    # and its own stack shows what it did meanwhile
    dumps = {dump.rank: dump for dump in choose_dumps([tmp_path]).dumps}
    threads = json.loads(dumps[odd].path.read_text())["threads"]
    (main,) = [thread for thread in threads if thread["name"] == "MainThread"]
    assert any("stay_away" in line for line in main["stack"])
    assert re.match(r"global rank \d found: group tp:0", dumps[odd].reason) and all(
        f"{LIMIT_S:g} s" in dumps[rank].reason for rank in others
    )


def leave_a_dump(context: RankContext) -> None:
    """One call, one dump."""
    communicator_of_all(context).all_reduce(torch.ones(1))
    dump_calls()


def test_the_ranks_of_one_run_have_a_word_of_their_own(hostcx: Path, tmp_path: Path) -> None:
    """Given two runs one after the other, then the ranks of each have one word in their dumps, and the runs two."""
    words: list[set[str]] = []
    for run in range(2):
        folder = tmp_path / str(run)
        folder.mkdir()
        run_ranks(leave_a_dump, 2, env=environment("torch", hostcx, folder))
        meetings = [json.loads(path.read_text())["meeting"] for path in folder.glob(PATTERN)]
        assert len(meetings) == 2
        words.append({meeting.partition(", run ")[2] for meeting in meetings})
    assert len(words[0]) == len(words[1]) == 1
    assert "" not in words[0] | words[1] and words[0] != words[1]


def work_on(context: RankContext) -> None:
    """Forwards until all ranks have answered two signals; a call that a signal interrupts must give its value."""
    faulthandler.unregister(signal.SIGUSR1)
    group = communicator_of_all(context)
    folder = Path(os.environ["SGLANG_FL_COMM_DUMP_DIR"])
    store, total = context.store("signals"), float(context.world_size)
    for signals in (1, 2):
        os.kill(os.getpid(), signal.SIGUSR1)
        while True:
            large = group.all_reduce(torch.ones(2**20))
            assert large[0].item() == large[-1].item() == total
            have = len(list(folder.glob(f"*-pid{os.getpid()}-*.json")))
            if group.all_reduce(torch.tensor([float(have >= signals)])).item() == total:
                break
    store.set(str(context.rank), "")


@pytest.mark.parametrize("world_size", [2, 4])
def test_signals_under_load_bring_dumps_and_change_no_value(
    backend: Mapping[str, str], hostcx: Path, tmp_path: Path, world_size: int
) -> None:
    """Given ranks at work, when each gets SIGUSR1 twice, then two dumps each, right sums, and no difference."""
    run_ranks(work_on, world_size, env={**environment(backend["SGLANG_FL_DIST_BACKEND"], hostcx, tmp_path), **backend})
    assert len(list(tmp_path.glob(PATTERN))) == 2 * world_size
    done = subprocess.run(
        [sys.executable, "-m", "sglang_fl", "comm-diff", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
