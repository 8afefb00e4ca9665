"""Numbers on the command line: what is none is refused as the command line is read."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from sglang_fl.cli.frame import commands


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "0", "-1", "1e999", "1²"])
@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("aten-sweep", "--limit-s"),
        ("aten-sweep", "--case-limit-s"),
        ("bisect", "--ready-limit-s"),
        ("bisect", "--tolerance"),
    ],
)
def test_a_number_without_an_end_is_refused(command: str, option: str, text: str) -> None:
    """Given no finite number above 0, then the command is not begun, exit code 2, and the error names the option."""
    done = CliRunner().invoke(commands, [command, option, text])
    assert done.exit_code == 2
    assert f"Invalid value for '{option}'" in done.output


@pytest.mark.parametrize("text", ["9" * 5000, "1²", "0"], ids=["digits", "power", "zero"])
@pytest.mark.parametrize(("command", "option"), [("doctor", "--nnodes"), ("bisect", "--new-tokens")])
def test_a_count_that_is_none_is_refused(command: str, option: str, text: str) -> None:
    """Given no whole number of 1 or more, or one of more digits than Python reads, then as above."""
    done = CliRunner().invoke(commands, [command, option, text])
    assert done.exit_code == 2
    assert f"Invalid value for '{option}'" in done.output
