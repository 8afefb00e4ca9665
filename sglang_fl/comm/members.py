"""What a group is to be made of, checked before its ranks wait for each other: name, ranks, process groups."""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import torch.distributed as dist

from sglang_fl.comm.errors import CommError
from sglang_fl.comm.exchange import Creation


def checked_name(given: object) -> str:
    """``given`` as the name of a group; local.

    Raises:
        CommError: it is no text, or an empty one.
    """
    if isinstance(given, str) and given:
        return given
    raise CommError(f"name is {given!r}; allowed is a text that is not empty, the same on all ranks of the group")


def checked_ranks(name: str, given: Any) -> tuple[int, ...]:
    """``given`` as the global ranks of the group ``name``, in group order; local.

    Raises:
        CommError: they are no whole numbers, some do not exist or are there twice, or this rank is not among them.
    """
    size = dist.get_world_size()
    allowed = f"allowed are global ranks from 0 to {size - 1}, each once: those of which the process groups were made"
    try:
        ranks = tuple(operator.index(rank) for rank in given)
    except TypeError:
        raise CommError(f"group {name}: ranks is {given!r}; {allowed}") from None
    own, head = dist.get_rank(), f"group {name}: global rank {dist.get_rank()}"
    absent = sorted({rank for rank in ranks if not 0 <= rank < size})
    twice = sorted(rank for rank, count in Counter(ranks).items() if count > 1)
    if absent:
        raise CommError(f"{head} was given the ranks {list(ranks)}, of which {absent} do not exist; {allowed}")
    if twice:
        raise CommError(f"{head} was given the ranks {list(ranks)}, with {twice} more than once; {allowed}")
    if own not in ranks:
        raise CommError(f"{head} is not among its ranks {list(ranks)}; {allowed}")
    return ranks


def check_groups(name: str, **groups: object) -> None:
    """Each of ``groups``, by the caller's name for it, is a process group that this rank is in; local.

    Raises:
        CommError: names the one that is none.
    """
    for parameter, given in groups.items():
        if not isinstance(given, dist.ProcessGroup):
            raise CommError(
                f"group {name}: {parameter} is {given!r}; allowed is a process group of torch.distributed, as "
                f"dist.new_group returns it on the ranks of the group"
            )


def creation_of(name: object, ranks: object, cpu_group: object) -> Creation:
    """Where the ranks of a group meet to make it. Local; wrong ranks are told to those of ``cpu_group``.

    Raises:
        CommError: see :func:`checked_name` and :func:`checked_ranks`.
    """
    group = checked_name(name)
    try:
        return Creation(group, checked_ranks(group, ranks))
    except CommError as error:
        _tell(group, cpu_group, error)
        raise


def _tell(name: str, cpu_group: object, error: CommError) -> None:
    """Where the others wait if theirs are the ranks of ``cpu_group``, in its order; any other ones hear nothing."""
    if isinstance(cpu_group, dist.ProcessGroup):
        members = tuple(dist.get_process_group_ranks(cpu_group))
        if len(members) > 1:
            Creation(name, members).give_up(error)
