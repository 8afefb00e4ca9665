"""SGLANG_FL_COMM_AUDIT: what each process's groups carried and what our hooks cost, written off the hot path."""

from __future__ import annotations

import functools
import json
import logging
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch

from sglang_fl.comm.ledger import Ledger
from sglang_fl.comm.recorder import Recorder
from sglang_fl.comm.types import Operation, Transport, Work

logger = logging.getLogger("sglang_fl.comm")


@dataclass
class Carried:
    """What one group's transport carried of one operation: calls, bytes of the larger tensor, time on the host."""

    calls: int = 0
    bytes: int = 0
    host_ns: int = 0


@dataclass
class HookClock:
    """Nanoseconds spent in our hooks and, within them, in the transports; the difference is our own cost.

    ``carried`` has what was carried by (group, operation, backend).
    """

    calls: int = 0
    hooks_ns: int = 0
    transports_ns: int = 0
    carried: defaultdict[tuple[str, str, str], Carried] = field(default_factory=lambda: defaultdict(Carried))

    def status(self) -> dict[str, Any]:
        """For the audit."""
        rows = [
            {"group": group, "operation": operation, "backend": backend, **vars(carried)}
            for (group, operation, backend), carried in list(self.carried.items())
        ]
        totals = {"calls": self.calls, "hooks_ns": self.hooks_ns, "transports_ns": self.transports_ns}
        return {**totals, "carried": rows}


def audited_hook(function: Callable[..., Any], name: str, clock: HookClock, ledger: Ledger) -> Callable[..., Any]:
    """An AROUND hook of a coordinator's method that also counts its time and books the call.

    A hook that is reached from within another counts once; a group without a communicator is not counted.
    """

    @functools.wraps(function)
    def audited(original: Callable[..., Any], coordinator: Any, *arguments: Any, **named: Any) -> Any:
        communicator = coordinator.fl_communicator
        if communicator is None or ledger.depth:
            return function(original, coordinator, *arguments, **named)
        ledger.carried(communicator.name, name, communicator.carried_by)
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
    """A transport whose calls, bytes and time are counted by operation; only where an audit or metrics are on."""

    def __init__(self, inner: Transport, group: str, clock: HookClock) -> None:
        self.inner = inner
        self.name = inner.name
        self.extra_bytes = inner.extra_bytes
        self.registrar = inner.registrar
        self.capabilities = inner.capabilities
        self._group = group
        self._clock = clock
        self._carriers = inner.exceptions()

    def exceptions(self) -> dict[str, str]:
        """See :meth:`Transport.exceptions`."""
        return self._carriers

    def recorders(self) -> tuple[Recorder, ...]:
        """See :meth:`Transport.recorders`."""
        return self.inner.recorders()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """See :meth:`Transport.all_reduce`."""
        self._timed(Operation.ALL_REDUCE, tensor, self.inner.all_reduce, tensor)

    def all_reduce_result(self, tensor: torch.Tensor) -> torch.Tensor:
        """See :meth:`Transport.all_reduce_result`."""
        result: torch.Tensor = self._timed(Operation.ALL_REDUCE, tensor, self.inner.all_reduce_result, tensor)
        return result

    def all_reduce_new(self, tensor: torch.Tensor) -> torch.Tensor:
        """See :meth:`Transport.all_reduce_new`."""
        result: torch.Tensor = self._timed(Operation.ALL_REDUCE, tensor, self.inner.all_reduce_new, tensor)
        return result

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """See :meth:`Transport.all_gather`."""
        self._timed(Operation.ALL_GATHER, output, self.inner.all_gather, output, tensor)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """See :meth:`Transport.reduce_scatter`."""
        self._timed(Operation.REDUCE_SCATTER, tensor, self.inner.reduce_scatter, output, tensor)

    def reduce(self, tensor: torch.Tensor, dst: int) -> None:
        """See :meth:`Transport.reduce`."""
        self._timed(Operation.REDUCE, tensor, self.inner.reduce, tensor, dst)

    def broadcast(self, tensor: torch.Tensor, src: int) -> Work | None:
        """See :meth:`Transport.broadcast`."""
        work: Work | None = self._timed(Operation.BROADCAST, tensor, self.inner.broadcast, tensor, src)
        return None if work is None else _TimedWork(work, self._waiting(Operation.BROADCAST))

    def gather(self, output: torch.Tensor | None, tensor: torch.Tensor, dst: int) -> None:
        """See :meth:`Transport.gather`."""
        self._timed(Operation.GATHER, tensor, self.inner.gather, output, tensor, dst)

    def send(self, tensor: torch.Tensor, dst: int) -> Work:
        """See :meth:`Transport.send`."""
        work: Work = self._timed(Operation.SEND, tensor, self.inner.send, tensor, dst)
        return work

    def recv(self, tensor: torch.Tensor, src: int) -> Work:
        """See :meth:`Transport.recv`."""
        work: Work = self._timed(Operation.RECV, tensor, self.inner.recv, tensor, src)
        return _TimedWork(work, self._waiting(Operation.RECV))

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        self.inner.close()

    def _timed(self, operation: Operation, data: torch.Tensor, function: Callable[..., Any], *arguments: Any) -> Any:
        start = perf_counter_ns()
        try:
            return function(*arguments)
        finally:
            carried = self._carried(operation)
            carried.calls += 1
            carried.bytes += data.numel() * data.element_size()
            self._spent(carried, perf_counter_ns() - start)

    def _waiting(self, operation: Operation) -> Callable[[Callable[[], Any]], Any]:
        def timed(wait: Callable[[], Any]) -> Any:
            start = perf_counter_ns()
            try:
                return wait()
            finally:
                self._spent(self._carried(operation), perf_counter_ns() - start)

        return timed

    def _carried(self, operation: Operation) -> Carried:
        backend = self._carriers.get(operation.value, self.name)
        return self._clock.carried[(self._group, operation.value, backend)]

    def _spent(self, carried: Carried, elapsed_ns: int) -> None:
        carried.host_ns += elapsed_ns
        self._clock.transports_ns += elapsed_ns


@dataclass(frozen=True)
class _TimedWork:
    work: Work
    timed: Callable[[Callable[[], Any]], Any]

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
