"""The plugin in a real server at tp=2: hooks, decode steps and readiness beside SGLang alone; hostcx beside torch."""

from __future__ import annotations

import json
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from benchmarks.bench_binding import hostcx
from benchmarks.figures import Bar, Figure, Kind, alternate
from sglang_fl.testing.server import Server
from sglang_fl.testing.tiny_model import DEFAULT_PROMPTS, write_tiny_model

KIND = Kind.E2E
NEEDS_GPU = False

STEPS = 200
DECODE_ROUNDS = 7
START_ROUNDS = 4
LARGEST_SHARE_PERCENT = 1.0
LARGEST_STEP_RATIO = 1.02
LARGEST_START_DELAY_S = 2.0
AUDIT_WAIT_S = 1.5
PROMPT = DEFAULT_PROMPTS[0]
NATIVE = {"SGLANG_PLUGINS": "__none__"}


def run() -> list[Figure]:
    """Four figures; each server is stopped while another is measured."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_tiny_model(folder / "model")
        return [
            _hook_share(model, folder),
            _decode_step(model, folder),
            _collectives(model, folder),
            _ready(model, folder),
        ]


def _hook_share(model: Path, folder: Path) -> Figure:
    audit = folder / "audit.json"
    with Server(model, folder, tp=2, environment={"SGLANG_FL_COMM_AUDIT": str(audit)}) as server:
        server.generate(PROMPT, STEPS)
        samples = []
        for _ in range(DECODE_ROUNDS):
            before = _own_ns(audit)
            start = time.perf_counter()
            server.generate(PROMPT, STEPS)
            elapsed_ns = (time.perf_counter() - start) * 1e9
            after = _own_ns(audit)
            worst = max(after[rank] - before[rank] for rank in after)
            samples.append(100.0 * worst / elapsed_ns)
    return Figure(
        "time in our hooks, without the library's, per decode step at tp=2, worst rank",
        "% of step",
        samples,
        bar=Bar.at_most(LARGEST_SHARE_PERCENT),
    )


def _own_ns(audit: Path) -> dict[str, int]:
    """Nanoseconds in our hooks less those in the transports, by rank."""
    return {name: clock["hooks_ns"] - clock["transports_ns"] for name, clock in _clocks(audit).items()}


def _clocks(audit: Path) -> dict[str, dict[str, int]]:
    """Each rank's clock; waits until the audit has been written."""
    time.sleep(AUDIT_WAIT_S)
    written = (path for path in audit.parent.glob(f"{audit.name}*") if path.suffix != ".partial")
    clocks = {path.name: json.loads(path.read_text())["clock"] for path in written}
    if len(clocks) != 2:
        raise RuntimeError(f"2 scheduler processes were to write {audit}*, found {sorted(clocks)}")
    return clocks


def _collectives(model: Path, folder: Path) -> Figure:
    audits = {name: folder / f"audit-{name}.json" for name in ("flagcx", "torch")}
    environments = {
        name: {
            "SGLANG_FL_DIST_BACKEND": name,
            "FLAGCX_PATH": str(hostcx()),
            "HOSTCX_QUIET": "1",
            "SGLANG_FL_COMM_AUDIT": str(audit),
        }
        for name, audit in audits.items()
    }
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(Server(model, folder, tp=2, environment=environment))
            for name, environment in environments.items()
        }
        for server in servers.values():
            server.generate(PROMPT, STEPS)

        def per_step_us(name: str) -> float:
            other = servers["torch" if name == "flagcx" else "flagcx"]
            with _stopped(other):
                before = _clocks(audits[name])
                servers[name].generate(PROMPT, STEPS)
                after = _clocks(audits[name])
            # The faster rank of a step waits for the slower one; the sum over the ranks is what a step costs.
            total = sum(after[rank]["transports_ns"] - before[rank]["transports_ns"] for rank in after)
            return total / 1e3 / STEPS / len(after)

        samples = alternate(
            {"flagcx": lambda: per_step_us("flagcx"), "torch": lambda: per_step_us("torch")}, DECODE_ROUNDS, 1
        )
    return Figure(
        "time in collectives per decode step at tp=2, FlagCX's API on hostcx, mean of both ranks",
        "us",
        samples["flagcx"],
        samples["torch"],
        "torch.distributed (gloo)",
        Bar.ratio_at_most(1.0),
    )


def _decode_step(model: Path, folder: Path) -> Figure:
    with ExitStack() as stack:
        plugin = stack.enter_context(Server(model, folder, tp=2))
        native = stack.enter_context(Server(model, folder, tp=2, environment=NATIVE))
        expected = {len(plugin.generate(PROMPT, STEPS)), len(native.generate(PROMPT, STEPS))}
        if expected != {STEPS}:
            raise RuntimeError(f"{STEPS} tokens were asked for, {expected} came")

        def step_ms(measured: Server, stopped: Server) -> float:
            with _stopped(stopped):
                start = time.perf_counter()
                measured.generate(PROMPT, STEPS)
                return (time.perf_counter() - start) * 1e3 / STEPS

        samples = alternate(
            {"plugin": lambda: step_ms(plugin, native), "native": lambda: step_ms(native, plugin)}, DECODE_ROUNDS, 1
        )
    return Figure(
        f"decode step at tp=2, mean of {STEPS}",
        "ms",
        samples["plugin"],
        samples["native"],
        "SGLang alone",
        Bar.ratio_at_most(LARGEST_STEP_RATIO),
    )


@contextmanager
def _stopped(server: Server) -> Iterator[None]:
    """An idle server polls for requests and would take a core from the one that is measured."""
    _signal_all(server, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal_all(server, signal.SIGCONT)


def _signal_all(server: Server, number: signal.Signals) -> None:
    for process in server.tree():
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def _ready(model: Path, folder: Path) -> Figure:
    def ready_s(environment: dict[str, str]) -> float:
        with Server(model, folder, tp=2, environment=environment) as server:
            return server.ready_after_s

    samples = alternate({"plugin": lambda: ready_s({}), "native": lambda: ready_s(NATIVE)}, START_ROUNDS, 0)
    return Figure(
        "server ready at tp=2",
        "s",
        samples["plugin"],
        samples["native"],
        "SGLang alone",
        Bar.difference_at_most(LARGEST_START_DELAY_S),
    )
