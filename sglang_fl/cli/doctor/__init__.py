"""``python -m sglang_fl doctor``: is this installation right, what would it use and why, what stands in its way.

A package, because looking takes several processes: what could hang or crash is looked at in a child.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console

from sglang_fl.cli.doctor import render, shadowing, surroundings
from sglang_fl.cli.doctor.children import Child, Failure
from sglang_fl.cli.doctor.plugin_in_sglang import MAIN, SPAWNED
from sglang_fl.cli.doctor.report import Finding, Hooks, Report
from sglang_fl.config import Problem, SettingsError, load_settings

_PACKAGE = "sglang_fl.cli.doctor"
_INSTALLATION, _MAIN, _SPAWNED = f"{_PACKAGE}.installation", f"{_PACKAGE}.plugin_in_sglang", f"{_PACKAGE}.spawned"
_PROCESSES = {_MAIN: MAIN, _SPAWNED: SPAWNED}
_NOT_LOOKED_AT = "not looked at: a server ends on the wrong settings"


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output, for programs.")
@click.option("--quick", is_flag=True, help="Without SGLang: no processes that load it, so nothing of hooks.")
@click.option("--nnodes", type=click.IntRange(1), metavar="N", help="Judge the network for a run on N hosts.")
@click.option("--master-addr", metavar="ADDR", help="The first host's address or name; default: MASTER_ADDR.")
@click.option(
    "--limit-s",
    type=click.FloatRange(1, 3600),
    callback=lambda context, option, value: _finite(value),
    default=120.0,
    show_default=True,
    help="Seconds for each look.",
)
def command(as_json: bool, quick: bool, nnodes: int | None, master_addr: str | None, limit_s: float) -> None:
    """Look at this installation: what is there, what a server would use and why, and what stands in its way.

    \b
    Sections: versions and where they lie; the device; every setting and where it comes from; each layer, on or
    off and why; what carries each fused operator and each collective, and why not the others; the plugin's
    hooks in a process like SGLang's command and in a spawned one; the network. Warnings and problems come last.
    Takes about ten seconds, because it starts processes that load SGLang; --quick leaves those out.

    Exit code 0: nothing that was asked for, by a variable, a YAML file or an option, is in the way. 1: something
    is; each problem says what to do. The same environment as the server's must be set: the doctor judges what it
    sees.

    \b
    Examples:
      python -m sglang_fl doctor
      FLAGCX_PATH=/opt/FlagCX python -m sglang_fl doctor --quick
      python -m sglang_fl doctor --nnodes 2 --master-addr node0
      python -m sglang_fl doctor --json | python -c 'import json, sys; print(json.load(sys.stdin)["problems"])'
    """
    report = examine(quick, nnodes, master_addr, limit_s)
    if as_json:
        click.echo(json.dumps(report.as_json(), indent=1))
    else:
        render.show(report, render.console())
    raise SystemExit(0 if report.is_right else 1)


def _finite(value: float) -> float:
    if math.isnan(value):
        raise click.BadParameter("nan is not in the range 1<=x<=3600.")
    return value


def examine(quick: bool, nnodes: int | None, master: str | None, limit_s: float) -> Report:
    """Look at everything; the arguments are the command's.

    Starts child processes and returns when all have ended, at most some seconds after ``limit_s``. This process itself
    imports neither torch nor SGLang, and touches no device.
    """
    wrong = _wrong_settings()
    modules = [_INSTALLATION] if quick or wrong.problems else [_INSTALLATION, _MAIN, _SPAWNED]
    children = {module: Child(module, limit_s) for module in modules}
    report = wrong
    report.add(surroundings.versions())
    report.add(shadowing.of_names(Path.cwd(), sys.path))
    report.add(surroundings.network_of(os.environ, nnodes, master))
    try:
        with _progress(list(children.values())) as tick:
            for child in children.values():
                child.wait(tick)
    finally:
        for child in children.values():
            child.kill()
    _collect(report, children)
    if len(modules) == 1:
        reason = _NOT_LOOKED_AT if wrong.problems else "not looked at: --quick"
        report.hooks = [Hooks(process, 0, 0, reason=reason) for process in _PROCESSES.values()]
    return report


def _wrong_settings() -> Report:
    """What a server would end on at once."""
    try:
        load_settings()
    except SettingsError as error:
        report = Report(problems=[_wrong(problem) for problem in error.problems])
        text = "because of the problems, what follows is shown as without any setting"
        report.warnings.append(Finding("settings", text, ""))
        return report
    return Report()


def _wrong(problem: Problem) -> Finding:
    meant = f"Did you mean {problem.suggestion}? " if problem.suggestion else ""
    found = f"{problem.where}: found {problem.found}; allowed: {problem.allowed}"
    return Finding("settings", found, f"{meant}{problem.action}")


def _collect(report: Report, children: dict[str, Child]) -> None:
    refused = _MAIN in children and any(isinstance(each, Failure) for each in children[_MAIN].results.values())
    for module, child in children.items():
        for name, result in child.results.items():
            part = _failed(module, name, result) if isinstance(result, Failure) else result
            if module == _SPAWNED and refused:  # the first process has told why
                part = Report(hooks=[Hooks(SPAWNED, 0, 0, reason="as in the main process")])
            if module == _MAIN and part.layers:
                report.layers.clear()  # the settings' own view of them, which is less
            report.add(part)


def _failed(module: str, name: str, failure: Failure) -> Report:
    """A look that gave nothing is a problem: SGLang would meet the same."""
    process = _PROCESSES.get(module)
    hooks = [] if process is None else [Hooks(process, 0, 0, reason=failure.reason.splitlines()[0])]
    if failure.is_refusal:
        found, action = failure.reason, "Correct what it names; SGLANG_PLUGINS=__none__ serves without the plugin."
    else:
        found = f"looking at {name} failed: {failure.reason}"
        action = "A server would meet the same; what it said last names the library or package to look at."
    return Report(problems=[Finding("SGLang" if process else name, found, action)], hooks=hooks)


@contextmanager
def _progress(children: Sequence[Child]) -> Iterator[Callable[[], None]]:
    """Shows on standard error what is being looked at: changing on a terminal, one line elsewhere."""
    out = Console(stderr=True, emoji=False)
    start = time.monotonic()

    def doing() -> str:
        names = [child.doing for child in children if child.doing]
        return f"looking at {', '.join(names) or 'what is installed'} ({time.monotonic() - start:.0f} s)"

    if not out.is_terminal:
        both = "; with SGLang's processes it takes about ten seconds" if len(children) > 1 else ""
        out.print(f"doctor: looking{both}", highlight=False)
        yield lambda: None
        return
    with out.status(doing()) as status:
        yield lambda: status.update(doing())
