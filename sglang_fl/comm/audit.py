"""SGLANG_FL_COMM_AUDIT: what each process's groups carried and what our hooks cost, written off the hot path."""

from __future__ import annotations

import functools
import json
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch

from sglang_fl.comm.ledger import Ledger
from sglang_fl.comm.types import Transport, Work

logger = logging.getLogger("sglang_fl.comm")


@dataclass
class HookClock:
    """Nanoseconds spent in our hooks and, within them, in the transports; the difference is our own cost."""

    calls: int = 0
    hooks_ns: int = 0
    transports_ns: int = 0


def audited_hook(function: Callable[..., Any], name: str, clock: HookClock, ledger: Ledger) -> Callable[..., Any]:
    """An AROUND hook of a coordinator's method that also counts its time and books the call.

    A hook that is reached from within another counts once; a group without a communicator is not counted.
    """

    @functools.wraps(function)
    def audited(original: Callable[..., Any], coordinator: Any, *arguments: Any, **named: Any) -> Any:
        communicator = coordinator.fl_communicator
        if communicator is None or ledger.depth:
            return function(original, coordinator, *arguments, **named)
        ledger.carried(communicator.name, name, communicator.backend)
        ledger.depth += 1
        start = perf_counter_ns()
        try:
            return function(original, coordinator, *arguments, **named)
        finally:
            clock.hooks_ns += perf_counter_ns() - start
            clock.calls += 1
            ledger.depth -= 1

    return audited


class TimedTransport(Transport):
    """A transport whose calls are counted as time in the library."""

    def __init__(self, inner: Transport, clock: HookClock) -> None:
        self.inner = inner
        self.name = inner.name
        self.capabilities = inner.capabilities
        self._clock = clock

    def exceptions(self) -> dict[str, str]:
        """See :meth:`Transport.exceptions`."""
        return self.inner.exceptions()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """See :meth:`Transport.all_reduce`."""
        self._timed(self.inner.all_reduce, tensor)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """See :meth:`Transport.all_gather`."""
        self._timed(self.inner.all_gather, output, tensor)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """See :meth:`Transport.reduce_scatter`."""
        self._timed(self.inner.reduce_scatter, output, tensor)

    def reduce(self, tensor: torch.Tensor, dst: int) -> None:
        """See :meth:`Transport.reduce`."""
        self._timed(self.inner.reduce, tensor, dst)

    def broadcast(self, tensor: torch.Tensor, src: int) -> Work | None:
        """See :meth:`Transport.broadcast`."""
        return self._timed_work(self._timed(self.inner.broadcast, tensor, src))

    def gather(self, output: torch.Tensor | None, tensor: torch.Tensor, dst: int) -> None:
        """See :meth:`Transport.gather`."""
        self._timed(self.inner.gather, output, tensor, dst)

    def send(self, tensor: torch.Tensor, dst: int) -> Work:
        """See :meth:`Transport.send`."""
        work: Work = self._timed(self.inner.send, tensor, dst)
        return work

    def recv(self, tensor: torch.Tensor, src: int) -> Work:
        """See :meth:`Transport.recv`."""
        work = self._timed_work(self._timed(self.inner.recv, tensor, src))
        assert work is not None
        return work

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        self.inner.close()

    def _timed(self, function: Callable[..., Any], *arguments: Any) -> Any:
        start = perf_counter_ns()
        try:
            return function(*arguments)
        finally:
            self._clock.transports_ns += perf_counter_ns() - start

    def _timed_work(self, work: Work | None) -> Work | None:
        return None if work is None else _TimedWork(work, self._timed)


@dataclass(frozen=True)
class _TimedWork:
    work: Work
    timed: Callable[..., Any]

    def wait(self) -> Any:
        return self.timed(self.work.wait)

    def is_completed(self) -> bool:
        return self.work.is_completed()


class AuditWriter:
    """Writes what ``collect`` returns as JSON, whole or not at all, twice a second while it changes.

    Global rank 0 writes ``path``, the others ``path.rankN``. Serving processes are killed, not ended, so
    nothing waits for an end.
    """

    interval_s = 0.5

    def __init__(self, path: Path, rank: int, collect: Callable[[], dict[str, Any]]) -> None:
        self.path = path if rank == 0 else path.with_name(f"{path.name}.rank{rank}")
        self._collect = collect
        self._written = ""
        self._stop = threading.Event()
        threading.Thread(target=self._run, name="sglang_fl-audit", daemon=True).start()

    def write(self) -> None:
        """Write now, if anything has changed."""
        text = json.dumps(self._collect(), indent=1)
        if text == self._written:
            return
        partial = self.path.with_name(f"{self.path.name}.partial")
        partial.write_text(text)
        partial.replace(self.path)
        self._written = text

    def _run(self) -> None:
        while not self._stop.wait(self.interval_s):
            try:
                self.write()
            except OSError as error:
                logger.error("[sglang_fl] SGLANG_FL_COMM_AUDIT: %s cannot be written: %s", self.path, error)
                return
