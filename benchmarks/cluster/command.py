"""``python -m benchmarks.cluster``: all that is to be seen on one machine of several accelerators, in one run.

The self-test of every operation on each backend; the benchmark of all operations and of all routes of an all_reduce,
eager and captured; and servers, SGLang alone and with the plugin in turn, at tp=N, at tp=N/2 x pp=2 and at tp=N with
DP attention, with controls. Each part has a limit of its own, and --limit-s is that of all. With --device cpu it shows
that all of this works at that many ranks: what cannot be seen there, times first of all, is named as not run.

Ends with 0 if everything was run and met, with 1 if anything failed or missed its bar, with 3 if something was not run,
with 2 where the arguments are wrong. FLAGCX_PATH must be set on GPUs; on a CPU its default is build/hostcx.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import record
from benchmarks.cluster.judge import MISSED, Check, Ended, Result, State, exit_code, not_run
from benchmarks.cluster.parts import Machine, Part, parts
from benchmarks.cluster.run import run
from benchmarks.e2e import shapes
from benchmarks.e2e.options import (
    FLAGCX_VARIABLE,
    OptionError,
    broken_record,
    find_flagcx,
    other_commit,
    positive,
    read_record,
    require_file,
    require_once,
    write_whole,
)
from benchmarks.e2e.servers import GPU_ENVIRONMENT
from benchmarks.figures import Kind
from sglang_fl.comm.tools.sizes import seconds

NAME = "cluster"
DEFAULT_LIMIT_S = 7200.0
DEFAULT_SHAPES = {True: "qwen2.5-14b", False: "tiny-8"}
# One round on a CPU: a start of eight ranks takes minutes there, and times mean nothing.
DEFAULT_STARTS = {True: 3, False: 1}
DEFAULT_REPEATS = {True: 5, False: 1}
DEFAULT_RANKS = 8
ALL_GPUS = "all"
_STYLES = {State.MET: "green", State.NOT_RUN: "yellow", State.MISSED: "bold red", State.FAILED: "bold red"}


def main(arguments: Sequence[str]) -> int:
    """Run what the command line asks for; the process's exit code."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, _end)
    console = Console(width=None if sys.stdout.isatty() else 160)
    out: Path = options.out
    machine, planned, kept = options.machine, options.planned, options.kept
    if options.list:
        for part in planned:
            console.print(f"{part.name}: {part.cannot or shlex.join(part.arguments(out, part.limit_s))}", markup=False)
        return 0
    command = f"python -m benchmarks.cluster {shlex.join(arguments)}"
    head = record.record(Kind.E2E, [], command, options.is_on_gpu, options.commit)
    if options.kept_nothing:
        console.print(f"--resume: nothing is kept: {options.kept_nothing}", markup=False)
    for part in planned:
        if options.only and part.name not in options.only:
            kept.setdefault(part.name, not_run(part, "not named by --only"))
    results: list[Result] = []

    def tell(result: Result) -> None:
        results.append(result)
        took = f", {result.ended.took_s:.0f} s" if result.ended is not None else ""
        console.print(f"{result.part.name}: {result.verdict}{took}", style=_STYLES[result.state], markup=False)
        write_whole({**head, **describe(machine, results)}, out / f"{NAME}.json")

    run(planned, out, options.is_on_gpu, options.limit_s, options.environment, tell, kept)
    show(machine, results, console)
    console.print(f"record: {out / NAME}.json, logs beside it", markup=False)
    return exit_code(results)


