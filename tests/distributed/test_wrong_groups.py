"""A group that cannot be: refused where it is asked for, and told to the ranks that wait for that one."""

from __future__ import annotations

import importlib
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from sglang_fl.comm.communicator import CommunicatorFL
from sglang_fl.comm.errors import AgreementError, CommError
from sglang_fl.config import load_settings
from sglang_fl.sglang_hooks.groups import Groups, HookError
from sglang_fl.sglang_hooks.registration import Hook
from sglang_fl.testing.ranks import RankContext, run_ranks

ENDLESS_S = 600.0  # longer than a test may run: what ends before does not end by this limit
ALLOWED = "allowed are global ranks from 0 to 1, each once: those of which the process groups were made"

# What is given, and what is said of it, by "{own}" for the rank where it is.
WRONG_RANKS: list[tuple[Any, str]] = [
    ([0, 1, 2], "group tp:0: global rank {own} was given the ranks [0, 1, 2], of which [2] do not exist; " + ALLOWED),
    (
        [-1, 0, 1],
        "group tp:0: global rank {own} was given the ranks [-1, 0, 1], of which [-1] do not exist; " + ALLOWED,
    ),
    ([0, 0, 1], "group tp:0: global rank {own} was given the ranks [0, 0, 1], with [0] more than once; " + ALLOWED),
    ([], "group tp:0: global rank {own} is not among its ranks []; " + ALLOWED),
    ([0.0, 1.0], "group tp:0: ranks is [0.0, 1.0]; " + ALLOWED),
    ("01", "group tp:0: ranks is '01'; " + ALLOWED),
    (2, "group tp:0: ranks is 2; " + ALLOWED),
]
NO_GROUP = " is None; allowed is a process group of torch.distributed, as dist.new_group returns it on the ranks of the"
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"timeout_s": math.nan}, "timeout_s is nan; allowed is a number of seconds"),
    ({"operation_timeout_s": -1}, "operation_timeout_s is -1; allowed is a number of seconds"),
    ({"device": "nonsense"}, "device string: nonsense"),
    ({"device": None}, "invalid combination of arguments"),
    ({"cpu_group": None}, "group tp:0: cpu_group" + NO_GROUP),
    ({"device_group": None}, "group tp:0: device_group" + NO_GROUP),
    *(({"ranks": ranks}, text) for ranks, text in WRONG_RANKS),
]
WRONG_NAMES = (None, "", 7)


def group_with(**given: Any) -> CommunicatorFL:
    """The communicator of both ranks, with other arguments where they are ``given``."""
    world = dist.group.WORLD
    right = {"cpu_group": world, "device_group": world, "device": "cpu", "ranks": [0, 1], "name": "tp:0"}
    return CommunicatorFL(**{**right, "timeout_s": ENDLESS_S, **given})


def refused(**given: Any) -> str:
    """What is said of a group that is not made."""
    with pytest.raises((CommError, ValueError, RuntimeError, TypeError)) as raised:
        group_with(**given)
    return f"{raised.type.__name__}: {raised.value}".partition("\n")[0]


def works() -> None:
    """Both ranks make the group, and use it."""
    group = group_with()
    assert group.all_reduce(torch.ones(1)).item() == 2.0
    group.destroy()


def wrong_on_one(context: RankContext, wrong: int) -> list[str]:
    """One rank is given what is wrong, the other one waits for it; the group can be made each time after."""
    texts = []
    for given, _ in WRONG:
        context.note(str(given))
        texts.append(refused(**(given if context.rank == wrong else {})))
        dist.barrier()  # a rank that comes late would join the one that is there again
        works()
    return texts


@pytest.mark.parametrize("wrong", [0, 1])
def test_what_is_wrong_on_one_rank_is_told_to_the_other(wrong: int) -> None:
    """Given a wrong argument on one rank, then that one gets an error that says what is allowed, and the other one,
    which waits without a limit, hears its words; after that they can make the group."""
    results = run_ranks(wrong_on_one, 2, wrong)
    for (_, words), here, there in zip(WRONG, results[wrong], results[1 - wrong], strict=True):
        assert words.format(own=wrong) in here
        assert there.startswith(f"AgreementError: group tp:0, global rank {1 - wrong} of [0, 1]: 'announce candidates'")
        assert f"global rank {wrong} has left the creation of the group with {here.rstrip('.')}" in there


