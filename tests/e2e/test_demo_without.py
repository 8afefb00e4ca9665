"""The demo where FlagCX or the plugin is missing: what it says of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .demo_program import LIMIT_S, processes_of, start

pytestmark = pytest.mark.e2e


def test_it_says_what_was_passed_over(tmp_path: Path) -> None:
    """Given a FLAGCX_PATH without a library, then the demo answers, and says why flagcx carries nothing."""
    demo = start(tmp_path, FLAGCX_PATH=str(tmp_path))
    output, _ = demo.communicate(timeout=LIMIT_S)
    assert demo.returncode == 0, output
    assert "group tp:0: torch carried" in output
    assert re.search(r"^group tp:0 is carried by torch. Passed over: flagcx: all ranks: .*", output, re.MULTILINE), (
        output
    )


def test_it_fails_where_the_plugin_is_not_active(tmp_path: Path) -> None:
    """Given SGLANG_PLUGINS=__none__, then SGLang answers, and the demo names the processes and ends with 1."""
    demo = start(tmp_path, SGLANG_PLUGINS="__none__")
    output, _ = demo.communicate(timeout=LIMIT_S)
    assert demo.returncode == 1, output
    assert "== answer" in output
    assert len(re.findall(r"^\S*scheduler_TP[01] \(pid \d+\): no report from the plugin", output, re.MULTILINE)) == 2
    assert "SGLANG_PLUGINS is '__none__'" in output
    assert processes_of(tmp_path) == []
