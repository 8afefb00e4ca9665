"""How the routes of collectives by size are written: ``all_reduce=native:8MiB|flagcx``."""

from __future__ import annotations

import re
import reprlib
from functools import partial
from typing import Any

import yaml

from sglang_fl.config.numbers import MOST, whole_number
from sglang_fl.config.problems import closest
from sglang_fl.config.value_types import NOT_SET, InvalidValueError, ValueType, describe, line_of, parse_node
from sglang_fl.config.values import CaptureRule, CommRoute, CommRouteOrder, MemoryRule, RankRule, TextEnum

OPERATIONS = ("all_gather", "all_reduce", "reduce_scatter")
MAX_ROUTES_PER_OP = 8
_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_ROUTE = re.compile(
    r"(?P<backend>[A-Za-z_][A-Za-z0-9_.-]*)(:(?P<number>[0-9]+)(?P<unit>[A-Za-z]*))?(?P<rules>(@[\w+]+)*)"
)
_RANKS = re.compile(r"(?P<fewest>[0-9]+)(?P<more>\+?)ranks")
_FEWEST_RANKS = 2  # a group of one has nothing to send
# Only sums are made where the memory lies.
_WITH_MEMORY_RULES = "all_reduce"


class CommRoutes(ValueType):
    """Per operation, the routes by size in the order in which they are tried."""

    allowed = (
        f"for {', '.join(OPERATIONS)} 1 to {MAX_ROUTES_PER_OP} routes BACKEND[:MAX_BYTES][@graph or @eager]"
        "[@registered or @ordinary, for all_reduce][@Nranks or @N+ranks, N from 2], the bytes with KiB, MiB, GiB or "
        "none: "
        "all_reduce=native:8MiB|flagcx in a variable, all_reduce: [native:8MiB, flagcx] in YAML"
    )

    def from_text(self, text: str) -> tuple[CommRouteOrder, ...]:
        orders: dict[str, CommRouteOrder] = {}
        for entry in text.split(";"):
            op, equals, routes = entry.partition("=")
            if not equals:
                found = repr(entry.strip()) if entry.strip() else "an empty entry"
                raise InvalidValueError(found, self.allowed)
            self._add(orders, [self._route(token) for token in routes.split("|")], op)
        return self._sorted(orders)

    def from_node(self, node: yaml.Node) -> tuple[CommRouteOrder, ...]:
        if not isinstance(node, yaml.MappingNode):
            raise InvalidValueError(describe(node), self.allowed, line=line_of(node))
        orders: dict[str, CommRouteOrder] = {}
        for key, value in node.value:
            if not isinstance(value, yaml.SequenceNode):
                raise InvalidValueError(describe(value), self.allowed, line=line_of(value))
            routes = [parse_node(entry, self.allowed, self._route) for entry in value.value]
            parse_node(key, self.allowed, partial(self._add, orders, routes))
        return self._sorted(orders)

    def _add(self, orders: dict[str, CommRouteOrder], routes: list[CommRoute], op_text: str) -> None:
        op = op_text.strip()
        if op not in OPERATIONS:
            raise InvalidValueError(repr(op), self.allowed, closest(op, OPERATIONS))
        if op in orders:
            raise InvalidValueError(f"the operation {op} twice", self.allowed)
        if not 1 <= len(routes) <= MAX_ROUTES_PER_OP:
            raise InvalidValueError(f"{len(routes)} routes for {op}", self.allowed)
        for place, route in enumerate(routes):
            if route.memory and op != _WITH_MEMORY_RULES:
                raise InvalidValueError(f"{route} for {op}", self.allowed)
            hidden = next((earlier for earlier in routes[:place] if earlier.covers(route)), None)
            if hidden is not None:
                raise InvalidValueError(f"{route} for {op}, which is never reached after {hidden}", self.allowed)
        orders[op] = CommRouteOrder(op, tuple(routes))

    def _route(self, text: str) -> CommRoute:
        token = text.strip()
        match = _ROUTE.fullmatch(token)
        if match is None:
            raise InvalidValueError(repr(token), self.allowed)
        unit = (match["unit"] or "").lower()
        if unit not in _UNITS:
            raise InvalidValueError(repr(token), self.allowed)
        limit = _bytes(match["number"], _UNITS[unit])
        if limit is None and match["number"]:
            raise InvalidValueError(f"{reprlib.repr(token)}, more than 2**63 - 1 bytes", self.allowed)
        rules = match["rules"].split("@")[1:]
        when, memory = (_taken(rules, kind) for kind in (CaptureRule, MemoryRule))
        ranks = _ranks(rules.pop()) if len(rules) == 1 else RankRule()
        if rules or ranks is None:
            raise InvalidValueError(repr(token), self.allowed)
        return CommRoute(match["backend"], limit, CaptureRule(when), MemoryRule(memory), ranks)

    def _sorted(self, orders: dict[str, CommRouteOrder]) -> tuple[CommRouteOrder, ...]:
        return tuple(orders[op] for op in sorted(orders))

    def to_text(self, value: Any) -> str:
        return ";".join(f"{o.op}={'|'.join(map(str, o.routes))}" for o in value) if value else NOT_SET

    def to_yaml(self, value: Any) -> str:
        # One level deeper than a mapping at the top: the field stands inside the mapping comm.
        return "".join(f"\n    {o.op}: [{', '.join(map(_quoted, o.routes))}]" for o in value) or "{}"


def _bytes(number: str | None, unit: int) -> int | None:
    units = None if number is None else whole_number(number, MOST // unit)
    return None if units is None else units * unit


def _ranks(rule: str) -> RankRule | None:
    """``2ranks`` or ``3+ranks``; None if it is neither."""
    match = _RANKS.fullmatch(rule)
    fewest = None if match is None else whole_number(match["fewest"])
    if match is None or fewest is None or fewest < _FEWEST_RANKS:
        return None
    return RankRule(fewest, None if match["more"] else fewest)


def _quoted(route: CommRoute) -> str:
    return f'"{route}"'


def _taken(rules: list[str], kind: type[TextEnum]) -> str:
    """The first of ``rules`` that is one of ``kind``, taken out; empty if none is."""
    found = next((rule for rule in rules if rule in {member.value for member in kind}), "")
    if found:
        rules.remove(found)
    return found
