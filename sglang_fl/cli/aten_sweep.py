"""The command aten-sweep: records shapes, measures FlagGems' operators on them, and makes the list of the good ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from sglang_fl.cli.numbers import Finite

if TYPE_CHECKING:
    from sglang_fl.aten.gems import Gems
    from sglang_fl.aten.sweep.results import Table

DATA = Path(__file__).resolve().parents[1] / "aten" / "data"
SHAPES = DATA / "qwen2.5-0.5b.json"
HOST_SHAPES = DATA / "qwen2.5-0.5b-host.json"
PROBES = DATA / "probes.json"
TABLE, PARTIAL, PLOT, REPORT = "sweep.csv", "partial.jsonl", "sweep.png", "excluded.txt"


@click.command("aten-sweep")
@click.option(
    "--shapes",
    type=click.Path(path_type=Path, dir_okay=False),
    multiple=True,
    help="Recorded calls, may be given more than once; by default those of a Qwen2.5-0.5B shape that come with the "
    "package: with SGLang's own kernels on an NVIDIA GPU, without (recorded on the host), and probes of rarer calls.",
)
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), help="Folder of the results; a started sweep goes on."
)
@click.option("--operators", metavar="A,B", help="Only these, by FlagGems' names or ATen's.")
@click.option(
    "--limit-s",
    type=Finite(min=0, min_open=True),
    default=480.0,
    show_default=True,
    help="Seconds for the whole sweep.",
)
@click.option(
    "--case-limit-s", type=Finite(min=0, min_open=True), default=90.0, show_default=True, help="Seconds for one case."
)
@click.option("--record", metavar="MODEL", help="Instead: record the calls of a model into the --shapes file, and end.")
@click.option("--device", default="cpu", show_default=True, help="With --record: where SGLang runs, cpu or cuda.")
@click.option(
    "--write-list",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="YAML",
    help="Instead: put the operators that the table --table found good into this platform's YAML, and end.",
)
@click.option(
    "--table",
    "tables",
    type=click.Path(path_type=Path, dir_okay=False),
    multiple=True,
    help="With --write-list: a sweep.csv. With --out: measure nothing, make one table of these.",
)
def command(
    shapes: tuple[Path, ...],
    out: Path | None,
    operators: str | None,
    limit_s: float,
    case_limit_s: float,
    record: str | None,
    device: str,
    write_list: Path | None,
    tables: tuple[Path, ...],
) -> None:
    """Measure each operator that FlagGems replaces, on recorded calls, against PyTorch's own.

    Per call: the error against float64 beside PyTorch's own, GPU time inside a CUDA graph, time on the host. A
    call is excluded if its error is over twice PyTorch's own, its GPU time over 1.02 times PyTorch's, or it raised.
    Needs an NVIDIA GPU, torch, triton and flag_gems, not SGLang.
    """
    if record is not None:
        _record(record, device, shapes)
    elif write_list is not None:
        _write_list(tables, write_list)
    elif out is None:
        raise click.UsageError("--out DIR is missing: where the table is written")
    elif tables:
        _merge(tables, out)
    else:
        _sweep(shapes or (SHAPES, HOST_SHAPES, PROBES), out, operators, limit_s, case_limit_s)


def _record(model: str, device: str, files: tuple[Path, ...]) -> None:
    if len(files) != 1:
        raise click.UsageError("--record needs one --shapes FILE: where the calls are written")
    (shapes,) = files
    from sglang_fl.aten.sweep import probes
    from sglang_fl.sglang_hooks.aten_shapes import RecordingError, record

    try:
        recorded = probes.record() if model == probes.MODEL else record(model, device)
    except RecordingError as error:
        raise click.ClickException(str(error)) from error
    recorded.write(shapes)
    click.echo(f"{len(recorded.cases)} different calls of {model} on {device} written to {shapes}")


def _write_list(tables: tuple[Path, ...], target: Path) -> None:
    from sglang_fl.aten.sweep.results import Table, TableError
    from sglang_fl.aten.sweep.yaml_list import ListError, write_list

    if len(tables) != 1:
        raise click.UsageError("--write-list needs one --table: the sweep.csv that the list comes from")
    (table,) = tables
    try:
        names = write_list(target, Table.read(table), table.name)
    except OSError as error:
        raise click.ClickException(f"{error.filename}: {error.strerror}; both files must be there") from error
    except (ListError, TableError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{len(names)} operators written to {target}: {', '.join(names)}")


def _merge(tables: tuple[Path, ...], out: Path) -> None:
    from sglang_fl.aten.sweep.results import Table, TableError

    if len({table.resolve() for table in tables}) < len(tables):
        raise click.UsageError("--table: the same file twice, whose calls would count twice")
    try:
        merged = Table.merged([Table.read(table) for table in tables])
    except (OSError, TableError) as error:
        raise click.ClickException(str(error)) from error
    out.mkdir(parents=True, exist_ok=True)
    merged.write(out / TABLE)
    _report(merged, out)


def _sweep(shapes: tuple[Path, ...], out: Path, operators: str | None, limit_s: float, case_limit_s: float) -> None:
    from sglang_fl.aten.gems import GemsError, load
    from sglang_fl.aten.sweep.cases import CaseFileError, merge_cases, read_cases
    from sglang_fl.aten.sweep.origin import describe
    from sglang_fl.aten.sweep.partial import Partial, SweepError
    from sglang_fl.aten.sweep.results import Table, sort_results
    from sglang_fl.aten.sweep.run import Limits, choose, run

    try:
        gems = load()
        wanted = None if operators is None else _wanted(operators, gems)
        recorded = merge_cases([read_cases(file) for file in shapes])
        jobs = choose(recorded.cases, gems, None if wanted is None else set().union(*wanted.values()))
        if not jobs:
            raise click.ClickException(
                f"{', '.join(map(str, shapes))}: no call of an operator that FlagGems {gems.version} replaces"
            )
        out.mkdir(parents=True, exist_ok=True)
        click.echo(f"{len(jobs)} calls of {len({job.function for job in jobs})} operators, FlagGems {gems.version}")
        measured = {job.case.operator for job in jobs}
        for name in [name for name, keys in (wanted or {}).items() if not keys & measured]:
            click.echo(f"{name} is not measured: no recorded call of it")
        origin = describe(gems.version, recorded.origin)
        partial = Partial(out / PARTIAL, origin, click.echo)
        results, _ = run(jobs, partial, Limits(limit_s, case_limit_s), click.echo)
    except (CaseFileError, GemsError, SweepError) as error:
        raise click.ClickException(str(error)) from error
    table = Table(origin, sort_results(results))
    table.write(out / TABLE)
    _report(table, out)


def _wanted(operators: str, gems: Gems) -> dict[str, set[str]]:
    """Each name of --operators with the ATen operators that it means."""
    from sglang_fl.aten.plan import NameResolver
    from sglang_fl.config import without_namespace

    resolver = NameResolver(gems)
    names = [without_namespace(name.strip()) for name in operators.split(",")]
    problems = [resolver.problem(name) for name in names if not resolver.is_known(name)]
    if problems:
        raise click.UsageError(f"--operators: {' '.join(problems)} Correct the name or remove it.")
    return {name: resolver.operators([name]) for name in names}


def _report(table: Table, out: Path) -> None:
    from sglang_fl.aten.sweep.plot import PlotError, draw

    lines = [
        f"{name}:\n" + "\n".join(f"  {reason}" for reason in why) for name, why in sorted(table.excluded().items())
    ]
    (out / REPORT).write_text("\n".join(lines) + "\n")
    good, (mine, all_calls) = table.verified(), table.call_share()
    click.echo(f"excluded {len(lines)} operators; the reasons are in {out / REPORT}")
    click.echo(f"good {len(good)} operators, {mine} of {all_calls} recorded calls: {', '.join(good)}")
    click.echo(f"the table is {out / TABLE}")
    try:
        draw(table, out / PLOT)
    except PlotError as error:
        click.echo(f"no plot: {error}")
