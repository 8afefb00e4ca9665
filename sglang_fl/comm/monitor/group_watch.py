"""What the monitor watches of one group: the recorders of its transports, while they are made and afterwards."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache

from sglang_fl.comm.errors import CommError
from sglang_fl.comm.exchange import Creation
from sglang_fl.comm.monitor.monitor import MONITOR
from sglang_fl.comm.recorder import Recorder
from sglang_fl.comm.types import GroupContext

logger = logging.getLogger("sglang_fl.comm")


@dataclass(eq=False)
class GroupWatch:
    """One group of this process. Held by its communicator alone: when that goes, nothing of it is watched any more.

    Attributes:
        name: of the group.
        limit_s: for an operation, seconds.
        creation_limit_s: for a call while the group is being created, seconds.
        creation: the one by which it is made; None where it needed none.
    """

    name: str
    limit_s: float
    creation_limit_s: float
    creation: Creation | None = None
    _made: list[Recorder] = field(default_factory=list)
    _has_ended: bool = False
    _recorders: weakref.ref[Callable[[], tuple[Recorder, ...]]] | None = None

    @property
    def key(self) -> str:
        """See :class:`sglang_fl.comm.monitor.monitor.Group`."""
        creation = self.creation
        return "" if creation is None else f"{self.name} {list(creation.ranks)} {creation.number}"

    def __call__(self, recorder: Recorder) -> None:
        """Watch ``recorder`` from now on; once the group is created, as long as the group tells of it."""
        if self._has_ended:
            return
        if self._recorders is None:
            self._made.append(recorder)
        self._name(recorder)
        MONITOR.notice(recorder, self.operation_limit_s())

    def created(self, recorders: Callable[[], tuple[Recorder, ...]]) -> None:
        """The group is made: watch what ``recorders``, a method of what the group holds, returns from now on."""
        self._recorders = weakref.WeakMethod(recorders)
        self._made = []

    def ended(self) -> None:
        """The group is given up."""
        self._recorders, self._made, self._has_ended = None, [], True
        MONITOR.part()

    def recorders(self) -> tuple[Recorder, ...]:
        """Those of the group now; more may come with the first transfer between two ranks."""
        method = (lambda: tuple(self._made)) if self._recorders is None else self._recorders()
        found = () if method is None else tuple(method())
        for recorder in found:
            self._name(recorder)
        return found

    def _name(self, recorder: Recorder) -> None:
        # A shared one keeps the name by the group that made it, the first that tells of it.
        MONITOR.made_in(recorder, 0 if self.creation is None else self.creation.number)

    def operation_limit_s(self) -> float:
        """What holds for a call now."""
        return self.limit_s if self._recorders is not None else min(self.limit_s, self.creation_limit_s)


def begin(context: GroupContext) -> GroupContext:
    """The same group at the beginning of its creation, watched from now on; one that has begun stays as it is."""
    if context.creation_ends_s is not None:
        return context
    begun = context.begun()
    return replace(begun, watch=watch_group(begun))


def watch_group(context: GroupContext) -> GroupWatch:
    """``context``'s group under watch, as long as the returned object lives; with one rank there is nothing to see."""
    watch = GroupWatch(context.name, context.operation_timeout_s, context.timeout_s, context.creation)
    if context.world_size > 1 and not context.records:
        _say_unwatched()
    if context.world_size > 1 and context.records:
        try:
            MONITOR.watch(watch)
        except CommError as error:
            ranks = f"global rank {context.ranks[context.rank]} of {list(context.ranks)}"
            text = f"group {context.name}, {ranks}: its calls cannot be watched, so it is not made: {error}"
            raise CommError(text) from error
    return watch


@cache
def _say_unwatched() -> None:
    """Once a process: that it may wait for ever is what whoever switched the watch off must know."""
    logger.warning(
        "[sglang_fl] SGLANG_FL_COMM_RECORD=0: calls of groups are not watched. FlagCX has no limit of its own, on a "
        "device or in host memory: a call whose peer is stopped, or makes another call, waits for ever."
    )


@contextmanager
def creation(context: GroupContext) -> Iterator[GroupContext]:
    """Around a creation, or a part of one that has begun: an error that leaves it on one rank is told to the others."""
    begun = begin(context)
    try:
        with nullcontext() if begun.creation is None else begun.creation.telling():
            yield begun
    finally:
        if begun is not context and isinstance(begun.watch, GroupWatch):
            begun.watch.ended()
