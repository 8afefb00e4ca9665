"""The frame into which the commands are put; each is imported only when it is asked for."""

from __future__ import annotations

import errno
import importlib
import io
import os
import signal
import sys
from typing import NoReturn

import click

from sglang_fl import __version__
from sglang_fl.comm.errors import CommError
from sglang_fl.config import SettingsError

# Command to the module of this folder whose ``command`` implements it, and what --help says of it.
COMMANDS: dict[str, tuple[str, str]] = {
    "doctor": ("doctor", "Look at this installation: what it would use and why, and what stands in its way."),
    "config": ("config", "Show every setting with its value and where it comes from."),
    "explain": ("explain", "Show which implementation each fused operator gets, and why not the others."),
    "aten-sweep": ("aten_sweep", "Measure FlagGems' ATen operators against PyTorch's own, on recorded calls."),
    "comm-diff": ("comm_diff", "Compare ranks' dumps of their last communication calls: who did what instead."),
    "bisect": ("bisect", "Find the layer and the operator that make a server answer otherwise than SGLang alone."),
}


class LazyGroup(click.Group):
    """Lists every command without importing one: torch alone takes seconds."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of :data:`COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module; None if there is no such command."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"sglang_fl.cli.{COMMANDS[cmd_name][0]}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table of commands, from the texts above."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="sglang_fl")
def commands() -> None:
    """sglang_fl: SGLang on every chip that FlagOS supports.

    The plugin itself needs no command: once installed, SGLang loads it. These commands show, test and measure.
    """


WRONG = 2
# What a shell gives a command that Ctrl-C has ended.
INTERRUPTED = 128 + signal.SIGINT


def main() -> NoReturn:
    """Run the command line; an error of ours is its text and exit code 1, without a traceback.

    Ctrl-C is exit code 130, not click's 1: for bisect and comm-diff, 1 is a result.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a value must not end in an error of its encoding
    try:
        code = commands(prog_name="python -m sglang_fl", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        raise SystemExit(error.exit_code) from error
    except click.Abort as error:
        click.echo("interrupted", err=True)
        raise SystemExit(INTERRUPTED) from error
    except (SettingsError, CommError) as error:
        click.echo(str(error), err=True)
        raise SystemExit(1) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EPIPE):
            raise
        # Standard output is full or closed.
        click.echo(f"python -m sglang_fl: {error.strerror or error}", err=True)
        os._exit(WRONG)  # the interpreter's own flush would fail again
    raise SystemExit(code if isinstance(code, int) else 0)
