"""A command line that torchrun gives every rank: what is wrong with it is said once."""

from __future__ import annotations

import argparse
import os
import signal
import time
from types import FrameType
from typing import IO, NoReturn

WRONG = 2
# How long a rank waits for rank 0's message: the ranks import torch at different speeds.
PATIENCE_S = 20.0


class RanksParser(argparse.ArgumentParser):
    """Rank 0 speaks; each rank ends with exit code 2 where the command line is wrong."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, on rank 0, and end."""
        if not _is_silent():
            super().error(message)
        _wait_for_the_first()
        self.exit(WRONG)

    def print_help(self, file: IO[str] | None = None) -> None:  # type: ignore[override]
        """The help, on rank 0."""
        if not _is_silent():
            super().print_help(file)


def _is_silent() -> bool:
    return os.environ.get("RANK", "0") != "0"


def _wait_for_the_first() -> None:
    """torchrun ends all ranks when one has ended, so that one that says nothing must not be the first."""
    signal.signal(signal.SIGTERM, _end)
    time.sleep(PATIENCE_S)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(WRONG)
