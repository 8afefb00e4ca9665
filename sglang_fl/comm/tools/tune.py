"""From measured times to routes by size: the rule, and the YAML that layer 3 reads under mode fastest."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_fl.comm.errors import CommError
from sglang_fl.comm.policy import communicator_order
from sglang_fl.comm.route_table import NATIVE
from sglang_fl.comm.tools.measure import Mode, Result
from sglang_fl.config import CaptureRule, CommRoute, CommRouteOrder, Settings, load_settings
from sglang_fl.config.route_type import MAX_ROUTES_PER_OP, OPERATIONS, CommRoutes

MARGIN = 0.05
# How SGLang's models call them; the benchmark times both forms.
_IN_PLACE = {"all_reduce": True, "all_gather": False, "reduce_scatter": False}
_WHEN = {Mode.EAGER: CaptureRule.EAGER, Mode.GRAPH: CaptureRule.GRAPH}
RULE = (
    f"From the smallest size to the largest, the group's backend carries a call until another is faster by more than "
    f"{MARGIN:.0%} in the median and in every cycle; from then on that one, by the same rule. A route ends at the "
    f"largest measured size that its backend keeps; sizes between two measured ones go the way of the larger."
)


@dataclass(frozen=True)
class Tuned:
    """What came of a run.

    Attributes:
        base: the group's backend, which carries what no route names.
        orders: the routes by operation; operations on which nothing beats the base have none.
        notes: what else must be said, such as a backend that was left out.
    """

    base: str
    orders: tuple[CommRouteOrder, ...]
    notes: tuple[str, ...] = ()


def tuned(results: Sequence[Result], settings: Settings, tokens: Mapping[str, Sequence[str]]) -> Tuned:
    """Choose the routes.

    Args:
        results: every operation, size, backend and mode that was measured.
        settings: of this process; their ``native`` routes stay in front, since they cannot be measured here.
        tokens: each backend that was measured, with what an order may call it.

    Raises:
        CommError: fewer than two backends were measured.
    """
    if len(tokens) < 2:
        names = ", ".join(tokens) or "none"
        raise CommError(f"--tune needs two backends or more to choose between; this run has {names}")
    base = _base(settings, tokens)
    orders: list[CommRouteOrder] = []
    notes: list[str] = []
    for op in OPERATIONS:
        own = [each for each in results if each.operation.name == op and each.in_place is _IN_PLACE[op]]
        if not own:
            continue
        wrong = sorted({each.backend for each in own if each.wrong})
        notes += [f"{op}: {name} gave wrong results and gets no route" for name in wrong]
        right = [each for each in own if each.backend not in wrong]
        kept = [r for order in settings.comm.routes if order.op == op for r in order.routes if r.backend == NATIVE]
        routes, note = _routes(right, base, kept)
        notes += [f"{op}: {note}"] if note else []
        if routes:
            orders.append(CommRouteOrder(op, tuple(routes)))
    return Tuned(base, tuple(orders), tuple(notes))


def _base(settings: Settings, tokens: Mapping[str, Sequence[str]]) -> str:
    """The first of the settings' order that was measured."""
    for token in communicator_order(settings):
        named = sorted(name for name, own in tokens.items() if token in own)
        if named:
            return named[0]
    return min(tokens)


def _routes(results: Sequence[Result], base: str, kept: Sequence[CommRoute]) -> tuple[list[CommRoute], str]:
    """Of one operation, with what must be said of them."""
    margin = MARGIN
    while True:
        by_mode = {mode: _segments([e for e in results if e.mode is mode], base, margin) for mode in Mode}
        routes = _without_hidden([*kept, *_joined({mode: found for mode, found in by_mode.items() if found}, base)])
        if len(routes) <= MAX_ROUTES_PER_OP:
            break
        margin *= 2
    if not [route for route in routes if route.backend != NATIVE]:
        return [], f"nothing is faster than {base} by the rule" + (", its routes stay as they are" if kept else "")
    note = "" if margin == MARGIN else f"the margin is {margin:.0%}: {MAX_ROUTES_PER_OP} routes are the most"
    return routes, note


def _segments(results: Sequence[Result], base: str, margin: float) -> list[tuple[str, int]]:
    """Backend and the largest size that it keeps, from small to large; empty if nothing was measured."""
    sizes = sorted({each.size_bytes for each in results})
    segments: list[tuple[str, int]] = []
    current = base
    for size in sizes:
        here = {each.backend: each for each in results if each.size_bytes == size}
        fastest = min(here.values(), key=lambda each: each.time_us)
        if current not in here or is_faster(fastest, here[current], margin):
            current = fastest.backend
        if segments and segments[-1][0] == current:
            segments.pop()
        segments.append((current, size))
    return segments


def is_faster(one: Result, other: Result, margin: float = MARGIN) -> bool:
    """Whether ``one`` is so by more than ``margin`` in the median, and by anything in every cycle."""
    return one.time_us * (1 + margin) < other.time_us and max(one.samples_us) < min(other.samples_us)


def _joined(by_mode: dict[Mode, list[tuple[str, int]]], base: str) -> list[CommRoute]:
    """As routes; those of the two modes apart where both were measured and differ."""
    lists = {mode: _as_routes(segments, base) for mode, segments in by_mode.items()}
    if len(lists) < 2 or lists[Mode.EAGER] == lists[Mode.GRAPH]:
        return next(iter(lists.values()), [])
    return [CommRoute(r.backend, r.max_bytes, _WHEN[mode]) for mode, routes in lists.items() for r in routes]


def _as_routes(segments: Sequence[tuple[str, int]], base: str) -> list[CommRoute]:
    routes = [CommRoute(name, size) for name, size in segments[:-1]]
    last = segments[-1][0]
    return routes if last == base else [*routes, CommRoute(last)]


def _without_hidden(routes: Iterable[CommRoute]) -> list[CommRoute]:
    """Without those that are never reached, which the settings refuse."""
    found: list[CommRoute] = []
    for route in routes:
        if not any(earlier.covers(route) for earlier in found):
            found.append(route)
    return found


def describe(found: Tuned) -> list[str]:
    """The routes and notes as lines for people."""
    lines = [f"{order.op}: {'|'.join(map(str, order.routes))}, else {found.base}" for order in found.orders]
    return [*lines, *found.notes]


def write(found: Tuned, path: Path, settings: Settings, origin: Sequence[str]) -> None:
    """Write a settings file that is complete for layer 3, and read it back.

    Args:
        found: the routes.
        path: the file.
        settings: of the run; its backend and FLAGCX_PATH go along.
        origin: lines about the run, which become comments.

    Raises:
        CommError: it cannot be written, or does not read as it was meant.
    """
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    head = [f"Routes by size, measured on {today} by sglang_fl.comm.bench --tune.", *origin, RULE, *found.notes]
    library = settings.comm.flagcx_path
    lines = [
        *(f"# {line}" for line in head),
        f"# Use it with SGLANG_FL_CONFIG={path}",
        "comm:",
        f"  backend: {settings.text('comm.backend')}",
        *([] if library is None else [f"  flagcx_path: {str(library.absolute())!r}"]),
        "  mode: fastest",
        f"  routes:{CommRoutes().to_yaml(found.orders) if found.orders else ' {}'}",
    ]
    try:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise CommError(f"--tune cannot write {path}: {error.strerror}; name another file") from error
    read = load_settings({"SGLANG_FL_CONFIG": str(path)}).comm
    if read.routes != found.orders or read.backend is not settings.comm.backend:
        raise CommError(f"{path} does not read as it was meant: {read.routes}")
