"""Why an operator uses what it uses: every candidate, chosen or passed over with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sglang_fl.dispatch.manager import OpManager, UnknownOperatorError, get_manager
from sglang_fl.dispatch.policy import SelectionPolicy
from sglang_fl.dispatch.registry import FUNCTION_OPERATORS
from sglang_fl.dispatch.types import OpImpl
from sglang_fl.selection import Candidate, Selection, SelectionError, select

STRICT_REASON = "available, but strict mode allows only the first choice"


@dataclass(frozen=True)
class Row:
    """One candidate: ``reason`` says why it was passed over, or, for the chosen one, what is still open."""

    impl_id: str
    is_chosen: bool
    reason: str


@dataclass(frozen=True)
class Explanation:
    """What an operator gets here.

    Attributes:
        op_name: the operator.
        order: the tokens in whose order candidates are tried, and strict mode if it is on.
        rows: every candidate, the chosen one first.
        problem: why the operator cannot be used; empty if it can.
    """

    op_name: str
    order: str
    rows: tuple[Row, ...]
    problem: str = ""

    def __str__(self) -> str:
        head = [f"{self.op_name} (order: {self.order})"]
        width = max((len(row.impl_id) for row in self.rows), default=0)
        lines = [f"  {_verdict(row):12}{row.impl_id:{width}}  {_indented(row.reason)}".rstrip() for row in self.rows]
        return "\n".join([*head, *lines, *([f"  {self.problem}"] if self.problem else [])])


def explain(op_name: str) -> str:
    """The order that holds for ``op_name`` here, and below it a line for each candidate: chosen, or why not.

    Raises:
        UnknownOperatorError: there is no such operator; the message suggests one.
    """
    return str(explanation(op_name))


def explanation(op_name: str, manager: OpManager | None = None, extra: Sequence[OpImpl] = ()) -> Explanation:
    """The same as data, for ``manager`` or this process's, and with further implementations where there are some.

    Rules that ask a layer are left open and say so.
    """
    manager = manager or get_manager()
    policy = manager.policy()
    candidates = manager.candidates(op_name, policy=policy, extra=extra)
    order = ", ".join(policy.for_selection().tokens(op_name)) + ("; strict" if policy.strict else "")
    try:
        selection = select(op_name, candidates, replace(policy, strict=False).for_selection())
    except SelectionError:
        rows = tuple(Row(each.impl_id, False, _reason(each, op_name, policy)) for each in candidates)
        if op_name in FUNCTION_OPERATORS:
            return Explanation(op_name, order, rows, "SGLang's own function stays: no backend offers another")
        return Explanation(op_name, order, rows, f"nothing can be used: the first call of {op_name} will fail")
    problem = _strict_problem(op_name, manager, policy, extra)
    return Explanation(op_name, order, _rows(selection, is_forbidden=bool(problem)), problem)


def _rows(selection: Selection, is_forbidden: bool) -> tuple[Row, ...]:
    assert selection.chosen is not None
    reason = STRICT_REASON if is_forbidden else _open_rules(selection.chosen.payload)
    first = Row(selection.chosen.impl_id, not is_forbidden, reason)
    return (first, *(Row(entry.impl_id, False, entry.reason) for entry in selection.passed_over))


def _reason(candidate: Candidate, op_name: str, policy: SelectionPolicy) -> str:
    rules = policy.for_selection()
    named = ", ".join(rules.tokens(op_name))
    return rules.refusal(candidate) or candidate.probe().reason or f"not named by the order {named}"


def _strict_problem(op_name: str, manager: OpManager, policy: SelectionPolicy, extra: Sequence[OpImpl]) -> str:
    if not policy.strict:
        return ""
    try:
        manager.select(op_name, policy=policy, extra=extra)
    except SelectionError as error:
        return str(error).splitlines()[0]
    return ""


def _open_rules(impl: OpImpl) -> str:
    rules = {
        "each layer": impl.supports is not None,
        f"dtypes {', '.join(sorted(map(str, impl.supported_dtypes or ())))}": impl.supported_dtypes is not None,
        f"compute capability {impl.min_arch}": impl.min_arch is not None,
    }
    asked = [rule for rule, is_open in rules.items() if is_open]
    return f"asked at a layer's first call: {'; '.join(asked)}" if asked else ""


def _indented(text: str) -> str:
    return text.replace("\n", "\n      ")


def _verdict(row: Row) -> str:
    return "chosen" if row.is_chosen else "passed over"


__all__ = ["Explanation", "Row", "UnknownOperatorError", "explain", "explanation"]
