"""Order candidates by policy, take the first that is available, and keep why the others were passed over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Kind(str, Enum):
    """What stands behind an implementation."""

    FLAGOS = "flagos"
    VENDOR = "vendor"
    REFERENCE = "reference"


class SelectionError(RuntimeError):
    """No candidate may be used, or strict mode forbids the one that could."""


@dataclass(frozen=True)
class Availability:
    """Whether something can be used in this process, and in words why not."""

    available: bool
    reason: str = ""

    @classmethod
    def yes(cls) -> Availability:
        """It can be used."""
        return cls(True)

    @classmethod
    def no(cls, reason: str) -> Availability:
        """It cannot, for ``reason``."""
        return cls(False, reason)


@dataclass(frozen=True)
class Candidate:
    """One implementation of something.

    Attributes:
        impl_id: unique name, such as ``flagcx`` or ``vendor.nvidia``.
        kind: flagos, vendor or reference.
        probe: local, cheap, without side effects on peers: is it usable here?
        vendor: the vendor's canonical name for kind VENDOR, otherwise empty.
        priority: among candidates that the policy ranks equal, the higher one comes first.
        payload: whatever the owner binds when this one is chosen.
    """

    impl_id: str
    kind: Kind
    probe: Callable[[], Availability]
    vendor: str = ""
    priority: int = 0
    payload: Any = None


@dataclass(frozen=True)
class PassedOver:
    """A candidate that was not chosen, with the reason."""

    impl_id: str
    reason: str


@dataclass(frozen=True)
class Policy:
    """In which order candidates are tried.

    Attributes:
        prefer: the kind that comes first; the others follow in the order flagos, vendor, reference.
        per_item: for one operation, an ordered list of tokens; a token is a kind, ``vendor:NAME`` or an
            implementation's id. What no token names is not used for that operation.
        deny_vendors, allow_vendors: vendors that must not, or alone may, be used; canonical names.
        strict: only the first choice will do.
    """

    prefer: Kind = Kind.FLAGOS
    per_item: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    deny_vendors: frozenset[str] = frozenset()
    allow_vendors: frozenset[str] | None = None
    strict: bool = False

    def tokens(self, item: str) -> tuple[str, ...]:
        """The ordered tokens for ``item``."""
        if item in self.per_item:
            return self.per_item[item]
        kinds = [self.prefer, *(kind for kind in Kind if kind is not self.prefer)]
        return tuple(kind.value for kind in kinds)

    def refusal(self, candidate: Candidate) -> str:
        """Why the vendor rules forbid ``candidate``; empty if they do not."""
        if candidate.kind is not Kind.VENDOR:
            return ""
        if candidate.vendor in self.deny_vendors:
            return f"vendor {candidate.vendor} is denied"
        if self.allow_vendors is not None and candidate.vendor not in self.allow_vendors:
            return f"vendor {candidate.vendor} is not among the allowed: {', '.join(sorted(self.allow_vendors))}"
        return ""


@dataclass(frozen=True)
class Selection:
    """The outcome for one item.

    Attributes:
        item: what was selected for.
        chosen: the candidate in use, or None.
        usable: every candidate that may be used, best first; ``chosen`` is the first.
        passed_over: every other candidate with its reason, in the order in which they were considered.
    """

    item: str
    chosen: Candidate | None
    usable: tuple[Candidate, ...]
    passed_over: tuple[PassedOver, ...]

    def explain(self) -> str:
        """One line for the chosen candidate and one for each that was passed over."""
        chosen = f"{self.item}: {self.chosen.impl_id}" if self.chosen else f"{self.item}: nothing is available"
        return "\n".join([chosen, *(f"  not {entry.impl_id}: {entry.reason}" for entry in self.passed_over)])


def _matches(token: str, candidate: Candidate) -> bool:
    if token.startswith("vendor:"):
        return candidate.kind is Kind.VENDOR and candidate.vendor == token.removeprefix("vendor:")
    return token in (candidate.kind.value, candidate.impl_id)


def select(item: str, candidates: Iterable[Candidate], policy: Policy) -> Selection:
    """Order ``candidates`` for ``item`` by ``policy``, probe them in that order and choose the first usable.

    Raises:
        SelectionError: nothing is available, or the policy is strict and its first choice is not.
    """
    ranked, left_out = _rank(item, list(candidates), policy)
    usable: list[Candidate] = []
    passed: list[PassedOver] = []
    for candidate in ranked:
        refusal = policy.refusal(candidate)
        availability = Availability.no(refusal) if refusal else candidate.probe()
        if not availability.available:
            passed.append(PassedOver(candidate.impl_id, availability.reason))
        elif usable:
            passed.append(PassedOver(candidate.impl_id, f"available, but {usable[0].impl_id} comes first"))
            usable.append(candidate)
        else:
            usable.append(candidate)
    passed += left_out
    selection = Selection(item, usable[0] if usable else None, tuple(usable), tuple(passed))
    if selection.chosen is None:
        raise SelectionError(f"No available implementation for {selection.explain()}")
    if policy.strict and ranked and selection.chosen is not ranked[0]:
        raise SelectionError(
            f"strict mode: the first choice for {item} is {ranked[0].impl_id}, which cannot be used here: "
            f"{passed[0].reason}. Make it available, choose another, or switch strict mode off."
        )
    return selection


def _rank(item: str, candidates: Sequence[Candidate], policy: Policy) -> tuple[list[Candidate], list[PassedOver]]:
    by_priority = sorted(candidates, key=lambda candidate: (-candidate.priority, candidate.impl_id))
    ranked: list[Candidate] = []
    for token in policy.tokens(item):
        ranked += [c for c in by_priority if _matches(token, c) and c not in ranked]
    named = ", ".join(policy.tokens(item))
    left_out = [PassedOver(c.impl_id, f"not named by the order {named}") for c in by_priority if c not in ranked]
    return ranked, left_out
