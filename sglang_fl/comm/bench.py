"""Benchmark of the communication layer in nccl-tests' columns, all backends beside each other in one run.

Examples:
    torchrun --standalone --nproc-per-node 2 -m sglang_fl.comm.bench -b 1K -e 64M -f 4
    torchrun --standalone --nproc-per-node 8 -m sglang_fl.comm.bench --op all_gather --backends flagcx,nccl --graph
    torchrun --standalone --nproc-per-node 8 -m sglang_fl.comm.bench --json before.json --plot before.png
    python -m sglang_fl.comm.bench --compare before.json after.json
    torchrun --standalone --nproc-per-node 8 -m sglang_fl.comm.bench --tune routes.yaml -d bfloat16 -e 256M --graph
    SGLANG_FL_CONFIG=routes.yaml python -m sglang.launch_server ...

What the columns say

size: bytes of the whole operation; for all_gather, reduce_scatter and gather that of all ranks' shares together,
count is then one share. time: of one call, median of the cycles, of the slowest rank; the calls of a cycle follow each
other without waiting. algbw: size / time. busbw: algbw times the factor of nccl-tests' PERFORMANCE.md, comparable with
the speed of a link. all_reduce and broadcast work in place: out of place is a copy and the call. With --graph each
line comes twice, eager and from within a CUDA graph that holds all calls of a cycle.

--compare
Two files of --json, such as before and after an update, row by row: a row is called faster or slower if it is so by
more than 5% in the median and every cycle of one file lies on one side of every cycle of the other; else the
difference is noise. Two runs of the same differ too: compare such a pair first, and use -c 10.

--tune
Measures all_reduce (in place), all_gather and reduce_scatter (out of place) on every backend and writes which one is
to carry which size, as a settings file for mode fastest. The rule: from the smallest size to the largest, the group's
backend carries a call until another is faster by more than 5% in the median and in every cycle; from then on that
one, by the same rule. Routes do not tell dtypes apart: choose -d as your model's. Measure on the hosts and with the
number of ranks that will serve. SGLang's own methods (native) exist inside SGLang only: native routes of your
settings stay in front, unmeasured.

Exit code 0; 1 if a result was wrong, a named backend cannot be used, or something could not be run; 2 if the command
line is wrong, or a file of --compare cannot be compared.
"""

from __future__ import annotations

import argparse
import reprlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from sglang_fl.comm.communicator import CommunicatorFL
from sglang_fl.comm.discovery import discover_backends
from sglang_fl.comm.errors import CommError
from sglang_fl.comm.tools import plot, record, table, tune
from sglang_fl.comm.tools.bench_operations import OPERATIONS, Operation, Prepared, Setup
from sglang_fl.comm.tools.candidates import known_names, opened
from sglang_fl.comm.tools.launch import Launch, launched
from sglang_fl.comm.tools.measure import Counts, Mode, Result, count_wrong, sampler
from sglang_fl.comm.tools.options import RanksParser
from sglang_fl.comm.tools.sizes import parse_size, scan, seconds
from sglang_fl.comm.tools.watch import Watch
from sglang_fl.config import SettingsError
from sglang_fl.config.numbers import whole_number
from sglang_fl.config.route_type import OPERATIONS as ROUTABLE
from sglang_fl.selection import Kind

FAILED = 1
UNUSABLE = 2
DEFAULT = ("all_reduce",)


@dataclass(frozen=True)
class Subject:
    """What one cycle measures once."""

    communicator: CommunicatorFL
    mode: Mode
    in_place: bool
    prepared: Prepared


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark on this rank; all ranks must call it. The process's exit code, the same on all ranks."""
    options = parse(arguments)
    try:
        if options.compare:
            return _compare(*options.compare)
        with launched(options.device, options.timeout) as launch, Watch(launch.place.rank, options.timeout) as watch:
            is_right = run(launch, options, watch)
            launch.exchange("end", None)
    except (SettingsError, CommError) as error:
        print(f"bench: {error}", file=sys.stderr, flush=True)
        return FAILED
    return 0 if is_right else FAILED


