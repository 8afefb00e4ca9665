"""What a user sees: what is being started, how it ended, one table at the end; and the same as JSON."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from sglang_fl.bisect.comparison import Outcome, Tolerance
from sglang_fl.bisect.run import Bisection, Listener, Trial, Verdict
from sglang_fl.bisect.server import LaunchedServer
from sglang_fl.testing.server import Environment

_STYLES = {Outcome.EQUAL: "green", Outcome.ROUNDING: "yellow", Outcome.DIFFERS: "bold red", Outcome.FAILED: "bold red"}
NO_SETTINGS = "none of its own"
# Without a terminal: how often a server that is not ready yet is mentioned.
_SILENCE_S = 30.0


class Printer(Listener):
    """Lines, and on a terminal a line at the bottom that moves."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._title = ""
        self._start = self._last = 0.0

    def say(self, text: str) -> None:
        """A line, as it is."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def begin(self, title: str, server: LaunchedServer) -> None:
        """Say what is started, with what, and where its log is."""
        self._title = title
        self._start = self._last = time.monotonic()
        self.say(f"\n{server.label}: {title}")
        self.say(f"  settings: {settings_text(server.environment)}")
        self.say(f"  log: {server.log_path()}; by hand: sh {server.script_path}")
        if self._console.is_terminal:
            self._status = self._console.status(f"{escape(title)}: starting")
            self._status.start()

    def waiting(self, lines: list[str]) -> None:
        """Show how long it has been waited, and the newest line of the log."""
        elapsed = time.monotonic() - self._start
        if self._status is not None:
            newest = lines[-1].strip()[:80] if lines else None
            if newest is not None or time.monotonic() - self._last > 1:
                self._last = time.monotonic()
                shown = f", {newest}" if newest else ""
                self._status.update(escape(f"{self._title}: {elapsed:.0f} s{shown}"))
        elif time.monotonic() - self._last > _SILENCE_S:
            self._last = time.monotonic()
            self.say(f"  {elapsed:.0f} s: not ready yet")

    def end(self, trial: Trial) -> None:
        """Say how it ended."""
        self.close()
        comparison = trial.comparison
        difference = f": {comparison.first}" if comparison.first else ""
        elapsed = time.monotonic() - self._start
        self._console.print(f"  {comparison.outcome.value}", style=_STYLES[comparison.outcome], end="")
        self.say(f" after {elapsed:.0f} s{difference}")
        if trial.tail:
            self.say("  the log ends:\n" + "\n".join(f"  | {line}" for line in trial.tail.splitlines()))

    def close(self) -> None:
        """Take the moving line away."""
        if self._status is not None:
            self._status.stop()
            self._status = None


def settings_text(environment: Environment) -> str:
    """The changed variables as one would type them."""
    return " ".join(_settings_lines(environment)) or NO_SETTINGS


def _settings_lines(environment: Environment) -> list[str]:
    return [f"{name}={value}" if value is not None else f"{name} unset" for name, value in environment.items()]


def show(console: Console, bisection: Bisection, verdict: Verdict | None) -> None:
    """The table of all starts, if there was one, and the verdict."""
    if bisection.trials:
        console.print()
        console.print(_table(bisection))
    if bisection.tolerance is not None:
        console.print(bisection.tolerance.describe(), highlight=False, markup=False)
    for sentence in verdict.sentences if verdict is not None else ():
        console.print(sentence, style="bold", highlight=False, markup=False, soft_wrap=True)


def _table(bisection: Bisection) -> Table:
    table = Table("start", "settings", "outcome", "off by", "first difference", title="Every start")
    for trial in bisection.trials:
        comparison = trial.comparison
        off_by = "" if math.isnan(comparison.deviation) else f"{comparison.deviation:.1e}"
        table.add_row(
            escape(f"{trial.label}: {trial.setup.title}"),
            escape("\n".join(_settings_lines(trial.environment)) or NO_SETTINGS),
            f"[{_STYLES[comparison.outcome]}]{comparison.outcome.value}[/]",
            off_by,
            escape(comparison.first),
        )
        table.add_section()
    return table


def write_json(path: Path, bisection: Bisection, verdict: Verdict | None) -> None:
    """The same for programs."""
    found = None if verdict is None else verdict.part
    content = {
        "differs": found is not None,
        "part": found.value if found is not None else None,
        "item": verdict.item if verdict is not None else "",
        "sentences": list(verdict.sentences) if verdict is not None else [],
        "tolerance": _tolerance(bisection.tolerance),
        "starts": [_start(trial) for trial in bisection.trials],
    }
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _tolerance(tolerance: Tolerance | None) -> dict[str, float] | None:
    return None if tolerance is None else {"limit": tolerance.limit, "noise": tolerance.noise}


def _start(trial: Trial) -> dict[str, Any]:
    comparison = trial.comparison
    return {
        "label": trial.label,
        "title": trial.setup.title,
        "environment": trial.environment,
        "outcome": comparison.outcome.name.lower(),
        "deviation": None if math.isnan(comparison.deviation) else comparison.deviation,
        "first_difference": comparison.first,
    }
