"""``python -m benchmarks.e2e``: decode, prefill and start of SGLang with the plugin beside SGLang alone.

Servers are started in turn, native, plugin, native, plugin, each with the GPUs to itself, with random weights that
matter. Further arguments of SGLang's server follow --. Ends with 1 where a bar is missed or a server failed, with 3
where the time was over before all starts were made, with 2 where the arguments are wrong.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from benchmarks import record
from benchmarks.e2e import report, shapes
from benchmarks.e2e.configurations import CONFIGURATIONS, NATIVE
from benchmarks.e2e.requests import Sizes
from benchmarks.e2e.run import Outcome, Plan, describe, run
from benchmarks.e2e.servers import Site, install_plugin, used_memory_mib
from benchmarks.figures import Kind, show

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


def execute(options: argparse.Namespace, console: Console, command: str) -> Outcome:
    """Make all starts; the record is written after each."""
    vocabulary = shapes.vocabulary_size(options.shape)
    sizes = Sizes(vocabulary) if options.is_on_gpu else Sizes.for_cpu(vocabulary)
    plan = Plan(options.configurations, options.once, options.starts, options.repeats, options.controls_on)
    options.out.mkdir(parents=True, exist_ok=True)
    out = options.out.resolve()

    def keep(outcome: Outcome) -> None:
        more: dict[str, Any] = {"shape": options.shape, "tp": options.tp, "pp": options.pp}
        more |= {"dp_attention": options.dp_attention, "controls_on": plan.controls_on}
        more |= {"differences": report.differences(outcome), **describe(outcome)}
        rows = report.figures(outcome)
        content = record.record(Kind.E2E, rows, command, options.is_on_gpu, options.commit)
        record.write({**content, **more}, options.json)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        memory_mib = used_memory_mib() if options.is_on_gpu else ()
        if options.is_on_gpu and not memory_mib:
            console.print("nvidia-smi does not tell the memory in use: no start waits for it", style="yellow")
        site = Site(
            shapes.write(options.shape, folder / "model"),
            install_plugin(folder / "plugin"),
            out,
            options.tp,
            options.is_on_gpu,
            tuple(options.server_arguments),
            memory_mib,
            options.pp,
            options.dp_attention,
        )
        return run(
            plan, site, sizes, options.limit_s, lambda line: console.print(line, markup=False, highlight=False), keep
        )


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
    add("--tp", type=_positive, default=1, help="ranks, a GPU each")
    add("--pp", type=_positive, default=1, help="stages, each of --tp ranks")
    add("--dp-attention", action="store_true", help="each of the --tp ranks has the attention of its own requests")
    add("--configurations", type=_configurations, default=(NATIVE, "verified"), metavar="A,B", help="in each round")
    add("--once", type=_configurations, default=(), metavar="C,D", help="in the last round only")
    add("--starts", type=_positive, default=3, help="rounds, each with a fresh server a configuration")
    add("--repeats", type=_positive, default=5, help="samples of each row in a start")
    add("--controls", action="store_true", help="at the end, check that faults change tokens and logits")
    add(
        "--controls-on", choices=list(CONFIGURATIONS), help="configuration for that; default: the first with the plugin"
    )
    add("--limit-s", type=float, default=DEFAULT_LIMIT_S, help="begin no start that would end later")
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
    if not options.controls:
        options.controls_on = None
    elif options.controls_on is None:
        options.controls_on = (with_plugin or [NATIVE])[0]
    return options


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:cut], arguments[cut + 1 :]


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)


def _configurations(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in CONFIGURATIONS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no configuration {', '.join(unknown)}; there are {', '.join(CONFIGURATIONS)}"
        )
    return names


def _end(number: int, _: FrameType | None) -> None:
    """Leave through the blocks that stop servers."""
    raise SystemExit(128 + number)
