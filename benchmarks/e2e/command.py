"""``python -m benchmarks.e2e``: decode, prefill and start of SGLang with the plugin beside SGLang alone.

Servers are started in turn, native, plugin, native, plugin, each with the GPUs to itself, or with --together those of
a round at the same time and asked in turns; all with random weights that matter. Further arguments of SGLang's server
follow --. Ends with 1 where a bar is missed or a server failed, with 3 where the time was over before all starts were
made, with 2 where the arguments are wrong, before anything is started. With more than one rank, configurations with
FlagCX need FLAGCX_PATH; on a CPU its default is build/hostcx.
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from benchmarks import record
from benchmarks.e2e import report, resume, shapes
from benchmarks.e2e.configurations import CONFIGURATIONS, FLAGCX_BACKEND, NATIVE
from benchmarks.e2e.options import (
    OptionError,
    find_flagcx,
    positive,
    require_file,
    require_folder,
    require_once,
    write_whole,
)
from benchmarks.e2e.requests import ROWS, Sizes
from benchmarks.e2e.run import Outcome, Plan, describe, run
from benchmarks.e2e.servers import Site, install_plugin, used_memory_mib
from benchmarks.figures import Kind, show
from sglang_fl.comm.tools.sizes import seconds

MISSED, UNUSABLE, INCOMPLETE = 1, 2, 3
DEFAULT_LIMIT_S = 3600.0


def main(arguments: Sequence[str]) -> int:
    """Run what the command line asks for; the process's exit code."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, _end)
    console = Console(width=None if sys.stdout.isatty() else 160)
    command = f"python -m benchmarks.e2e {shlex.join(arguments)}"
    outcome = execute(options, console, command)
    rows = report.figures(outcome)
    if rows:
        show(f"{options.shape}, {sizes_in_words(options)}", rows, console)
    absent = [f"no row {name}: {reason}" for name, reason in report.absent(outcome).items()]
    for note in filter(None, (*options.notes, *absent, resume.in_words(outcome))):
        console.print(note, markup=False, highlight=False)
    for name, error in outcome.failures.items():
        console.print(f"{name} failed: {error.splitlines()[0]}", style="bold red", markup=False)
    missed = [row.name for row in rows if not row.is_met]
    if missed:
        console.print(f"{len(missed)} missed: {'; '.join(missed)}", style="bold red", markup=False)
    if outcome.not_run:
        console.print(
            f"NOT RUN, the limit of {options.limit_s:g} s is reached: {', '.join(outcome.not_run)}", markup=False
        )
    console.print(f"record: {options.json}, logs: {options.out}", markup=False)
    if missed or outcome.failures:
        return MISSED
    return INCOMPLETE if outcome.not_run else 0


def sizes_in_words(options: argparse.Namespace) -> str:
    """``tp=4, pp=2``."""
    stages = f", pp={options.pp}" if options.pp > 1 else ""
    return f"tp={options.tp}{stages}{', DP attention' if options.dp_attention else ''}"


@dataclass
class Writer:
    """Writes the record, and each start's file beside the logs.

    Attributes:
        made_on: what a call that goes on from the record must have in common with this one.
        earlier: calls from which this one goes on.
        digests: of the files written so far, by the start's name.
    """

    options: argparse.Namespace
    command: str
    made_on: Mapping[str, Any]
    earlier: Sequence[Mapping[str, Any]]
    digests: dict[str, str] = field(default_factory=dict)
    date: str = field(
        default_factory=lambda: datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    )

    def write(self, outcome: Outcome) -> None:
        """Everything so far."""
        options = self.options
        for start in outcome.starts:
            if start.step.name not in self.digests:
                self.digests[start.step.name] = resume.save(start, options.out)
        call = {"date": self.date, "command": self.command, "limit_s": options.limit_s}
        names = ("shape", "tp", "pp", "dp_attention", "together", "tries", "timed_rows", "controls_on", "notes")
        rows = report.figures(outcome)
        content = {
            **record.record(Kind.E2E, rows, self.command, options.is_on_gpu, options.commit),
            **{name: getattr(options, name) for name in names},
            "absent": report.absent(outcome),
            "differences": report.differences(outcome),
            **describe(outcome),
            "run": self.made_on,
            "digests": self.digests,
            "calls": resume.describe_calls(outcome, self.earlier, call),
        }
        write_whole(content, options.json)


