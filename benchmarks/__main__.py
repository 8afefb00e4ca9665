"""``python -m benchmarks [names]``: run benchmarks, show their tables, keep their samples; 1 if a bar is missed."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from benchmarks import record
from benchmarks.figures import Figure, Kind, show

FOLDER = Path(__file__).resolve().parent
RECORDS = record.ROOT / "build" / "benchmarks"
MISSED, UNUSABLE = 1, 2


@dataclass(frozen=True)
class Benchmark:
    """One module ``bench_NAME.py``; ``notes``: its NOTES, which a run fills with what its record should say."""

    name: str
    summary: str
    kind: Kind
    needs_gpu: bool
    run: Callable[[], list[Figure]]
    notes: list[str] = field(default_factory=list)


def load(path: Path) -> Benchmark:
    """Import one benchmark module and read what it declares."""
    spec = importlib.util.spec_from_file_location(f"benchmarks.{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # so that processes that it starts find its functions
    spec.loader.exec_module(module)
    summary = (module.__doc__ or "").strip().splitlines()
    return Benchmark(
        name=path.stem.removeprefix("bench_"),
        summary=summary[0] if summary else "",
        kind=Kind(module.KIND),
        needs_gpu=bool(module.NEEDS_GPU),
        run=module.run,
        notes=getattr(module, "NOTES", []),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; the process's exit code."""
    options = _parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    benchmarks = {found.name: found for found in map(load, sorted(options.folder.glob("bench_*.py")))}
    if options.list:
        for found in benchmarks.values():
            console.print(f"{found.name:20} {found.kind.value:5} {'GPU' if found.needs_gpu else '   '} {found.summary}")
        return 0
    problem = _problem(options, benchmarks)
    if problem:
        console.print(problem, style="bold red")
        return UNUSABLE
    names = options.names or [found.name for found in benchmarks.values() if not found.needs_gpu]
    records = RECORDS if options.folder == FOLDER else options.folder
    missed = [
        missing
        for name in names
        for missing in _run(benchmarks[name], options.json or records / f"{name}.json", console)
    ]
    if missed:
        console.print(f"{len(missed)} missed: {', '.join(missed)}", style="bold red")
    return MISSED if missed else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", help="benchmarks to run; default: all that need no GPU")
    parser.add_argument("--list", action="store_true", help="show the benchmarks and stop")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="where to keep the samples of the one named benchmark"
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the modules bench_NAME.py lie")
    return parser.parse_args(arguments)


def _problem(options: argparse.Namespace, benchmarks: dict[str, Benchmark]) -> str:
    unknown = [name for name in options.names if name not in benchmarks]
    if unknown:
        return f"no benchmark named {', '.join(unknown)}; there are {', '.join(benchmarks) or 'none'}"
    if not benchmarks:
        return f"{options.folder} holds no bench_NAME.py"
    if options.json is not None and len(options.names) != 1:
        return "--json FILE takes the samples of one benchmark: name exactly one"
    wanting = [name for name in options.names if benchmarks[name].needs_gpu]
    if wanting and not record.describe_gpus():
        return f"{', '.join(wanting)} needs a GPU; torch sees none here"
    return ""


def _run(benchmark: Benchmark, path: Path, console: Console) -> list[str]:
    """Run one, show and keep its figures; the names of those that missed their bar."""
    console.print(f"\n{benchmark.name}: {benchmark.summary}", style="bold")
    figures = benchmark.run()
    if not figures:
        raise RuntimeError(f"benchmark {benchmark.name} returned no figures")
    show(benchmark.name, figures, console)
    command = f"python -m benchmarks {benchmark.name}"
    made = record.record(benchmark.kind, figures, command, benchmark.needs_gpu, notes=benchmark.notes)
    record.write(made, path)
    console.print(f"samples: {path}")
    return [f"{benchmark.name}: {figure.name}" for figure in figures if not figure.is_met]


if __name__ == "__main__":
    sys.exit(main())