def wrong_setting(_: RankContext) -> str:
    """The group is made with the settings of the environment."""
    text = refused()
    dist.barrier()  # torch.distributed's store may end with rank 0
    return text


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_wrong_setting_of_one_rank_is_told_to_the_other(wrong: int) -> None:
    """Given a rank whose environment has no time limit where one belongs, then the other one hears of it."""

    def environment(rank: int) -> dict[str, str]:
        return {"SGLANG_FL_COMM_TIMEOUT_S": "nan"} if rank == wrong else {}

    results = run_ranks(wrong_setting, 2, env=environment)
    here, there = results[wrong], results[1 - wrong]
    assert "SGLANG_FL_COMM_TIMEOUT_S" in here
    assert f"global rank {wrong} has left the creation of the group with {here.rstrip('.')}" in there


def wrong_on_both(context: RankContext) -> tuple[list[str], list[str]]:
    """All ranks are given the same wrong ranks, then the same wrong names."""
    texts = [refused(ranks=ranks) for ranks, _ in WRONG_RANKS]
    names = [refused(name=name) for name in WRONG_NAMES]
    works()
    return texts, names


def test_ranks_and_names_that_cannot_be_are_refused_everywhere() -> None:
    """Given ranks that do not exist, that are there twice or are none, or a name that is none, the same on all ranks
    and without a limit, then each rank gets an error that says what is allowed."""
    for own, (texts, names) in enumerate(run_ranks(wrong_on_both, 2)):
        assert texts == [f"CommError: {words.format(own=own)}" for _, words in WRONG_RANKS]
        assert names == [
            f"CommError: name is {name!r}; allowed is a text that is not empty, the same on all ranks of the group"
            for name in WRONG_NAMES
        ]


def has_begun(number: int) -> None:
    """Return once a rank is in the creation of that number."""
    distributed_c10d._get_default_store().wait([f"sglang_fl/tp:0/[0, 1]/{number}/begun"])


def wrong_one_after_the_other(context: RankContext) -> str:
    """Rank 0 has had its error and waits in the next creation, before rank 1 comes to the first."""
    if context.rank == 1:
        has_begun(2)
    text = refused(timeout_s=math.nan)
    works()
    return text


def test_who_is_late_with_an_error_that_all_have_does_not_end_the_next_creation() -> None:
    """Given the same wrong value on both ranks, when rank 0 makes the group anew before rank 1 has had its error, then
    that error is none of the new creation, and both make the group."""
    assert all("timeout_s is nan" in text for text in run_ranks(wrong_one_after_the_other, 2))


def wrong_after_others_gave_up(context: RankContext) -> list[str]:
    """Rank 0 gives up for want of rank 1 and waits in the next creation, to which rank 1 comes with an error."""
    if context.rank == 0:
        texts = [refused(timeout_s=0.5), refused()]
    else:
        has_begun(2)
        texts = [refused(timeout_s=math.nan)]
    dist.barrier()
    return texts


def test_who_was_missed_tells_its_error_where_the_others_are() -> None:
    """Given a creation that rank 0 gave up for want of rank 1, when rank 0 waits in the next one and rank 1 comes for
    the first time, with a wrong value, then rank 0 hears of it."""
    (missed, told), (wrong,) = run_ranks(wrong_after_others_gave_up, 2)
    assert missed.startswith("AgreementError: ") and "[1] did not reach 'announce candidates' within 0.5 s" in missed
    assert f"global rank 1 has left the creation of the group with {wrong.rstrip('.')}" in told


def hooks_dead_on_one(context: RankContext) -> str:
    """SGLang has made a group; on rank 1 a hook of the plugin is not in use."""
    coordinator = SimpleNamespace(
        unique_name="tp:0", ranks=[0, 1], device="cpu", cpu_group=dist.group.WORLD, device_group=dist.group.WORLD
    )
    hooks = [Hook("json.dumps", print)] if context.rank == 1 else []
    groups = Groups(load_settings(platform="cpu"), {}, frozenset(), hooks)
    with pytest.raises((HookError, AgreementError)) as raised:
        groups._attach(coordinator, False)
    dist.barrier()
    return f"{raised.type.__name__}: {raised.value}"


def test_a_rank_without_its_hooks_tells_the_others() -> None:
    """Given one of SGLang's groups, when a rank refuses it for a hook that is not live, then the other hears of it."""
    importlib.import_module("sglang.srt.distributed.parallel_state")  # once, before the ranks are forked
    waiting, dead = run_ranks(hooks_dead_on_one, 2)
    assert dead.startswith("HookError: sglang_fl: required hooks are not live: json.dumps: SGLang did not apply")
    assert f"global rank 1 has left the creation of the group with {dead.rstrip('.')}" in waiting