def execute(options: argparse.Namespace, console: Console, command: str) -> Outcome:
    """Make all starts; the record is written after each."""
    vocabulary = shapes.vocabulary_size(options.shape)
    rows = options.timed_rows
    sizes = Sizes(vocabulary, rows=rows) if options.is_on_gpu else Sizes.for_cpu(vocabulary, rows)
    plan = Plan(
        options.configurations,
        options.once,
        options.starts,
        options.repeats,
        options.controls_on,
        options.together,
        options.tries,
    )

    def tell(line: str) -> None:
        console.print(line, markup=False, highlight=False)

    made_on = resume.describe_run(_arguments_that_matter(options))
    kept = resume.Kept()
    if options.resume:
        commit = options.commit or record.describe_commit()
        kept = resume.keep(options.earlier, made_on, commit, plan, options.out)
    for line in (*options.notes, *kept.words):
        tell(line)
    writer = Writer(options, command, made_on, kept.calls)
    with tempfile.TemporaryDirectory() as name:
        site = _site(options, Path(name), tell)
        return run(plan, site, sizes, options.limit_s, tell, writer.write, kept.starts, len(kept.calls) + 1)


def _site(options: argparse.Namespace, folder: Path, tell: Callable[[str], None]) -> Site:
    memory_mib = used_memory_mib() if options.is_on_gpu else ()
    if options.is_on_gpu and not memory_mib:
        tell("nvidia-smi does not tell the memory in use: no start waits for it")
    return Site(
        shapes.write(options.shape, folder / "model"),
        install_plugin(folder / "plugin"),
        options.out,
        options.tp,
        options.is_on_gpu,
        tuple(options.server_arguments),
        memory_mib,
        options.pp,
        options.dp_attention,
        options.flagcx,
    )


