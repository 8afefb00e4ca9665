"""A fork of a rank: its calls of the rank's groups are refused at once, and its dumps go where the rank's do."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from sglang_fl.comm import dump_calls
from sglang_fl.comm.errors import CommError
from sglang_fl.testing.ranks import RankContext, run_ranks
from tests.distributed.groups import communicator_of_all


def _in_fork(found: Callable[[], str], path: Path) -> str:
    """What ``found`` returns in a fork of this process, which then ends without its handlers."""
    child = os.fork()
    if child == 0:
        path.write_text(found())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    return path.read_text()


def _ended(call: Callable[[], object]) -> str:
    try:
        call()
    except CommError as error:
        return str(error)
    return "no error"


def _calls(context: RankContext, folder: Path) -> tuple[int, list[str], str]:
    group = communicator_of_all(context, operation_timeout_s=600.0)
    group.all_reduce(torch.ones(3))
    group.barrier()

    def refusals() -> str:
        return "\n".join(_ended(call) for call in (lambda: group.all_reduce(torch.ones(3)), group.barrier))

    texts = _in_fork(refusals, folder / f"refusals{context.rank}").splitlines()
    dump = _in_fork(lambda: str(dump_calls()), folder / f"dump{context.rank}")
    group.all_reduce(torch.ones(3))  # the rank itself goes on
    return os.getpid(), texts, dump


def test_a_fork_of_a_rank_is_refused_and_dumps_into_the_same_folder(backend: Mapping[str, str], tmp_path: Path) -> None:
    """Given two ranks with a group that fork, when the forks call it, then each call is an error at once that says so;
    a dump of theirs is in the folder that was set, and the ranks go on."""
    dumps = tmp_path / "dumps"
    env = {**backend, "SGLANG_FL_COMM_DUMP_DIR": str(dumps)}
    for rank, (pid, texts, dump) in enumerate(run_ranks(_calls, 2, tmp_path, env=env)):
        assert len(texts) == 2
        named = rf"group tp:0 .*, global rank {rank} of \[0, 1\]: this is process \d+, a fork of process {pid} that "
        for text in texts:
            assert re.match(named, text), text
        assert Path(dump).parent == dumps