def _compare(first: Path, second: Path) -> int:
    try:
        pairs = list(table.compared(first, second))
    except CommError as error:
        print(f"bench: {error}", file=sys.stderr, flush=True)
        return UNUSABLE
    for text in (table.COMPARISON_HEAD, *pairs, table.summary(pairs)):
        print(text)
    return FAILED if any(pair.is_wrong for pair in pairs) else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = RanksParser(
        prog="torchrun --nproc-per-node N -m sglang_fl.comm.bench",
        usage="%(prog)s [options]",
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = ", ".join(OPERATIONS)
    add = parser.add_argument
    add("--op", type=_operations, metavar="NAMES", help=f"all, or some of {names}; default all_reduce")
    add("-b", "--minbytes", type=_size, default="1K", metavar="SIZE", help="smallest size (default 1K)")
    add("-e", "--maxbytes", type=_size, default="16M", metavar="SIZE", help="largest size (default 16M)")
    add("-f", "--stepfactor", type=int, metavar="N", help="from size to size, times N (default 2); not with -i")
    add("-i", "--stepbytes", type=_size, metavar="SIZE", help="from size to size, plus SIZE instead")
    add("-d", "--dtype", type=_dtype, default="float32", metavar="NAME", help="as in torch (default float32)")
    add("--backends", type=_names, default=[], metavar="NAMES", help="default: every one that can be used")
    add("-n", "--iters", type=_count, default=20, metavar="N", help="calls under the clock (default 20)")
    add("-w", "--warmup-iters", type=_count, default=5, metavar="N", help="calls before (default 5)")
    add("-c", "--cycles", type=_count, default=5, metavar="N", help="rounds over all backends in turns (default 5)")
    add("--graph", action="store_true", help="also inside a CUDA graph")
    add("--device", metavar="TYPE", help="cpu, cuda, ...; default: the accelerator, if there is one")
    add("--json", type=Path, metavar="FILE", help="write every sample, on rank 0")
    add("--csv", type=Path, metavar="FILE", help="write the table, on rank 0")
    add("--plot", type=Path, metavar="FILE", help="draw time and bus bandwidth over size, on rank 0 (needs matplotlib)")
    add("--compare", type=Path, nargs=2, metavar="FILE", help="show two files of --json beside each other, and stop")
    add("--tune", type=Path, metavar="FILE", help="write the fastest routes by size as YAML for SGLANG_FL_CONFIG")
    add("--timeout", type=seconds, default=300.0, metavar="S", help="end if nothing moves for so long (default 300)")
    options = parser.parse_args(arguments)
    if options.stepfactor is not None and options.stepbytes is not None:
        parser.error("-f and -i are two ways from size to size; give one of them")
    if options.op is None:
        options.op = list(ROUTABLE if options.tune else DEFAULT)
    if options.tune and set(options.op) - set(ROUTABLE):
        parser.error(f"--tune is for {', '.join(ROUTABLE)}, which have routes by size; leave --op out or name these")
    try:
        options.sizes = scan(options.minbytes, options.maxbytes, options.stepfactor, options.stepbytes)
    except ValueError as error:
        parser.error(str(error))
    return options


def run(launch: Launch, options: argparse.Namespace, watch: Watch) -> bool:
    """Measure and show on rank 0; whether every result was right. All ranks must call it."""
    modes = _modes(launch, options)
    if options.plot is not None:
        plot.load_pyplot()
    launch.on_first("check the files", lambda: _check_files(options))
    devices = launch.exchange("describe devices", record.describe_device(launch.device))
    versions = ", ".join(f"{name} {text}" for name, text in record.describe_versions().items())
    launch.say(f"# sglang_fl communication benchmark: {versions}")
    launch.say(f"# {launch.place.world_size} rank(s) on {launch.host_count} host(s): {', '.join(devices)}")
    launch.say(
        f"# {options.iters} calls under the clock, {options.warmup_iters} before, {options.cycles} cycles in turns"
    )
    with ExitStack() as stack:
        communicators, unusable = _communicators(launch, options.backends, stack, watch)
        results = [
            result
            for name in options.op
            for result in _operation(launch, OPERATIONS[name], communicators, modes, options, watch)
        ]
    _say_end(launch, results)
    launch.on_first("write the files", lambda: _write(options, devices, results))
    if options.tune is not None:
        _tune(launch, options, results)
    return not unusable and bool(results) and not any(result.wrong for result in results)


def _check_files(options: argparse.Namespace) -> None:
    for name in ("json", "csv", "plot", "tune"):
        record.require_writable(f"--{name}", getattr(options, name))
    if options.plot is not None:
        plot.require_format(options.plot)


def _modes(launch: Launch, options: argparse.Namespace) -> tuple[Mode, ...]:
    if not options.graph:
        return (Mode.EAGER,)
    if launch.device.type != "cuda":
        raise CommError(f"--graph needs CUDA graphs; this run's device is {launch.device}. Leave it out")
    return (Mode.EAGER, Mode.GRAPH)


def _communicators(
    launch: Launch, named: Sequence[str], stack: ExitStack, watch: Watch
) -> tuple[list[CommunicatorFL], bool]:
    """Those that can be used, and whether one that was named cannot."""
    found: list[CommunicatorFL] = []
    unusable = False
    for name in named or known_names(launch):
        watch.step(f"create {name}")
        route = stack.enter_context(opened(launch, name))
        if route.communicator is not None:
            found.append(route.communicator)
            continue
        launch.say(f"# {name} cannot be used: {route.reason}")
        unusable = unusable or name in named or route.has_failed
    return found, unusable


def _operation(
    launch: Launch,
    operation: Operation,
    communicators: Sequence[CommunicatorFL],
    modes: Sequence[Mode],
    options: argparse.Namespace,
    watch: Watch,
) -> Iterator[Result]:
    launch.say(f"#\n# {operation.name}")
    for text in table.HEAD:
        launch.say(text)
    for communicator in communicators:
        _require_sum(operation, communicator, options.dtype)
    for size in options.sizes:
        watch.step(f"{operation.name} of {size} bytes")
        count = operation.count(size, options.dtype.itemsize, launch.place.world_size)
        subjects = [
            Subject(communicator, mode, in_place, prepared)
            for communicator in communicators
            for mode in modes
            if mode is Mode.EAGER or operation.can_be_captured
            for in_place in (False, True)
            if (prepared := operation.prepare(Setup(communicator, count, options.dtype), in_place)) is not None
        ]
        results = _measured(launch, operation, subjects, count, options)
        _say_lines(launch, results)
        yield from results


def _require_sum(operation: Operation, communicator: CommunicatorFL, dtype: torch.dtype) -> None:
    transport = communicator.agreed.transport
    if operation.redop != "sum" or transport is None or dtype in transport.capabilities.reducible:
        return
    names = ", ".join(sorted(str(known).removeprefix("torch.") for known in transport.capabilities.reducible))
    raise CommError(f"{operation.name}: {communicator.backend} has no sum for {dtype}; --dtype may be {names}")


def _measured(
    launch: Launch, operation: Operation, subjects: Sequence[Subject], count: int, options: argparse.Namespace
) -> list[Result]:
    counts = Counts(options.warmup_iters, options.iters)
    samplers = [sampler(launch, subject.prepared, subject.mode, counts) for subject in subjects]
    samples: list[list[float]] = [[] for _ in subjects]
    for cycle in range(options.cycles):
        order = range(len(subjects)) if cycle % 2 == 0 else range(len(subjects) - 1, -1, -1)
        for number in order:
            samples[number].append(samplers[number]())
    world_size = launch.place.world_size
    return [
        Result(
            operation=operation,
            backend=subject.communicator.backend,
            mode=subject.mode,
            in_place=subject.in_place,
            count=count,
            size_bytes=operation.size_bytes(count, options.dtype.itemsize, world_size),
            dtype=str(options.dtype).removeprefix("torch."),
            world_size=world_size,
            samples_us=tuple(times),
            wrong=count_wrong(launch, subject.prepared, subject.mode),
        )
        for subject, times in zip(subjects, samples, strict=True)
    ]


def _say_lines(launch: Launch, results: Sequence[Result]) -> None:
    pairs: dict[tuple[str, Mode], dict[bool, Result]] = {}
    for result in results:
        pairs.setdefault((result.backend, result.mode), {})[result.in_place] = result
    for forms in pairs.values():
        launch.say(table.line(forms.get(False), forms.get(True)))


def _say_end(launch: Launch, results: Sequence[Result]) -> None:
    wrong = sum(result.wrong for result in results)
    launch.say(f"#\n# Wrong elements: {wrong} {'FAILED' if wrong else 'OK'}")
    by_backend: dict[str, list[float]] = {}
    for result in results:
        by_backend.setdefault(result.backend, []).append(result.bus_gb_s)
    for backend, speeds in by_backend.items():
        launch.say(f"# Average bus bandwidth, {backend}: {sum(speeds) / len(speeds):.4g} GB/s")


def _write(options: argparse.Namespace, devices: Sequence[str], results: Sequence[Result]) -> None:
    if options.json is not None:
        record.write(record.record(devices, [table.as_row(result) for result in results]), options.json)
    if options.csv is not None:
        table.write_csv(results, options.csv)
    if options.plot is not None:
        plot.draw(results, options.plot)


def _tune(launch: Launch, options: argparse.Namespace, results: Sequence[Result]) -> None:
    known = discover_backends().backends
    own = [known[name] for name in dict.fromkeys(each.backend for each in results) if name in known]
    tokens = {each.name: (each.name, each.kind.value, f"{Kind.VENDOR.value}:{each.vendor}") for each in own}
    found = tune.tuned([each for each in results if each.backend in tokens], launch.settings, tokens)
    versions = ", ".join(f"{name} {text}" for name, text in record.describe_versions().items())
    origin = [
        f"{launch.place.world_size} ranks on {launch.host_count} host(s), {launch.device.type}; {versions}",
        f"{str(options.dtype).removeprefix('torch.')}, {len(options.sizes)} sizes of {options.sizes[0]} to "
        f"{options.sizes[-1]} bytes, {options.iters} calls a cycle, {options.cycles} cycles, over {', '.join(tokens)}.",
    ]
    launch.on_first("write the routes", lambda: tune.write(found, options.tune, launch.settings, origin))
    for line in tune.describe(found):
        launch.say(f"# tuned: {line}")
    launch.say(f"# SGLANG_FL_CONFIG={options.tune} makes these the routes of mode fastest")


def _checked(parse_text: Callable[[str], object], text: str) -> object:
    try:
        return parse_text(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _size(text: str) -> object:
    return _checked(parse_size, text)


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _operations(text: str) -> list[str]:
    names = list(OPERATIONS) if text == "all" else _names(text)
    unknown = [name for name in names if name not in OPERATIONS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown) or text!r}: allowed are all, {', '.join(OPERATIONS)}")
    return names


def _dtype(text: str) -> torch.dtype:
    found = getattr(torch, text, None)
    if not isinstance(found, torch.dtype):
        raise argparse.ArgumentTypeError(f"{text!r} is no dtype of torch; such are float32, bfloat16, int64")
    return found


def _count(text: str) -> int:
    count = whole_number(text)
    if not count:
        raise argparse.ArgumentTypeError(f"{reprlib.repr(text)} is no whole number from 1 to 2**63 - 1")
    return count


if __name__ == "__main__":
    sys.exit(main())