def _arguments_that_matter(options: argparse.Namespace) -> dict[str, Any]:
    """All but where the record lies, the limit of a call and what the record has by itself."""
    names = ("shape", "tp", "pp", "dp_attention", "configurations", "once", "starts", "repeats", "together")
    more = ("tries", "timed_rows", "controls_on", "is_on_gpu", "flagcx", "server_arguments")
    return {name: getattr(options, name) for name in (*names, *more)}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options; ends the process with 2 where they are wrong."""
    own, server_arguments = _split(list(arguments))
    kinds = "\n".join(f"  {each.name:16} {each.meaning}" for each in CONFIGURATIONS.values())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.e2e",
        description=__doc__,
        epilog=f"configurations:\n{kinds}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--shape", choices=shapes.names(), default="qwen2.5-0.5b")
    add("--tp", type=positive, default=1, help="ranks, a GPU each")
    add("--pp", type=positive, default=1, help="stages, each of --tp ranks")
    add("--dp-attention", action="store_true", help="each of the --tp ranks has the attention of its own requests")
    add("--configurations", type=_configurations, default=(NATIVE, "verified"), metavar="A,B", help="in each round")
    add("--once", type=_configurations, default=(), metavar="C,D", help="in the last round only")
    add("--starts", type=positive, default=3, help="rounds, each with a fresh server a configuration")
    add("--repeats", type=positive, default=5, help="samples of each row in a start")
    add("--tries", type=positive, default=1, help="requests for each sample, of which the fastest counts")
    add(
        "--rows",
        type=_rows,
        default=ROWS,
        dest="timed_rows",
        metavar="A,B",
        help=f"times that are measured, by the first letters of their rows: {', '.join(ROWS)}; default: all",
    )
    add(
        "--together",
        action="store_true",
        help="the servers of a round run at the same time on the same GPUs and are asked in turns: for a host that is "
        "not quiet",
    )
    add("--controls", action="store_true", help="at the end, check that faults change tokens and logits")
    add(
        "--controls-on",
        choices=list(CONFIGURATIONS),
        help="configuration for --controls; default: the first with the plugin",
    )
    add("--limit-s", type=seconds, default=DEFAULT_LIMIT_S, help="begin no start that would end later")
    add(
        "--resume",
        action="store_true",
        help="keep whole rounds of starts that ended well, of the same arguments, commit and machine, from the record",
    )
    add("--device", choices=("cuda", "cpu"), help="default: cuda where torch sees one")
    add("--commit", default="", help="for the record, where this is no git checkout")
    add("--out", type=Path, default=record.ROOT / "build" / "benchmarks" / "e2e", help="folder of logs")
    add("--json", type=Path, metavar="FILE", help="the record; default: e2e.json among the logs")
    options = parser.parse_args(own)
    options.server_arguments = server_arguments
    options.json = options.json or options.out / "e2e.json"
    options.is_on_gpu = options.device == "cuda" if options.device else bool(record.describe_gpus())
    if options.dp_attention and not shapes.has_dp_attention(options.shape):
        allowed = ", ".join(name for name in shapes.names() if shapes.has_dp_attention(name))
        parser.error(
            f"--dp-attention: SGLang has none for {shapes.architecture(options.shape)} of {options.shape}; "
            f"shapes with it are {allowed}"
        )
    if options.dp_attention and (options.tp == 1 or options.pp > 1):
        parser.error("--dp-attention needs --tp 2 or more, and --pp 1")
    if NATIVE not in options.configurations:
        parser.error(f"--configurations needs {NATIVE}, to which all others are compared")
    named = (*options.configurations, *options.once)
    with_plugin = [name for name in named if CONFIGURATIONS[name].layers]
    if options.controls_on is not None and not options.controls:
        parser.error("--controls-on has no effect without --controls")
    if options.controls and options.controls_on is None:
        options.controls_on = (with_plugin or [NATIVE])[0]
    try:
        require_once("--configurations and --once", named)
        _look_for_flagcx(options, named)
        # At last, so that what is refused leaves nothing behind.
        require_folder("--out", options.out)
        require_file("--json", options.json)
        options.out = options.out.resolve()
        options.earlier = resume.read(options.json) if options.resume else None
    except OptionError as error:
        parser.error(str(error))
    return options


def _look_for_flagcx(options: argparse.Namespace, named: Sequence[str]) -> None:
    """Where it carries something, its place; where it is asked for and carries nothing, a note for the record."""
    asked = dict.fromkeys((*named, *filter(None, [options.controls_on])))
    having = [name for name in asked if CONFIGURATIONS[name].has_flagcx]
    has_groups = options.tp * options.pp > 1
    options.flagcx = find_flagcx(options.is_on_gpu) if having and has_groups else ""
    options.notes = []
    if having and not has_groups:
        options.notes.append(
            f"one rank has nothing to communicate: {FLAGCX_BACKEND} carries nothing in {', '.join(having)}"
        )


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:cut], arguments[cut + 1 :]


def _configurations(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in CONFIGURATIONS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no configuration {', '.join(unknown)}; there are {', '.join(CONFIGURATIONS)}"
        )
    return names


def _rows(text: str) -> tuple[str, ...]:
    wanted = text.split(",")
    unknown = [each for each in wanted if not each or not any(row.startswith(each) for row in ROWS)]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no row begins with {', '.join(map(repr, unknown))}; they begin with {', '.join(ROWS)}"
        )
    return tuple(row for row in ROWS if row.startswith(tuple(wanted)))


def _end(number: int, _: FrameType | None) -> None:
    """Leave through the blocks that stop servers."""
    raise SystemExit(128 + number)
