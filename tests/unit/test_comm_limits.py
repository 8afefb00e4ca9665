"""Time limits: one check, the setting's, on whatever way they are given."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sglang_fl.comm.communicator import CommunicatorFL, group_context
from sglang_fl.comm.limits import checked_limit
from sglang_fl.comm.replays import watch_graphs
from sglang_fl.comm.tools.launch import launched
from sglang_fl.comm.tools.sizes import seconds
from sglang_fl.comm.types import GroupContext
from sglang_fl.config import Settings, load_settings
from sglang_fl.sglang_hooks import groups

CPU = torch.device("cpu")
WRONG = (math.nan, math.inf, -math.inf, 0, 0.0, -1, 1e-6, 1e9, "10", "10s", True, [1], timedelta(seconds=1))
ALLOWED = "allowed is a number of seconds from 0.001, such as 90 or 0.5, at most 31536000 (a year)"


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The defaults, in a process that is the only rank."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    return load_settings()


def _group(limits: dict[str, Any], settings: Settings) -> Any:
    described = {"cpu_group": None, "device_group": None, "device": CPU, "ranks": [0], "settings": settings}
    return CommunicatorFL(**described, **limits)


def _context(limits: dict[str, Any], settings: Settings) -> GroupContext:
    return group_context(None, None, CPU, [0], "tp:0", settings, **limits)  # type: ignore[arg-type]  # no groups


def _described(limits: dict[str, Any], _: Settings) -> GroupContext:
    return GroupContext("tp:0", (0,), 0, CPU, None, None, **limits)  # type: ignore[arg-type]


def _changed(limits: dict[str, Any], settings: Settings) -> GroupContext:
    return replace(_context({}, settings), **limits)


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
@pytest.mark.parametrize("name", ["timeout_s", "operation_timeout_s"])
@pytest.mark.parametrize("make", [_group, _context, _described, _changed])
def test_a_group_takes_no_limit_that_is_none(
    make: Callable[..., Any], name: str, wrong: Any, settings: Settings
) -> None:
    """Given what is no time limit, when a group is made or described with it, then the error names the parameter, what
    was given and what is allowed."""
    with pytest.raises(ValueError) as raised:
        make({name: wrong}, settings)
    assert str(raised.value) == f"{name} is {wrong!r}; {ALLOWED}"


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_tools_and_graphs_take_no_limit_that_is_none(wrong: Any) -> None:
    """Given what is no time limit, when ranks join for a tool or graphs are watched, the same error comes."""
    with pytest.raises(ValueError, match=r"^timeout_s is .*; allowed is a number of seconds"), launched("cpu", wrong):
        pass
    with pytest.raises(ValueError, match=r"^limit_s is .*; allowed is a number of seconds"):
        watch_graphs(wrong)


@pytest.mark.parametrize("text", ["nan", "inf", "0", "-1", "1e9", "10s", ""])
def test_a_command_line_takes_no_limit_that_is_none(text: str) -> None:
    """Given what is no time limit, when a command line has it, then its error says what is allowed."""
    with pytest.raises(argparse.ArgumentTypeError) as raised:
        seconds(text)
    assert str(raised.value) == f"{text!r} is no time limit; {ALLOWED}"


def test_sglangs_limit_is_checked_as_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a --dist-timeout of 0, then the error names it; one of a minute is taken, and none is none."""
    state = SimpleNamespace(_MODEL_PARALLEL_GROUP_TIMEOUT=timedelta(0))
    monkeypatch.setattr("sglang.srt.distributed.parallel_state", state)
    with pytest.raises(ValueError, match=r"^--dist-timeout is 0\.0; allowed is"):
        groups._dist_timeout_s()
    state._MODEL_PARALLEL_GROUP_TIMEOUT = timedelta(minutes=1)
    assert groups._dist_timeout_s() == 60.0
    state._MODEL_PARALLEL_GROUP_TIMEOUT = None
    assert groups._dist_timeout_s() is None


@pytest.mark.parametrize("limit_s", [0.001, 1, 90.5, 365 * 24 * 3600])
def test_a_limit_is_taken_as_it_is(limit_s: float, settings: Settings) -> None:
    """Given a limit from a millisecond to a year, then a group has it, and the settings' where none is given."""
    assert checked_limit("limit_s", limit_s) == limit_s
    context = _context({"timeout_s": limit_s, "operation_timeout_s": limit_s}, settings)
    assert (context.timeout_s, context.operation_timeout_s) == (limit_s, limit_s)
    context = _context({}, settings)
    assert (context.timeout_s, context.operation_timeout_s) == (settings.comm.create_timeout_s, 600.0)
