"""The server under test: the user's own command on a port of ours, with its log where the user is told."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_fl.config.fields import FIELD_BY_VARIABLE
from sglang_fl.testing.server import CPU_ENVIRONMENT, HOST, Server

# Of ours in every start; a value of the user's is taken out.
REPLACED = ("--port", "--host", "--log-level", "--api-key")
TAIL_LINES = 20


class ArgumentsError(ValueError):
    """The server's arguments cannot be used for this."""


def usable_arguments(arguments: Sequence[str]) -> list[str]:
    """The user's arguments of ``sglang.launch_server`` without those that every start has its own of.

    Raises:
        ArgumentsError: there are none, or they ask for more than one node.
    """
    kept: list[str] = []
    given = iter(arguments)
    for argument in given:
        name, equals, value = argument.partition("=")
        if name == "--nnodes":
            value = value if equals else next(given, "")
            if value != "1":
                raise ArgumentsError(
                    f"--nnodes {value}: bisect starts servers on this machine only. Leave --nnodes out, and choose "
                    "sizes that fit one machine."
                )
            continue
        if name in REPLACED:
            if not equals:
                next(given, None)
            continue
        kept.append(argument)
    if not any(argument.partition("=")[0] in ("--model-path", "--model", "--config") for argument in kept):
        raise ArgumentsError("no --model-path among the arguments after --: give those of sglang.launch_server")
    return kept


@dataclass
class LaunchedServer(Server):
    """``sglang.launch_server`` with the user's arguments; ``label`` names its files in ``folder``."""

    label: str = "server"

    def command(self, node: int = 0) -> list[str]:
        """The exact command."""
        fixed = (f"--host={HOST}", f"--port={self.port}", "--log-level=info")
        return [sys.executable, "-m", "sglang.launch_server", *self.arguments, *fixed]

    def variables(self, node: int = 0) -> dict[str, str | None]:
        """What is changed in the user's environment."""
        return dict(self.environment)

    def log_path(self, node: int = 0) -> Path:
        """Standard output and error of the server."""
        return self.folder / f"{self.label}.log"

    @property
    def script_path(self) -> Path:
        """A shell script that starts the same server."""
        return self.folder / f"{self.label}.sh"

    def write_script(self) -> None:
        """Write what a user runs to have this server again, with those of this environment's variables that matter."""
        inherited = {name: value for name, value in os.environ.items() if _matters(name)}
        variables = {**inherited, **self.environment}
        removed = [f"unset {name}" for name, value in variables.items() if value is None]
        given = [f"export {name}={shlex.quote(value)}" for name, value in variables.items() if value is not None]
        place = f"cd {shlex.quote(str(Path.cwd()))}"
        lines = ["#!/bin/sh", place, *removed, *given, f"exec {shlex.join(self.command())}"]
        self.script_path.write_text("\n".join(lines) + "\n")
        self.script_path.chmod(0o755)

    def last_lines(self) -> str:
        """The end of the log."""
        lines = self.log().splitlines() if self.log_path().exists() else []
        return "\n".join(lines[-TAIL_LINES:]) or "(nothing was written)"


def _matters(name: str) -> bool:
    return name.startswith("SGLANG_") or name in FIELD_BY_VARIABLE or name in CPU_ENVIRONMENT or name == "PYTHONPATH"
