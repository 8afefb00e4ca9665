"""SGLang with layer 1 of the plugin beside SGLang alone on one GPU; python -m benchmarks.e2e has all other plans."""

from __future__ import annotations

from rich.console import Console

from benchmarks.e2e.command import execute, parse
from benchmarks.e2e.report import figures
from benchmarks.figures import Figure, Kind

KIND = Kind.E2E
NEEDS_GPU = True


def run() -> list[Figure]:
    """The rows of the default plan.

    Raises:
        RuntimeError: a server failed, or the time was over before all starts were made.
    """
    outcome = execute(parse([]), Console(), "python -m benchmarks e2e")
    if outcome.failures or outcome.not_run:
        raise RuntimeError(f"failed: {outcome.failures}; not run: {outcome.not_run}")
    return figures(outcome)
