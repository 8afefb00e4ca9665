"""SGLang's Prometheus metrics get what the groups carried: calls, bytes and host time by group, operation, backend."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from sglang_fl.comm.audit import HookClock

if TYPE_CHECKING:
    from prometheus_client import Counter

LABELS = ("group", "operation", "backend", "rank")


def are_on() -> bool:
    """Whether SGLang collects metrics of several processes here (``--enable-metrics``)."""
    return bool(os.environ.get("PROMETHEUS_MULTIPROC_DIR"))


class MetricsExporter:
    """Adds what a clock counted to Prometheus counters once a second, off the path of the calls."""

    interval_s = 1.0

    def __init__(self, clock: HookClock, rank: int) -> None:
        from prometheus_client import Counter

        self._clock = clock
        self._rank = str(rank)
        self._calls = Counter("sglang_fl_comm_calls", "Calls that a group's transport carried.", LABELS)
        self._bytes = Counter("sglang_fl_comm_bytes", "Bytes of the larger tensor of those calls.", LABELS)
        self._seconds = Counter("sglang_fl_comm_host_seconds", "Host time in those calls, seconds.", LABELS)
        self._told: dict[tuple[str, str, str], tuple[int, int, int]] = {}
        self._stop = threading.Event()
        threading.Thread(target=self._run, name="sglang_fl-metrics", daemon=True).start()

    def update(self) -> None:
        """Add what has come since the last time."""
        for key, carried in list(self._clock.carried.items()):
            now = (carried.calls, carried.bytes, carried.host_ns)
            before = self._told.get(key, (0, 0, 0))
            self._told[key] = now
            labels = dict(zip(LABELS, (*key, self._rank), strict=True))
            scales: tuple[tuple[Counter, float], ...] = ((self._calls, 1), (self._bytes, 1), (self._seconds, 1e-9))
            for (counter, scale), new, old in zip(scales, now, before, strict=True):
                counter.labels(**labels).inc((new - old) * scale)

    def _run(self) -> None:
        while not self._stop.wait(self.interval_s):
            self.update()
