"""The policy of operators: the process's own from the settings, and one that holds in a context only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from sglang_fl.config import Settings, canonical_vendor, load_settings
from sglang_fl.devices import detect_platform
from sglang_fl.selection import Kind, Policy

_VENDOR_TOKEN = "vendor:"


@dataclass(frozen=True)
class SelectionPolicy:
    """In which order an operator's implementations are tried.

    Attributes:
        prefer: the kind that comes first: flagos, vendor or reference; the other two follow in this order.
        per_op_order: for one operator, its order: each token a kind, ``vendor:NAME`` or an implementation's id.
            What no token names is not used for that operator.
        strict: only the first choice will do, before a call and in it.
        deny_vendors: vendors that must not be used.
        allow_vendors: the only vendors that may be used; None: all.

    Vendors may have any of their names: cuda means nvidia.

    Raises:
        ValueError: prefer or a token is none of what is allowed, or an operator's order is empty.
        TypeError: one text where several are meant, or a strict that is no bool.
    """

    prefer: str = Kind.FLAGOS.value
    per_op_order: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    strict: bool = False
    deny_vendors: frozenset[str] = frozenset()
    allow_vendors: frozenset[str] | None = None

    def __post_init__(self) -> None:
        _require_several(self)
        if not isinstance(self.strict, bool):
            raise TypeError(f"strict is {self.strict!r}; allowed: True or False")
        orders = {op: tuple(_canonical_token(token) for token in order) for op, order in self.per_op_order.items()}
        empty = [op for op, order in orders.items() if not order]
        if empty:
            raise ValueError(f"per_op_order of {', '.join(empty)} is empty; name at least one of flagos, vendor, ...")
        values: dict[str, object] = {
            "prefer": _kind(_text(self.prefer)),
            "per_op_order": MappingProxyType(orders),
            "deny_vendors": _canonical_vendors(self.deny_vendors),
            "allow_vendors": None if self.allow_vendors is None else _canonical_vendors(self.allow_vendors),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_settings(cls, settings: Settings) -> SelectionPolicy:
        """The policy that the settings ask for."""
        ops = settings.ops
        return cls(
            prefer=ops.prefer.value,
            per_op_order={order.op: tuple(map(str, order.backends)) for order in ops.backends},
            strict=ops.strict,
            deny_vendors=frozenset(ops.deny_vendors),
            allow_vendors=None if ops.allow_vendors is None else frozenset(ops.allow_vendors),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        orders = dict(self.per_op_order)
        return SelectionPolicy, (self.prefer, orders, self.strict, self.deny_vendors, self.allow_vendors)

    def for_selection(self) -> Policy:
        """The same as :func:`sglang_fl.selection.select` takes it."""
        return Policy(
            prefer=Kind(self.prefer),
            per_item=self.per_op_order,
            deny_vendors=self.deny_vendors,
            allow_vendors=self.allow_vendors,
            strict=self.strict,
        )


def _require_several(policy: SelectionPolicy) -> None:
    """One text is a sequence of letters, too, and would silently mean nothing."""
    given: dict[str, object] = {"deny_vendors": policy.deny_vendors, "allow_vendors": policy.allow_vendors}
    given |= {f"per_op_order of {op}": order for op, order in policy.per_op_order.items()}
    for name, value in given.items():
        if isinstance(value, str):
            raise TypeError(f"{name} is the text {value!r}; allowed: a set or sequence of names, such as ({value!r},)")


def _kind(word: str) -> str:
    kinds = [kind.value for kind in Kind]
    if word not in kinds:
        raise ValueError(f"prefer is {word!r}; allowed: {', '.join(kinds)}")
    return word


def _text(word: str) -> str:
    """The text of a word that may be the member of an enumeration, whose str() differs with Python's version."""
    return str(getattr(word, "value", word))


def _canonical_token(word: str) -> str:
    token = _text(word)
    if not token.startswith(_VENDOR_TOKEN):
        return token
    return f"{_VENDOR_TOKEN}{canonical_vendor(token.removeprefix(_VENDOR_TOKEN))}"


def _canonical_vendors(names: Iterable[str]) -> frozenset[str]:
    return frozenset(canonical_vendor(name) for name in names)


class Resolved(dict[str, Callable[..., Any]]):
    """What ``call_op`` calls for each operator that was resolved under one policy; None: the process's."""

    def __init__(self, policy: SelectionPolicy | None) -> None:
        super().__init__()
        self.policy = policy


_of_process = Resolved(None)
_tables: dict[SelectionPolicy | None, Resolved] = {None: _of_process}
# A thread or task that was not given the context of another sees the process's policy.
RESOLVED: ContextVar[Resolved] = ContextVar("sglang_fl_resolved_operators", default=_of_process)

_lock = threading.Lock()
_settings: Settings | None = None
_process_policy: SelectionPolicy | None = None
_generation = 0


def configure(settings: Settings) -> None:
    """Go by ``settings`` from now on; the plugin calls it when it loads. What is bound already stays."""
    global _settings, _process_policy
    policy = SelectionPolicy.from_settings(settings)
    with _lock:
        _settings, _process_policy = settings, policy
    forget_resolved()


def process_settings() -> Settings:
    """The settings of :func:`configure`; where nobody called it, those of the environment, read once.

    Raises:
        SettingsError: what the environment says is wrong.
    """
    if _settings is None:
        configure(load_settings(platform=detect_platform()))
    assert _settings is not None
    return _settings


def current_policy() -> SelectionPolicy:
    """The policy of the innermost :func:`policy_context` around the caller, else the process's."""
    override = RESOLVED.get().policy
    if override is not None:
        return override
    if _process_policy is None:
        process_settings()
    assert _process_policy is not None
    return _process_policy


@contextmanager
def policy_context(policy: SelectionPolicy) -> Iterator[None]:
    """Let ``policy`` hold for ``call_op``, and for what is bound, inside this context only.

    Other threads and tasks keep theirs; one that is run in a copy of this context (``contextvars.copy_context``)
    has this one. What was bound before keeps its implementation.
    """
    with _lock:
        table = _tables.setdefault(policy, Resolved(policy))
    token = RESOLVED.set(table)
    try:
        yield
    finally:
        RESOLVED.reset(token)


def generation() -> int:
    """Grows whenever what was resolved is forgotten."""
    return _generation


def remember_resolved(table: Resolved, op_name: str, function: Callable[..., Any], of_generation: int) -> None:
    """Keep what was resolved, unless it is out of date: resolved from what was there at ``of_generation``."""
    with _lock:
        if of_generation == _generation:
            table[op_name] = function


def forget_resolved() -> None:
    """Let ``call_op`` select anew: the implementations or the settings have changed."""
    global _generation
    with _lock:
        _generation += 1
        for table in _tables.values():
            table.clear()
