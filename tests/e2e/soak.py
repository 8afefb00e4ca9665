"""A real server at tp=2 on hostcx under thousands of requests: no process of it may grow.

python -m tests.e2e.soak [--requests 2000] [--json soak.json] [--plant memory|descriptors|shared]

Exit code 0: no process grows. 1: one does, or an answer was wrong. With --plant a scheduler leaks on purpose, and the
exit code must be 1. Allocators take some 500 requests to settle: of many fewer than 2,000 they alone may be a miss.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import click
import psutil
from rich.console import Console
from rich.table import Table

from sglang_fl.testing.server import Server
from sglang_fl.testing.tiny_model import Family, write_tiny_model
from tests.e2e.distributions import write_distribution
from tests.e2e.memory import Sample, Verdict, judge, sample

ROOT = Path(__file__).parents[2]
LIMIT_PER_REQUEST = 1024.0
SETTLE_SHARE = 4  # the first quarter of the requests is not judged
ROUND = 25
CLIENTS = 4
PROMPTS = [[3 + (7 * number + place) % 500 for place in range(4 + number % 13)] for number in range(20)]
NEW_TOKENS = 8
QUIET_LIMIT_S = 2.0

# What the schedulers of rank 1 do with each request, by the name that --plant takes.
PLANTS = {
    "memory": "kept.append(bytearray(os.urandom(1024)) * 2)",
    "descriptors": "kept.append(os.open('/dev/null', os.O_RDONLY)) if len(kept) % 100 == 0 else kept.append(None)",
    "shared": "kept.append(SharedMemory(create=True, size=4096)) or kept[-1].unlink() if not kept else kept.append(0)",
}
PLANT = '''
"""A leak, for the soak to find."""
import os
from multiprocessing.shared_memory import SharedMemory

kept = []
requests = 0


def leak(self, recv_req):
    global requests
    requests += 1
    if self.tp_rank == 1 and requests > {after}:
        {action}


def load():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.handle_generate_request", leak, HookType.BEFORE)
'''


class WrongAnswerError(Exception):
    """A prompt got other tokens than before."""


def rounds(server: Server, requests: int) -> Iterator[int]:
    """Ask ``ROUND`` requests at a time from several clients; yields the number answered so far, while all is quiet.

    Raises:
        WrongAnswerError: a prompt got other tokens than before.
        ServerError: the server is gone or answers with an error.
    """
    right: dict[int, list[int]] = {}

    def ask(number: int) -> None:
        prompt = PROMPTS[number % len(PROMPTS)]
        tokens = server.generate(prompt, NEW_TOKENS)
        expected = right.setdefault(number % len(PROMPTS), tokens)
        if tokens != expected:
            raise WrongAnswerError(f"prompt {prompt}: {tokens}, before {expected}")

    with ThreadPoolExecutor(CLIENTS) as clients:
        for done in range(0, requests, ROUND):
            numbers = range(done, min(done + ROUND, requests))
            list(clients.map(ask, numbers))
            yield numbers.stop


def named_processes(server: Server) -> dict[str, psutil.Process]:
    """Each process of the server by a name that tells them apart."""
    names: dict[str, psutil.Process] = {}
    for process in sorted(server.tree(), key=lambda one: one.pid):
        words = process.cmdline()
        title = words[0] if words and words[0].startswith("sglang") else _role(words)
        names[title if title not in names else f"{title} {process.pid}"] = process
    return names


def _role(words: Sequence[str]) -> str:
    text = " ".join(words)
    if "resource_tracker" in text:
        return "resource tracker"
    return "main process" if "launch_server" in text else text[:40]


def quiet_sample(process: psutil.Process, requests: int, before: Sample | None) -> Sample:
    """A sample; a connection that is being closed gets a moment, so that only what stays open counts."""
    deadline_s = time.monotonic() + QUIET_LIMIT_S
    while True:
        found = sample(process.pid, requests)
        if before is None or found.descriptors == before.descriptors or time.monotonic() > deadline_s:
            return found
        time.sleep(0.05)


def soak(server: Server, requests: int) -> dict[str, list[Sample]]:
    """All samples by process. The processes must be the same at the end as at the beginning."""
    samples: dict[str, list[Sample]] = {}
    start_s = said_s = time.monotonic()
    processes = named_processes(server)
    for done in rounds(server, requests):
        for name, process in processes.items():
            series = samples.setdefault(name, [])
            series.append(quiet_sample(process, done, series[-1] if series else None))
        if time.monotonic() - said_s > 10:
            said_s = time.monotonic()
            click.echo(f"{done} of {requests} requests, {said_s - start_s:.0f} s", err=True)
    click.echo(f"{requests} requests in {time.monotonic() - start_s:.0f} s", err=True)
    assert set(named_processes(server)) == set(processes), "a process has come or gone"
    return samples


def start(folder: Path, plant: str | None, after: int) -> Server:
    """The server, not started yet."""
    model = write_tiny_model(folder / "model", Family.QWEN2)
    environment = {
        "FLAGCX_PATH": str(ROOT / "build/hostcx"),
        "SGLANG_FL_DIST_BACKEND": "flagcx",
    }
    if plant is not None:
        source = PLANT.format(action=PLANTS[plant], after=after)
        packages = write_distribution(folder / "packages", "planted_leak", source, "sglang.srt.plugins", "load")
        environment["PYTHONPATH"] = str(packages)
    return Server(
        model, folder, arguments=("--dtype=float32", "--log-level-http=warning"), environment=environment, tp=2
    )


def show(verdicts: Sequence[Verdict]) -> None:
    """The table."""
    table = Table(
        "process",
        "KiB first",
        "KiB last",
        "bytes/request [95 %]",
        "descriptors",
        "threads",
        "KiB of /dev/shm",
        box=None,
    )
    for one in verdicts:
        shared = sum(size for _, size in one.last.shared) // 1024
        slope = f"{one.slope.per_request:.0f} [{one.slope.low:.0f}, {one.slope.high:.0f}]"
        table.add_row(
            one.process,
            *(f"{at.bytes // 1024}" for at in (one.first, one.last)),
            *(slope, f"{one.first.descriptors} to {one.last.descriptors}"),
            *(f"{one.first.threads} to {one.last.threads}", str(shared)),
        )
    Console(width=140).print(table)
    for one in verdicts:
        for problem in one.problems:
            click.echo(f"MISS {one.process}: {problem}")


@click.command()
@click.option("--requests", default=2000, show_default=True, type=click.IntRange(400))
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Keep every sample and the verdicts here.")
@click.option("--plant", type=click.Choice(sorted(PLANTS)), help="Let the scheduler of rank 1 leak.")
def main(requests: int, json_path: Path | None, plant: str | None) -> None:
    """Judge the memory of every process of a server over the last three quarters of the requests."""
    settle = requests // SETTLE_SHARE
    with (
        tempfile.TemporaryDirectory(prefix="sglang_fl-soak-") as folder,
        start(Path(folder), plant, settle) as server,
    ):
        click.echo(f"ready after {server.ready_after_s:.0f} s", err=True)
        assert re.search(r"group \S+ ranks \[0, 1\]: flagcx", server.log()), "the groups are not on FlagCX"
        samples = soak(server, requests)
    verdicts = [
        judge(name, [one for one in series if one.requests >= settle], LIMIT_PER_REQUEST)
        for name, series in samples.items()
    ]
    show(verdicts)
    if json_path is not None:
        document = {
            "requests": requests,
            "judged_from": settle,
            "limit_per_request": LIMIT_PER_REQUEST,
            "plant": plant,
            "verdicts": [asdict(one) for one in verdicts],
            "samples": {name: [asdict(one) for one in series] for name, series in samples.items()},
        }
        json_path.write_text(json.dumps(document, indent=1))
    sys.exit(1 if any(one.problems for one in verdicts) else 0)


if __name__ == "__main__":
    main()
