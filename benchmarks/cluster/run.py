"""Runs parts one after another, each in a process of its own that ends at its limit, until the time is over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cluster.judge import Ended, Result, judge, not_run
from benchmarks.cluster.parts import Part
from benchmarks.record import ROOT

# With less than this left no part is begun.
LEAST_S = 30.0
# For a part to stop what it has started.
STOP_S = 15.0


def run(
    parts: Iterable[Part],
    out: Path,
    is_on_gpu: bool,
    limit_s: float,
    environment: Mapping[str, str],
    tell: Callable[[Result], None],
    kept: Mapping[str, Result],
) -> list[Result]:
    """All parts; what cannot be run, or for which no time is left, has that as its result.

    Args:
        parts: in their order.
        out: folder of records and logs; it is there.
        is_on_gpu: whether bars of time are held.
        limit_s: for all together.
        environment: of all commands, on top of this process's.
        tell: is given each result.
        kept: results of an earlier run by the part's name, in the place of a new one.
    """
    began, results = time.monotonic(), []
    for part in parts:
        left_s = limit_s - (time.monotonic() - began) - STOP_S
        if part.name in kept:
            result = kept[part.name]
        elif part.cannot:
            result = not_run(part, part.cannot)
        elif left_s < LEAST_S:
            result = not_run(part, f"the limit of {limit_s:g} s for all is reached")
        else:
            part_s = min(part.limit_s, left_s)
            ended = execute(part.arguments(out, part_s), out / part.file, part_s, environment)
            result = judge(part, ended, part_s, is_on_gpu)
        results.append(result)
        tell(result)
    return results


def execute(command: Sequence[str], place: Path, limit_s: float, environment: Mapping[str, str]) -> Ended:
    """Run one command, with its log in ``place`` with ``.log`` and its record in ``.json``; nothing of it is left."""
    log, record = Path(f"{place}.log"), Path(f"{place}.json")
    record.unlink(missing_ok=True)
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    return Ended(code, time.monotonic() - start, _content(record), log.read_text(errors="replace"))


def _content(record: Path) -> dict[str, Any]:
    """Of the record that a command left; one that was ended in the middle of it may have left a part."""
    if not record.exists():
        return {}
    try:
        content: dict[str, Any] = json.loads(record.read_text())
    except ValueError as error:
        return {"failed": {"its record": f"{record} is none: {error}"}}
    return content


def _end(process: subprocess.Popen[bytes]) -> None:
    """Politely, then by force, everything of the session; servers have sessions of their own, that end with it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            continue