def describe(machine: Machine, results: Sequence[Result]) -> dict[str, Any]:
    """For the record: the rows of all parts under their names, and each part with its checks and its own record."""
    rows, described = [], []
    for result in results:
        ended = result.ended or Ended(None, 0.0)
        own = dict(ended.content)
        rows += [{**row, "name": f"{result.part.name}: {row['name']}"} for row in own.pop("rows", ())]
        described.append(
            {
                "name": result.part.name,
                "state": result.verdict,
                "was_run": result.ended is not None,
                "exit_code": ended.code,
                "took_s": ended.took_s,
                "command": shlex.join(result.part.command),
                "checks": [
                    {"name": each.name, "state": each.state.value, "detail": each.detail} for each in result.checks
                ],
                "record": own,
            }
        )
    sizes = {"device": machine.device, "ranks": machine.ranks, "shape": machine.shape, "starts": machine.starts}
    return {**sizes, "exit_code": exit_code(results), "parts": described, "rows": rows}


def show(machine: Machine, results: Sequence[Result], console: Console) -> None:
    """The table of all parts, and below it whatever is not met."""
    title = f"{machine.ranks} ranks on {machine.device}, {machine.shape}"
    table = Table(title=title, title_justify="left", caption="checks by what came of them")
    for column in ("part", "", "met", "missed", "failed", "not run", "s"):
        table.add_column(column, overflow="fold")
    for result in results:
        counts, state = result.counts, result.state
        took = f"{result.ended.took_s:.0f}" if result.ended is not None else "-"
        order = (State.MET, State.MISSED, State.FAILED, State.NOT_RUN)
        table.add_row(
            result.part.name,
            f"[{_STYLES[state]}]{result.verdict}[/]",
            *(str(counts[each]) for each in order),
            took,
        )
    console.print(table)
    for state in (State.FAILED, State.MISSED, State.NOT_RUN):
        for result in results:
            for check in result.of(state):
                text = f"{state.value.upper()} {result.part.name}: {check.name}: {check.detail}"
                console.print(text, style=_STYLES[state], markup=False, highlight=False)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options; ends the process with 2 where they are wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cluster",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), help="default: cuda where torch sees one")
    add("--gpus", type=_gpus, metavar="N", help=f"the first N of this machine, or {ALL_GPUS}, which is the default")
    add("--ranks", type=positive, metavar="N", help=f"on a CPU: processes (default {DEFAULT_RANKS})")
    add("--shape", choices=shapes.names(), help="default: qwen2.5-14b, on a CPU tiny-8")
    add("--starts", type=positive, help="rounds of servers; default: 3, on a CPU 1")
    add("--repeats", type=positive, help="samples of each row in a start; default: 5, on a CPU 1")
    add("--limit-s", type=seconds, default=DEFAULT_LIMIT_S, help=f"for all parts (default {DEFAULT_LIMIT_S:g})")
    add("--only", action="append", default=[], metavar="PART", help="this part alone; may be repeated; see --list")
    add(
        "--resume",
        action="store_true",
        help="keep parts that were run to their end, met or missed, at this commit, from --out",
    )
    add("--list", action="store_true", help="show all parts with their commands, and stop")
    add("--commit", default="", help="for the record, where this is no git checkout")
    add("--out", type=Path, default=record.ROOT / "build" / "benchmarks" / NAME, help="folder of record and logs")
    options = parser.parse_args(arguments)
    gpus = len(record.describe_gpus())
    options.is_on_gpu = options.device == "cuda" if options.device else bool(gpus)
    options.ranks = _ranks(parser, options, gpus)
    options.shape = options.shape or DEFAULT_SHAPES[options.is_on_gpu]
    options.starts = options.starts or DEFAULT_STARTS[options.is_on_gpu]
    options.repeats = options.repeats or DEFAULT_REPEATS[options.is_on_gpu]
    options.out = options.out.resolve()
    options.machine = Machine(
        options.is_on_gpu, options.ranks, options.out, options.shape, options.starts, options.repeats, options.commit
    )
    options.planned = list(parts(options.machine))
    names = [part.name for part in options.planned]
    unknown = sorted(set(options.only) - set(names))
    if unknown:
        parser.error(f"--only: there is no part {', '.join(unknown)}; there are {', '.join(names)}")
    if options.list and (options.only or options.resume):
        parser.error("--list shows all parts and runs none: --only and --resume have no effect")
    options.kept, options.kept_nothing = {}, ""
    try:
        require_once("--only", options.only)
        options.environment = _environment(options)
        if options.list:
            return options
        # At last, so that what is refused leaves nothing behind.
        require_file("--out, its record", options.out / f"{NAME}.json")
        if options.resume:
            options.kept, options.kept_nothing = _earlier(
                options.out / f"{NAME}.json", options.planned, options.commit or record.describe_commit()
            )
    except OptionError as error:
        parser.error(str(error))
    return options


