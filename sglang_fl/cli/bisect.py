"""``python -m sglang_fl bisect``: which layer, and which operator of it, makes a server answer otherwise."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from types import FrameType

import click
from rich.console import Console

from sglang_fl.cli.numbers import Finite

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REPORT = "report.json"


@click.command("bisect")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="-- LAUNCH_SERVER_ARGUMENTS...")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where logs, a script for each start and report.json go; by default a new folder of the temporary directory.",
)
@click.option(
    "--ready-limit-s",
    type=Finite(min=1),
    default=600.0,
    show_default=True,
    help="Seconds for a server, and an answer.",
)
@click.option(
    "--prompts",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="A text file with one prompt a line, in place of the built-in ones.",
)
@click.option("--new-tokens", type=click.IntRange(min=1), default=24, show_default=True, help="Greedy tokens a prompt.")
@click.option(
    "--tolerance",
    type=Finite(min=0, min_open=True),
    help="Root mean square of differences in log probability that is rounding; by default measured on SGLang alone.",
)
def command(
    arguments: tuple[str, ...],
    folder: Path | None,
    ready_limit_s: float,
    prompts: Path | None,
    new_tokens: int,
    tolerance: float | None,
) -> None:
    """Find the layer and the operator that make a server answer otherwise than SGLang alone.

    Starts sglang.launch_server on this machine with the arguments after --, again and again: without the plugin, with
    everything as configured, then with half of what could be wrong, until one layer and one operator of it are left.
    Each start is asked the same; greedy tokens and log probabilities are compared.

    \b
    python -m sglang_fl bisect -- --model-path Qwen/Qwen2.5-0.5B-Instruct
    FLAGCX_PATH=/opt/FlagCX python -m sglang_fl bisect -- --model-path Qwen/Qwen2.5-14B-Instruct --tp 8
    python -m sglang_fl bisect --folder /tmp/bisect -- --model-path Qwen/Qwen2.5-0.5B-Instruct --dtype float32

    2 starts show that nothing differs. Otherwise at most 2 more find the layer, and at most 3 (communication), 5
    (fused operators) or 10 (ATen operators, some more where one that is not recorded is at fault) the operator; the
    last of them shows that everything else is right. float32, where the model and its kernels take it, sees smaller
    faults than bfloat16, whose rounding hides them.

    Settings are those of this environment. --port, --host, --log-level and --api-key are replaced.

    Exit code 0: nothing differs, or rounding only. 1: something does, and is named. 2: it could not be tried.
    """
    from sglang_fl.bisect.parts import Configured, is_plugin_selected, own_backend
    from sglang_fl.bisect.report import Printer, show, write_json
    from sglang_fl.bisect.run import Bisection, CannotRunError, Options
    from sglang_fl.bisect.server import ArgumentsError, usable_arguments
    from sglang_fl.config import SettingsError, load_settings
    from sglang_fl.devices import detect_platform

    if not is_plugin_selected(os.environ):
        raise click.UsageError("SGLANG_PLUGINS does not name sglang_fl: there is nothing to look for. Unset it")
    platform = detect_platform()
    try:
        usable = tuple(usable_arguments(arguments))
        settings = load_settings(platform=platform)
    except (ArgumentsError, SettingsError) as error:
        raise click.UsageError(str(error)) from error
    where = folder or Path(tempfile.mkdtemp(prefix="sglang_fl-bisect-"))
    _require_folder(where)
    options = Options(usable, where, ready_limit_s, new_tokens=new_tokens, limit=tolerance)
    if prompts is not None:
        options = Options(usable, where, ready_limit_s, _read_prompts(prompts), new_tokens, tolerance)
    console = Console(emoji=False)
    if not console.is_terminal:
        console.width = max(console.width, 200)
    printer = Printer(console)
    bisection = Bisection(options, Configured(settings, own_backend(settings.system.platform)), printer)
    for number in _SIGNALS:
        signal.signal(number, _interrupt_once)
    verdict = None
    try:
        verdict = bisection.find()
    except CannotRunError as error:
        click.echo(f"bisect: {error}", err=True)
    finally:
        printer.close()
        show(console, bisection, verdict)
        write_json(where / REPORT, bisection, verdict)
        click.echo(f"logs, scripts and {REPORT} are in {where}")
    raise SystemExit(2 if verdict is None else int(verdict.part is not None))


def _require_folder(path: Path) -> None:
    """Found out before the first start: the folder is made, not what it should lie in, and a file can be made in it."""
    try:
        path.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise click.UsageError(f"--folder {path} cannot be made or written: {error.strerror}") from error


def _read_prompts(path: Path) -> tuple[str, ...]:
    prompts = tuple(line for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    if not prompts:
        raise click.UsageError(f"--prompts {path} holds no prompt: one a line")
    return prompts


def _interrupt_once(number: int, frame: FrameType | None) -> None:
    # A second signal must not cut short the stopping of the server.
    for name in _SIGNALS:
        signal.signal(name, signal.SIG_IGN)
    click.echo(f"\nbisect: {signal.Signals(number).name}: ending the server", err=True)
    raise SystemExit(128 + number)
