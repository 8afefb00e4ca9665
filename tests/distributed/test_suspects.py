"""A process whose peer is killed, with two recorders on a device that is handmade: which call it names at its end."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from sglang_fl.comm.monitor import EXIT_CODE, MONITOR
from sglang_fl.comm.recorder import Recorder
from sglang_fl.testing.ranks import FailureKind, RankContext, RanksFailed, run_ranks
from tests.distributed.groups import communicator_of_all
from tests.unit.test_monitor_suspects import Stream, StreamRecorder

_LIMIT_S = 30.0


class _Group:
    """Of two recorders, in the order in which the monitor sees them."""

    key = ""

    def __init__(self, recorders: list[StreamRecorder]) -> None:
        self._recorders = tuple(recorders)

    def recorders(self) -> tuple[Recorder, ...]:
        return self._recorders

    def operation_limit_s(self) -> float:
        return _LIMIT_S


def _loses_its_peer(context: RankContext, in_flight: int) -> str:
    communicator = communicator_of_all(context)  # so the processes know each other
    recorders = [StreamRecorder("tp:0 flagcx"), StreamRecorder("tp:0 symm")]
    group, stream = _Group(recorders), Stream()
    dist.barrier()
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    recorders[1 - in_flight].call("reduce_scatter", stream, is_done=True)
    recorders[in_flight].call("all_reduce", stream, is_done=True)
    recorders[in_flight].call("all_reduce", stream, is_done=False)
    MONITOR.watch(group)
    time.sleep(_LIMIT_S)
    return f"{communicator.name} goes on"


@pytest.mark.parametrize("in_flight", [0, 1])
def test_the_call_in_flight_is_named(in_flight: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Given two recorders on a stream, one of which has a call in flight behind those that are done, when the peer is
    killed, then the process ends with code 71 and names that call and the peer, and not the one that is done."""
    with pytest.raises(RanksFailed) as raised:
        run_ranks(
            _loses_its_peer,
            2,
            in_flight,
            timeout_s=2 * _LIMIT_S,
            expect_killed=[1],
            env={"SGLANG_FL_COMM_DUMP_DIR": str(tmp_path)},
        )
    (failure,) = raised.value.failures
    assert failure.kind is FailureKind.EXITED and f"exited with code {EXIT_CODE} " in failure.text, failure.text
    said = capfd.readouterr().err
    name = ("flagcx", "symm")[in_flight]
    named = rf"group tp:0 {name}, global rank 0 of \[0, 1\]: call number 2, all_reduce float32\[8\] is not known"
    assert re.search(
        rf"{named} to be done, and a further call .*: global rank 1 \(process \d+ on \S+\) was killed", said
    ), said
    assert "reduce_scatter" not in said