def _gpus(text: str) -> int | str:
    return text if text == ALL_GPUS else positive(text)


def _ranks(parser: argparse.ArgumentParser, options: argparse.Namespace, gpus: int) -> int:
    if options.is_on_gpu and options.ranks is not None:
        parser.error("--ranks has no effect on GPUs: choose with --gpus N, or --device cpu")
    if not options.is_on_gpu and options.gpus is not None:
        parser.error("--gpus has no effect on a CPU: choose with --ranks N, or --device cuda")
    if not options.is_on_gpu:
        ranks = options.ranks or DEFAULT_RANKS
    else:
        ranks = gpus if options.gpus in (None, ALL_GPUS) else options.gpus
        if ranks > gpus:
            parser.error(f"--gpus {ranks}: torch sees {gpus} here")
    if ranks < 2 or ranks % 2:
        parser.error(
            f"{ranks} ranks: an even number from 2 on is needed, for two stages of one half each; "
            f"torch sees {gpus} GPU(s): choose with --gpus N, or --device cpu --ranks N"
        )
    return int(ranks)


def _environment(options: argparse.Namespace) -> dict[str, str]:
    found = {FLAGCX_VARIABLE: find_flagcx(options.is_on_gpu)}
    if options.is_on_gpu:
        visible = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
        devices = (visible or list(map(str, range(options.ranks))))[: options.ranks]
        multicast_off = {name: os.environ.get(name, value) for name, value in GPU_ENVIRONMENT.items()}
        return {**found, **multicast_off, "CUDA_VISIBLE_DEVICES": ",".join(devices)}
    # torch's own thread pools fight over few cores.
    return {**found, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}


def _earlier(path: Path, planned: Sequence[Part], commit: str) -> tuple[dict[str, Result], str]:
    """Results of the record at ``path`` by their part's name; where it is of another commit, none, and why.

    Raises:
        OptionError: it is no record.
    """
    content = read_record(path)
    if content is None:
        return {}, "there is no record yet"
    try:
        why = other_commit(str(content["commit"]), commit)
        return ({}, why) if why else (dict(_results(content, planned)), "")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise broken_record(path, error) from error


def _results(content: Mapping[str, Any], planned: Sequence[Part]) -> Iterator[tuple[str, Result]]:
    """Parts that were run to their end without a failure, by the same command; misses are kept."""
    by_name = {part.name: part for part in planned}
    for found in content["parts"]:
        part = by_name.get(found["name"])
        if part is None or found["command"] != shlex.join(part.command) or not _is_finished(found):
            continue
        start = f"{part.name}: "
        rows = [
            {**row, "name": row["name"].removeprefix(start)} for row in content["rows"] if row["name"].startswith(start)
        ]
        checks = [Check(each["name"], State(each["state"]), each["detail"]) for each in found["checks"]]
        yield (
            part.name,
            Result(part, checks, Ended(found["exit_code"], found["took_s"], {**found["record"], "rows": rows})),
        )


def _is_finished(part: Mapping[str, Any]) -> bool:
    has_failed = any(check["state"] == State.FAILED.value for check in part["checks"])
    return part["exit_code"] in (0, MISSED) and not has_failed


def _end(number: int, _: FrameType | None) -> None:
    """Leave through the blocks that stop what runs."""
    raise SystemExit(128 + number)
