"""The cases of the matrix: what happens to one rank, where, and what the others must say of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

CREATION_LIMIT_S = 4.0
LIMIT_S = 2.0
ALLOWANCE_S = 2.0
LARGE = 16 * 2**20  # elements of float32: 64 MiB


class Fault(str, Enum):
    """What happens to the rank."""

    KILL = "kill -9"
    STOP = "SIGSTOP"
    RAISE = "exception"


class Point(str, Enum):
    """Where in the life of the group it happens."""

    BEFORE_CREATION = "before creation"
    DURING_CREATION = "during creation"
    IN_ALL_REDUCE = "in the middle of a 64 MiB all_reduce"
    BETWEEN_CALLS = "between calls"
    IN_GROUP = "inside a group"
    IN_TRANSFER = "in a point-to-point"

    @property
    def is_creation(self) -> bool:
        """Whether there is no group yet."""
        return self in (Point.BEFORE_CREATION, Point.DURING_CREATION)


@dataclass(frozen=True)
class Case:
    """One fault at one point in a world of ``size`` ranks on one backend; ``victim`` is the rank that it happens to."""

    backend: str
    size: int
    fault: Fault
    point: Point
    victim: int

    def __str__(self) -> str:
        return f"{self.backend}, {self.size} ranks, {self.fault.value} of rank {self.victim} {self.point.value}"

    @property
    def survivors(self) -> list[int]:
        """The other ranks."""
        return [rank for rank in range(self.size) if rank != self.victim]

    def call(self, rank: int) -> str:
        """A pattern of what that rank waits in. An exception inside a group ends it: what was called there is done."""
        is_receiver = rank == self.receiver and not (self.fault is Fault.RAISE and self.point is Point.IN_GROUP)
        return (RECEIVERS_CALLS if is_receiver and self.point in RECEIVERS_CALLS else CALLS)[self.point]

    @property
    def receiver(self) -> int:
        """The rank that the victim sends to."""
        return (self.victim + 1) % self.size

    @property
    def limit_s(self) -> float:
        """Within which, and two seconds, the others must have ended."""
        return CREATION_LIMIT_S if self.point.is_creation else LIMIT_S


# What the others say of the rank. Where the rank that holds torch.distributed's store is gone, nobody can tell whether
# it said anything before. An exception that comes into a call of torch's leaves it under way.
ABSENCE = {
    Fault.KILL: r"was killed or crashed|has ended",
    Fault.STOP: r"is stopped \(SIGSTOP, a debugger\)",
    Fault.RAISE: r"ended by itself; its log may hold an error|has ended|has left the call, which was under way",
}

# What may be said beside it: of a rank that waits for the victim in an earlier call, and of one that has found it
# missing and taken the store along.
BEHIND = ("is alive and has not entered the call", "has ended")

# How the call is named.
CALLS = {
    Point.IN_ALL_REDUCE: rf"all_reduce float32\[{LARGE}\]",
    Point.BETWEEN_CALLS: r"all_reduce float32\[5\]",
    Point.IN_GROUP: r"all_reduce float32\[3\]",
    Point.IN_TRANSFER: r"all_reduce float32\[3\]",
}
# The same of the one rank that waits for the victim's data; the others have gone on to the next call.
RECEIVERS_CALLS = {Point.IN_GROUP: r"group_end", Point.IN_TRANSFER: r"recv float32\[7\] rank \d"}
