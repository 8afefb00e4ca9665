"""What records a transport's calls, as the monitor and the dumps see it: the last calls, in fixed memory."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from sglang_fl.comm.errors import CommError

if TYPE_CHECKING:
    import torch

SIZE = 1024  # calls kept for each recorder


@dataclass(frozen=True)
class RecordedCall:
    """One call that a transport handed to its library, as it is shown and dumped.

    Attributes:
        number: of the recorder's calls, from 1; equal on all ranks for the same collective.
        operation: of the transport: all_reduce, broadcast, send, ...
        dtype: name without ``torch.``; empty where there is none.
        count: elements as the library was told them.
        peer: root, source or destination within the group; None where the operation has none.
        stream: raw handle of the stream it was enqueued on, 0 for host memory or the default stream.
        captured: it was captured into a graph, not run.
        place: file, line and function from which the group was called; empty where unknown.
        time_in_s: when it was entered, seconds since the epoch.
        time_out_s: when it returned, for work on a device when it was enqueued; None while it has not.
        error: what it ended with, if not with success.
        entered_s: when it was entered, ``time.monotonic()`` of its process; not in a dump. Ages come from it: the
            clock of the day may be set.
    """

    number: int
    operation: str
    dtype: str = ""
    count: int = 0
    peer: int | None = None
    stream: int = 0
    captured: bool = False
    place: str = ""
    time_in_s: float = 0.0
    time_out_s: float | None = None
    error: str = ""
    entered_s: float = field(default=0.0, compare=False)

    def what(self) -> str:
        """Operation, dtype, elements and root: what all ranks of a collective must have in common."""
        tensor = f" {self.dtype}[{self.count}]" if self.dtype else ""
        return f"{self.operation}{tensor}{'' if self.peer is None else f' rank {self.peer}'}"

    def row(self) -> dict[str, Any]:
        """For JSON; :func:`from_row` reads it."""
        return {name: value for name, value in asdict(self).items() if name != "entered_s"}


def from_row(row: Mapping[str, Any]) -> RecordedCall:
    """The call that :meth:`RecordedCall.row` wrote.

    Raises:
        TypeError: a key is missing or unknown.
    """
    return RecordedCall(**row)


def day_offset_ns() -> int:
    """What to add to ``time.monotonic_ns()`` for nanoseconds since the epoch, as the clock of the day is now."""
    return time.time_ns() - time.monotonic_ns()


@dataclass(frozen=True)
class Mark:
    """A device event behind a call: once it is done, so are that call and all before it on the recorder's stream.

    Attributes:
        number: of the last call before the event.
        event: with ``query()``, as torch's device events.
        time_s: when it was recorded, ``time.monotonic()``.
        is_close: nothing was enqueued between the call and the event, which tells of that call alone.
    """

    number: int
    event: Any
    time_s: float
    is_close: bool = False


class Recorder(ABC):
    """The calls of one library communicator, of one transport without such, or of one direction of a pair of ranks.

    Its methods may be called from any thread. All but :meth:`abort` are local and return at once.

    Attributes:
        name: group and backend, for a pair also the direction: ``tp:0 flagcx``, ``pp:0 flagcx 0>1``.
        ranks: the global ranks that take part, in the order of the library's ranks.
        device: where its tensors live.
        explainer: the monitor's answer to "why did this call fail?"; None while nobody watches.
        leaver: tells the monitor that a call was left under way: its number, and by what; None while nobody watches.
        refusal: why every further call raises; None while they do not.
        limit_s: for each of its calls where that is less than the group's, seconds.
    """

    name: str
    ranks: tuple[int, ...]
    device: torch.device
    explainer: Callable[[CommError, tuple[int, ...]], CommError] | None = None
    leaver: Callable[[int, BaseException], None] | None = None
    refusal: str | None = None
    limit_s: float = math.inf

    @abstractmethod
    def entered(self) -> int:
        """How many calls were entered so far: the number of the last one."""

    @abstractmethod
    def calls(self) -> list[RecordedCall]:
        """What is kept, oldest first."""

    @abstractmethod
    def under_way(self) -> RecordedCall | None:
        """The oldest call that has not returned; on a device a call returns when it is enqueued."""

    @abstractmethod
    def ask_for_mark(self) -> None:
        """Have the next call outside of a capture followed by a device event. Nothing for host memory."""

    @abstractmethod
    def take_mark(self) -> Mark | None:
        """The latest mark since the last time this was called; None if there is none."""

    @abstractmethod
    def mark_now(self) -> Mark | None:
        """Record an event behind the last call from this thread.

        None if there is nothing to mark (no call, or host memory) or the stream is being captured. The caller makes
        sure that no capture begins meanwhile (:class:`sglang_fl.comm.captures.Captures`).
        """

    @abstractmethod
    def refuse(self, reason: str) -> None:
        """Let every further call raise CommError(reason), :meth:`explained`, before anything reaches the library.

        So does a call that is under way, if the library ends it with an error.
        """

    @abstractmethod
    def abort(self, limit_s: float) -> bool:
        """On host memory, make a call that is under way in the library return with an error; False if it cannot."""

    def forked(self, reason: str) -> None:
        """In a fork of the process that made it: let every call raise ``reason``, at the latest once the library fails.

        Takes no lock, since a thread that is gone may hold it.
        """
        self.refusal, self.explainer, self.leaver = reason, None, None

    def explained(self, error: CommError, shape: Sequence[int] = ()) -> CommError:
        """What a call of ``shape`` that failed with ``error`` raises: an error that names who is missing, or ``error``.

        A transport raises the result, in the calling thread, for each failure that a peer may have caused and for a
        call that was refused. It may take two seconds.
        """
        return error if self.explainer is None else self.explainer(error, tuple(shape))

    def left(self, number: int, error: BaseException) -> None:
        """Call ``number`` on host memory was left under way by ``error``, which is no library's: no other may follow.

        Told to the peers as well, where the monitor watches.
        """
        if self.leaver is not None:
            self.leaver(number, error)
        else:
            self.refuse(f"{self.name}: call number {number} was left by {type(error).__name__} while it was under way")

    def has_captured(self) -> bool:
        """Whether any call was ever captured into a graph: what it runs on must not be given up before the graph."""
        return any(call.captured for call in self.calls())

    def last(self) -> RecordedCall | None:
        """The latest call; None if there was none."""
        calls = self.calls()
        return calls[-1] if calls else None
