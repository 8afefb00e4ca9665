"""``make demo``: SGLang answers on this machine's CPU with two ranks, and the plugin shows what it carried."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import click
from rich.console import Console
from rich.table import Table

from sglang_fl.testing.audits import VARIABLE, ProcessAudit, inactive, settled_audits
from sglang_fl.testing.server import Server, ServerError
from sglang_fl.testing.tiny_model import DEFAULT_QUESTION, write_tiny_model

_SILENCE_S = 10.0

# What the server's log says when it has come so far, and what that means.
_MILESTONES = (
    ("server_args=", "the main process has its settings; the scheduler processes start and import SGLang"),
    ("Init torch distributed begin", "the scheduler processes have imported SGLang; their ranks meet"),
    ("hooks live:", "SGLang's groups have their backends, all hooks are live; the model is loaded"),
    ("Load weight end", "the model is loaded; the server opens its port"),
)


class _Inactive(Exception):  # noqa: N818 - it is an outcome, not a fault of this program
    """The plugin is not active in one of the scheduler processes."""


class _Progress:
    """Says how far the server is; after a silence, that it is still at work."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._start = self._last = time.monotonic()
        self._ahead = list(_MILESTONES)
        self._doing = "Python imports torch and SGLang"

    def __call__(self, lines: list[str]) -> None:
        for line in lines:
            for sign, meaning in [milestone for milestone in self._ahead if milestone[0] in line]:
                self._ahead.remove((sign, meaning))
                self._tell(meaning)
        if time.monotonic() - self._last > _SILENCE_S:
            self._tell(f"still: {self._doing}")

    def _tell(self, text: str) -> None:
        self._last = time.monotonic()
        self._doing = text.removeprefix("still: ")
        self._say(f"  {self._last - self._start:5.1f} s  {text}")


def _calls_table(audits: list[ProcessAudit]) -> Table:
    """What each process reports: one row per group and method."""
    table = Table("process", "group", "ranks", "backend", "method", "calls", title="As each scheduler process reports")
    for audit in audits:
        name = f"rank {audit.rank}, pid {audit.pid}"
        for group in audit.shared_groups:
            calls = sorted(group.calls.items()) or [("no call", 0)]
            for method, count in calls:
                table.add_row(name, group.name, str(list(group.ranks)), group.backend, method, str(count))
        if not audit.shared_groups:
            table.add_row(name, "every group", "this rank alone", "none needed", "no call", "0")
        table.add_section()
    return table


def _carried_lines(audits: list[ProcessAudit]) -> list[str]:
    """Per group, which backend carried how many calls, of all ranks together."""
    carried = sum((audit.carried for audit in audits), Counter())
    return [f"group {group}: {backend} carried {calls} calls" for (group, backend), calls in sorted(carried.items())]


def _passed_over(server: Server) -> list[str]:
    """What the server's log says of backends that were asked for and are not used."""
    found = (line for line in server.log().splitlines() if "Passed over" in line)
    return list(dict.fromkeys(line.partition("group ")[2] for line in found))


def _explain(server: Server, problems: list[str]) -> str:
    """The problems, and what may have caused them."""
    mentions = [line for line in server.log().splitlines() if "plugin" in line.lower() and "server_args=" not in line]
    selected = os.environ.get("SGLANG_PLUGINS")
    return "\n".join(
        [
            *problems,
            f"SGLANG_PLUGINS is {'not set' if selected is None else repr(selected)}; if set, it must name sglang_fl.",
            "`pip show sglang_fl` tells whether it is installed. The server's log says of plugins:",
            *(mentions[:20] or ["nothing"]),
        ]
    )


def _show(console: Console, server: Server, question: str, audit: Path) -> None:
    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    say(f"\n== the server's command\n{server.shell_command()}\n\n== waiting for it")
    server.on_wait = _Progress(say)
    with server:
        say(f"  {server.ready_after_s:5.1f} s  ready")
        say(f"\n== question\n{question}\n\n== answer (of random weights: no sense is to be expected)")
        say(server.chat(question, new_tokens=32))
        audits = settled_audits(audit, server.world_size)
        problems = inactive(server, audits)
        console.print()
        if audits:
            console.print(_calls_table(audits))
            for line in _carried_lines(audits):
                say(line)
        for line in _passed_over(server):
            say(f"group {line}")
        if problems:
            raise _Inactive(_explain(server, problems))
    say(f"the plugin was active in all {server.world_size} scheduler processes; the server is stopped")


def _interrupt_once(number: int, frame: FrameType | None) -> None:
    # A second signal must not cut short the stopping of the server.
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    click.echo(f"\nmake demo: {signal.Signals(number).name}: ending the server", err=True)
    raise SystemExit(128 + number)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--tp", default=2, show_default=True, help="Tensor-parallel size.")
@click.option("--question", default=DEFAULT_QUESTION, show_default=True)
def main(tp: int, question: str) -> None:
    """Start SGLang on the CPU with a tiny random model, ask it, and show what the plugin carried.

    Variables of the environment (SGLANG_*, FLAGCX_PATH, ...) hold for the server. Exit code 1: the server did
    not become ready, or the plugin was not active in one of its scheduler processes.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt_once)
    console = Console(emoji=False)
    console.width = max(console.width, 100)
    with tempfile.TemporaryDirectory(prefix="sglang_fl-demo-") as name:
        folder = Path(name)
        console.print("== writing a tiny random Qwen2 model with a real tokenizer")
        model = write_tiny_model(folder / "model")
        audit = Path(os.environ.get(VARIABLE) or folder / "audit.json")
        server = Server(model, folder, tp=tp, environment={VARIABLE: str(audit)})
        try:
            _show(console, server, question, audit)
        except ServerError as error:
            click.echo(f"\nmake demo: {error}", err=True)
            sys.exit(1)
        except _Inactive as error:
            click.echo(f"\nmake demo: the plugin is not active in every scheduler process:\n{error}", err=True)
            sys.exit(1)


if __name__ == "__main__":
    main()
