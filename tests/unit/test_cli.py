"""The command line's frame: values are printed as they are, and an output that cannot take them is said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

VALUE = "/opt/[bold]x[/foo]:smile:\N{SNOWMAN}"


def run(*arguments: str, stdout: object = subprocess.PIPE, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    command = [sys.executable, "-m", "sglang_fl", *arguments]
    return subprocess.run(
        command, env=os.environ | variables, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False
    )  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_value_is_printed_as_it_is(encoding: str) -> None:
    """Given a path that reads like markup and emoji, when printed, then it is that path, escaped where it must be."""
    done = run("config", FLAGCX_PATH=VALUE, PYTHONIOENCODING=encoding, COLUMNS="200")
    assert done.returncode == 0, done.stderr
    shown = VALUE if encoding == "utf-8" else VALUE.replace("\N{SNOWMAN}", "\\u2603")
    assert shown in done.stdout


def test_an_output_that_is_full_is_one_line() -> None:
    """Given a full disk, then one line, exit code 2 and no traceback."""
    with Path("/dev/full").open("w") as full:
        done = run("config", stdout=full)
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["python -m sglang_fl: No space left on device"]
