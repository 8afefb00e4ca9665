"""Whether layer 2 is on, its hooks on SGLang, what of it can be refused before a model is loaded, its report."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from sglang_fl.config import Settings
from sglang_fl.dispatch import SelectionPolicy, configure, get_manager
from sglang_fl.dispatch.explanation import explanation
from sglang_fl.selection import SelectionError
from sglang_fl.sglang_hooks.operators import delta_rule, piecewise
from sglang_fl.sglang_hooks.operators.binding import Binder, first_call
from sglang_fl.sglang_hooks.operators.bridge import Method
from sglang_fl.sglang_hooks.operators.lists import ClassLists, unknown_class_names
from sglang_fl.sglang_hooks.operators.table import BASE_CLASS, Bridged, misfits
from sglang_fl.sglang_hooks.registration import Hook

# SGLANG_FL_PER_OP names the groups of layer 3 with it.
COMMUNICATOR = "communicator"


@dataclass(frozen=True)
class OperatorLayer:
    """Layer 2 as it is in this process.

    Attributes:
        is_on: whether SGLang's dispatch is hooked at all.
        reason: why not, or what the order is.
        hooks: for SGLang's registry; none if the layer is off.
        misfits: what of the installed SGLang the bridges do not fit.
        lines: further lines for the report.
        choices: operator to the implementation that a layer would get here, for the comparison of ranks. It asks the
            backends, so only after SGLang has set the device.
    """

    is_on: bool
    reason: str
    hooks: tuple[Hook, ...] = ()
    misfits: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    choices: Callable[[], dict[str, str]] | None = None


def off_reason(settings: Settings) -> str:
    """Why the settings leave nothing of the layer, "" if they leave something."""
    if not settings.ops.enabled:
        return f"oot_enabled is off (from {settings.source('ops.enabled').where})"
    if not ClassLists.from_settings(settings).rows():
        name = "ops.blacklist" if settings.ops.whitelist is None else "ops.whitelist"
        return f"{settings.source(name).where} leaves no operator class"
    return ""


def operator_layer(
    settings: Settings,
    platform: str | None,
    has_kernels: bool,
    notice: Callable[[str], None],
    refuse: Callable[[str], BaseException],
) -> OperatorLayer:
    """Layer 2 for one process.

    Args:
        settings: of this process.
        platform: the platform in use.
        has_kernels: whether SGLang's own methods have the vendor's kernels.
        notice: told what is decided after this, for the report.
        refuse: makes an error of a message, for what SGLang's arguments rule out.

    Raises:
        SelectionError: strict mode, and a first choice that cannot be used whatever the model is.
    """
    off = off_reason(settings)
    if off:
        return OperatorLayer(False, off)
    configure(settings)
    lists = ClassLists.from_settings(settings)
    binder = Binder(platform, has_kernels)
    if settings.ops.strict:
        _require_first_choices(settings, lists.rows(), binder)
    function_hooks, lines = delta_rule.hooks(binder)
    hooks = (dispatch_hook(lists, binder), piecewise.hook(notice, refuse), *function_hooks)
    return OperatorLayer(
        is_on=True,
        reason=_describe(settings, lists),
        hooks=hooks,
        misfits=tuple(misfits(lists.rows())),
        lines=tuple(lines),
        choices=partial(_choices, lists.rows(), binder),
    )


def dispatch_hook(lists: ClassLists, binder: Binder) -> Hook:
    """SGLang asks each layer, in its constructor, which method runs it; a class with a bridge says so at first call."""
    rows: dict[type, Bridged | None] = {}

    def dispatch_forward(original: Callable[[Any], Method], self: Any) -> Method:
        own = original(self)
        cls = type(self)
        if cls not in rows:
            rows[cls] = lists.bridge_of(cls)
        row = rows[cls]
        return own if row is None else first_call(self, row, own, binder)

    return Hook(f"{BASE_CLASS}.dispatch_forward", dispatch_forward)


def explain_operator(op_name: str, platform: str | None, has_kernels: bool) -> str:
    """As :func:`sglang_fl.dispatch.explain`, with SGLang's own method among the candidates.

    Args:
        op_name: the operator.
        platform: the platform in use.
        has_kernels: whether SGLang's own methods have the vendor's kernels.

    Raises:
        UnknownOperatorError: there is no such operator.
    """
    return str(explanation(op_name, extra=Binder(platform, has_kernels).candidates(op_name)))


def unknown_names(settings: Settings) -> list[str]:
    """A line for each class, operator or vendor of the operators' settings that nobody knows, with a suggestion."""
    if not settings.ops.enabled:
        return []
    known = (*get_manager().operators(), *delta_rule.FUNCTIONS, COMMUNICATOR)
    problems = settings.unknown_names("ops.backends", known)
    return [*unknown_class_names(settings), *(f"no such operator is known: {problem}" for problem in problems)]


def _choices(rows: Iterable[Bridged], binder: Binder) -> dict[str, str]:
    return {op_name: _choice(op_name, binder) for op_name in sorted({row.op_name for row in rows})}


def _choice(op_name: str, binder: Binder) -> str:
    try:
        chosen = get_manager().select(op_name, extra=binder.candidates(op_name)).chosen
    except SelectionError:
        return "nothing"
    return "nothing" if chosen is None else chosen.impl_id


def _describe(settings: Settings, lists: ClassLists) -> str:
    policy = SelectionPolicy.from_settings(settings).for_selection()
    parts = [f"order {', '.join(policy.tokens(''))} (from {settings.source('ops.prefer').where})"]
    if settings.ops.strict:
        parts.append("strict, without fallback")
    if lists.describe():
        parts.append(lists.describe())
    return "; ".join(parts)


def _require_first_choices(settings: Settings, rows: Iterable[Bridged], binder: Binder) -> None:
    """Strict mode, asked before a model is loaded.

    Refused is what no model could be served with: an operator's own order whose first choice cannot be used, or a
    preferred kind that can be used for no operator at all. Whether a single operator lacks it is asked when a layer
    needs that operator.
    """
    failures: dict[str, SelectionError] = {}
    operators = dict.fromkeys(row.op_name for row in rows)
    for op_name in operators:
        try:
            get_manager().select(op_name, extra=binder.candidates(op_name))
        except SelectionError as error:
            failures[op_name] = error
    named = [op_name for op_name in failures if settings.ops.backends_for(op_name)]
    if named:
        raise failures[named[0]]
    by_preference = {op_name for op_name in operators if not settings.ops.backends_for(op_name)}
    if by_preference and by_preference == failures.keys():
        raise next(iter(failures.values()))
