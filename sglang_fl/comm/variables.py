"""Variables as a collective library finds them: in the environment, else in its configuration files."""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Found:
    """A variable's value, and where it is set."""

    value: str
    where: str


def find_variables(environment: Mapping[str, str], files: Iterable[Path]) -> dict[str, Found]:
    """All of them by name; the environment wins over the files, and an earlier file over a later one."""
    found = {name: Found(value, "the environment") for name, value in environment.items()}
    for path in files:
        for name, value in _lines_of(path):
            found.setdefault(name, Found(value, str(path)))
    return found


def in_home(name: str) -> tuple[Path, ...]:
    """The user's file of that name: in the home of the user database, not $HOME; none for a user it does not know."""
    with contextlib.suppress(KeyError):
        return (Path(pwd.getpwuid(os.getuid()).pw_dir) / name,)
    return ()


def _lines_of(path: Path) -> list[tuple[str, str]]:
    """NAME=value lines as FlagCX and NCCL split them: at the first =, without trimming."""
    try:
        text = path.read_bytes().decode("utf-8", errors="surrogateescape")
    except OSError:
        return []  # the libraries pass over a file that they cannot open, too
    pairs = [line.partition("=") for line in text.split("\n")]
    return [(name, value) for name, separator, value in pairs if separator]
