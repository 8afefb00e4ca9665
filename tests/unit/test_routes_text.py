"""Routes by size as they are written and read, and which of them hides which."""

from __future__ import annotations

import reprlib

import pytest

from sglang_fl.config import CaptureRule, CommRoute, MemoryRule, SettingsError, load_settings
from sglang_fl.config.route_type import CommRoutes

GRAPH, EAGER = CaptureRule.GRAPH, CaptureRule.EAGER
REGISTERED, ORDINARY = MemoryRule.REGISTERED, MemoryRule.ORDINARY


@pytest.mark.parametrize(
    ("text", "route"),
    [
        ("a", CommRoute("a")),
        ("a:4KiB", CommRoute("a", 4096)),
        ("a@graph", CommRoute("a", None, GRAPH)),
        ("a@registered", CommRoute("a", None, memory=REGISTERED)),
        ("a:1@eager@ordinary", CommRoute("a", 1, EAGER, ORDINARY)),
        ("a:1@ordinary@eager", CommRoute("a", 1, EAGER, ORDINARY)),
    ],
)
def test_a_route_is_read_and_written(text: str, route: CommRoute) -> None:
    """Given a route, when it is read, then it is what it says, and what is written reads as the same."""
    (order,) = CommRoutes().from_text(f"all_reduce={text}")
    assert order.routes == (route,)
    (again,) = CommRoutes().from_text(f"all_reduce={route}")
    assert again.routes == (route,)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("all_reduce=a@graph@eager", "'a@graph@eager'"),
        ("all_reduce=a@registered@registered", "'a@registered@registered'"),
        ("all_reduce=a@", "'a@'"),
        ("all_reduce=a@pinned", "'a@pinned'"),
        ("all_gather=a@registered", "a@registered for all_gather"),
        ("all_reduce=a@registered|a:1@registered@graph", "a:1@graph@registered for all_reduce, which is never reached"),
        (f"all_reduce=x:{'9' * 5000}", "'x:9999999999...9999999999999', more than 2**63 - 1 bytes"),
        ("all_reduce=x:8589934592GiB", "'x:8589934592GiB', more than 2**63 - 1 bytes"),
        ("all_reduce=x:8²", "'x:8²'"),
    ],
    ids=reprlib.repr,
)
def test_what_cannot_be_a_route(text: str, found: str) -> None:
    """Given a rule twice, of an unknown name, for an operation that has none, or a route that is never reached, then
    it is an error that shows it and the form that is allowed."""
    with pytest.raises(SettingsError) as raised:
        load_settings({"SGLANG_FL_COMM_ROUTES": text})
    assert found in str(raised.value) and "[@registered or @ordinary, for all_reduce]" in str(raised.value)


@pytest.mark.parametrize(
    ("earlier", "later", "covers"),
    [
        ("a", "b:1@graph@registered", True),
        ("a@registered", "b@registered@eager", True),
        ("a@registered", "b", False),
        ("a@registered", "b@ordinary", False),
        ("a:8@graph", "b:8@graph@ordinary", True),
        ("a:8@graph@ordinary", "b:8@graph", False),
        ("a:8", "b:9", False),
        ("a:8", "b", False),
    ],
)
def test_which_route_hides_which(earlier: str, later: str, covers: bool) -> None:
    """Given two routes, then the first hides the second if every call that fits the second fits the first."""
    one, other = (CommRoutes().from_text(f"all_reduce={text}")[0].routes[0] for text in (earlier, later))
    assert one.covers(other) is covers
