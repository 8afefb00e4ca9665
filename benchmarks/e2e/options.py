"""What the programs that start servers take: types of options, places that can be written, FlagCX; all tried first."""

from __future__ import annotations

import argparse
import json
import os
import reprlib
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import record
from sglang_fl.comm.backends.flagcx import locate
from sglang_fl.comm.backends.flagcx.errors import FlagCXError
from sglang_fl.comm.errors import CommError
from sglang_fl.comm.tools.record import require_writable
from sglang_fl.config.numbers import whole_number

FLAGCX_VARIABLE = "FLAGCX_PATH"
HOSTCX = record.ROOT / "build" / "hostcx"
NOT_OF_COMMIT = "+changes"


class OptionError(ValueError):
    """An option, or a variable that stands for one, cannot be used; the text says what to do."""


def positive(text: str) -> int:
    """A whole number from 1 on, for argparse."""
    number = whole_number(text)
    if not number:
        raise argparse.ArgumentTypeError(f"{reprlib.repr(text)} is no whole number above 0")
    return number


def require_once(option: str, names: Sequence[str]) -> None:
    """Each of ``names`` once.

    Raises:
        OptionError: names those that are there again.
    """
    again = [name for name, count in Counter(names).items() if count > 1]
    if again:
        raise OptionError(f"{option}: {', '.join(again)} more than once; name each once")


def require_folder(option: str, path: Path) -> None:
    """Make the folder, and try to write in it.

    Raises:
        OptionError: it is a file, or it cannot be made or written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise OptionError(
            f"{option} {path}: {error.strerror}; name a folder that is there or can be made, and can be written to"
        ) from error


def require_file(option: str, path: Path) -> None:
    """Make the folder of a file that will be written, and try the file; one that is there keeps its content.

    Raises:
        OptionError: it is a folder, or it or its folder cannot be made or written to.
    """
    require_folder(f"{option} {path}: its folder", path.parent)
    try:
        require_writable(option, path)
    except CommError as error:
        raise OptionError(str(error)) from error


def read_record(path: Path) -> Mapping[str, Any] | None:
    """What an earlier run wrote, for --resume; None where nothing is there.

    Raises:
        OptionError: it is no JSON object, or cannot be read.
    """
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise broken_record(path, error) from error
    if not isinstance(content, dict):
        raise broken_record(path, TypeError(f"it holds a {type(content).__name__}"))
    return content


def broken_record(path: Path, error: Exception) -> OptionError:
    """For a record that is not one of the program's."""
    found = f"{type(error).__name__}: {error}"
    return OptionError(f"--resume: {path} is no record to go on from: {found}; remove it, or leave --resume out")


def other_commit(found: str, commit: str) -> str:
    """Why a record of commit ``found`` cannot be gone on from at ``commit``; empty if it can."""
    if not commit:
        return "this commit is not known here: give --commit"
    if commit.endswith(NOT_OF_COMMIT):
        return "the checkout has changes that are in no commit"
    return "" if found == commit else f"the record is of commit {found or 'unknown'}, this is {commit}"


def write_whole(content: dict[str, Any], path: Path) -> None:
    """Write a record so that whoever ends this process leaves the one before or this one, never a part."""
    if path.exists() and not path.is_file():  # such as /dev/null, which must not be replaced
        record.write(content, path)
        return
    partial = path.with_name(f"{path.name}.partial")
    record.write(content, partial)
    partial.replace(path)


def find_flagcx(is_on_gpu: bool) -> str:
    """FlagCX's place: FLAGCX_PATH, on a CPU by default this checkout's hostcx.

    Raises:
        OptionError: it is not set, or leads to no library that this process can load.
    """
    advice = "set it to FlagCX's folder" if is_on_gpu else "run make hostcx, or set it"
    given = os.environ.get(FLAGCX_VARIABLE) or ("" if is_on_gpu else str(HOSTCX))
    if not given:
        raise OptionError(f"{FLAGCX_VARIABLE} is not set; {advice}")
    try:
        locate.find(given)
    except FlagCXError as error:
        # Its advice ends with the loader's search path, where servers would find any other library.
        raise OptionError(f"{error.details.removesuffix(f'. {locate.ALLOWED}')}; {advice}") from error
    return given
