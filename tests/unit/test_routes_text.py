"""Routes by size as they are written and read, and which of them hides which."""

from __future__ import annotations

import reprlib

import pytest
import yaml

from sglang_fl.config import CaptureRule, CommRoute, MemoryRule, RankRule, SettingsError, load_settings
from sglang_fl.config.route_type import CommRoutes

GRAPH, EAGER = CaptureRule.GRAPH, CaptureRule.EAGER
REGISTERED, ORDINARY = MemoryRule.REGISTERED, MemoryRule.ORDINARY
NO_RANK_RULES = ("ranks", "1ranks", "1+ranks", "2rank", "2ranks+", "+2ranks", "²ranks", "9" * 20 + "ranks")


@pytest.mark.parametrize(
    ("text", "route"),
    [
        ("a", CommRoute("a")),
        ("a:4KiB", CommRoute("a", 4096)),
        ("a@graph", CommRoute("a", None, GRAPH)),
        ("a@registered", CommRoute("a", None, memory=REGISTERED)),
        ("a:1@eager@ordinary", CommRoute("a", 1, EAGER, ORDINARY)),
        ("a:1@ordinary@eager", CommRoute("a", 1, EAGER, ORDINARY)),
        ("a@2ranks", CommRoute("a", ranks=RankRule(2, 2))),
        ("a@16+ranks", CommRoute("a", ranks=RankRule(16))),
        ("a:1@3+ranks@ordinary@graph", CommRoute("a", 1, GRAPH, ORDINARY, RankRule(3))),
        ("a:1@graph@2ranks@ordinary", CommRoute("a", 1, GRAPH, ORDINARY, RankRule(2, 2))),
    ],
)
def test_a_route_is_read_and_written(text: str, route: CommRoute) -> None:
    """Given a route, when it is read, then it is what it says, and what is written reads as the same, also as YAML."""
    (order,) = CommRoutes().from_text(f"all_reduce={text}")
    assert order.routes == (route,)
    (again,) = CommRoutes().from_text(f"all_reduce={route}")
    assert again.routes == (route,)
    assert CommRoutes().from_node(yaml.compose(CommRoutes().to_yaml((order,)))) == (order,)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("all_reduce=a@graph@eager", "'a@graph@eager'"),
        ("all_reduce=a@registered@registered", "'a@registered@registered'"),
        ("all_reduce=a@", "'a@'"),
        ("all_reduce=a@pinned", "'a@pinned'"),
        *((f"all_reduce=a@{rule}", f"'a@{rule}'") for rule in NO_RANK_RULES),
        ("all_gather=a@2ranks@2ranks", "'a@2ranks@2ranks'"),
        ("all_reduce=a@2+ranks@3ranks", "'a@2+ranks@3ranks'"),
        ("all_reduce=a@3+ranks|a@4ranks", "a@4ranks for all_reduce, which is never reached after a@3+ranks"),
        ("all_gather=a@registered", "a@registered for all_gather"),
        ("all_reduce=a@registered|a:1@registered@graph", "a:1@graph@registered for all_reduce, which is never reached"),
        (f"all_reduce=x:{'9' * 5000}", "'x:9999999999...9999999999999', more than 2**63 - 1 bytes"),
        ("all_reduce=x:8589934592GiB", "'x:8589934592GiB', more than 2**63 - 1 bytes"),
        ("all_reduce=x:8²", "'x:8²'"),
    ],
    ids=reprlib.repr,
)
def test_what_cannot_be_a_route(text: str, found: str) -> None:
    """Given a rule twice, of an unknown name or number of ranks, for an operation that has none, or a route that is
    never reached, then it is an error that shows it and the form that is allowed."""
    with pytest.raises(SettingsError) as raised:
        load_settings({"SGLANG_FL_COMM_ROUTES": text})
    allowed = "[@registered or @ordinary, for all_reduce][@Nranks or @N+ranks, N from 2]"
    assert found in str(raised.value) and allowed in str(raised.value)


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
        ("a", "b@2ranks", True),
        ("a@2ranks", "b", False),
        ("a@2ranks", "b@2ranks@graph", True),
        ("a@2ranks", "b@2+ranks", False),
        ("a@2ranks", "b@3+ranks", False),
        ("a@3+ranks", "b@8ranks", True),
        ("a@3+ranks", "b@2ranks", False),
        ("a@3+ranks", "b@4+ranks", True),
        ("a@4+ranks", "b@3+ranks", False),
        ("a:8@2ranks", "b@2ranks", False),
    ],
)
def test_which_route_hides_which(earlier: str, later: str, covers: bool) -> None:
    """Given two routes, then the first hides the second if every call that fits the second fits the first."""
    one, other = (CommRoutes().from_text(f"all_reduce={text}")[0].routes[0] for text in (earlier, later))
    assert one.covers(other) is covers
