"""The types that settings take beyond bool, str and Path."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class TextEnum(str, Enum):
    """An enumeration whose members are, compare as and print as their text, on every Python version."""

    def __str__(self) -> str:
        return str(self.value)


class BackendKind(TextEnum):
    """The three kinds of implementation."""

    FLAGOS = "flagos"
    VENDOR = "vendor"
    REFERENCE = "reference"


class AtenProfile(TextEnum):
    """VERIFIED: what was found right and not slower on this platform. FULL: everything that FlagGems registers."""

    VERIFIED = "verified"
    FULL = "full"


class CommBackend(TextEnum):
    """What carries collectives. AUTO is the first usable of flagcx, the vendor's library and torch."""

    NCCL = "nccl"
    HCCL = "hccl"
    FLAGCX = "flagcx"
    TORCH = "torch"
    AUTO = "auto"


class CommMode(TextEnum):
    """ALL: every call of a group goes through the selected backend. FASTEST: per call, the fastest one."""

    ALL = "all"
    FASTEST = "fastest"


class GraphMixing(TextEnum):
    """The order that NCCL keeps between calls in graphs and others. AUTO drops it where nothing needs it."""

    AUTO = "auto"
    KEEP = "keep"
    DROP = "drop"


class LogLevel(TextEnum):
    """Names of Python's logging levels."""

    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"


@dataclass(frozen=True)
class OpBackend:
    """One entry of an operator's order: a kind, or for ``vendor:NAME`` one vendor (canonical name)."""

    kind: BackendKind
    vendor: str | None = None

    def __str__(self) -> str:
        return f"{self.kind}:{self.vendor}" if self.vendor else str(self.kind)


@dataclass(frozen=True)
class OpOrder:
    """The order in which one operator's backends are tried: one to three entries, no two alike."""

    op: str
    backends: tuple[OpBackend, ...]


class CaptureRule(TextEnum):
    """Whether a route holds while a device graph is being captured, only then, or only outside of it."""

    ALWAYS = ""
    GRAPH = "graph"
    EAGER = "eager"


class MemoryRule(TextEnum):
    """Whether a route holds for every tensor, only for those in registered memory, or only for those that are not."""

    ANY = ""
    REGISTERED = "registered"
    ORDINARY = "ordinary"


@dataclass(frozen=True)
class RankRule:
    """For groups of how many ranks a route is made: from ``fewest`` to ``most``, None for any number."""

    fewest: int = 1
    most: int | None = None

    def __str__(self) -> str:
        if self == RankRule():
            return ""
        return f"{self.fewest}{'+' if self.most is None else ''}ranks"

    def holds(self, ranks: int) -> bool:
        return self.fewest <= ranks and (self.most is None or ranks <= self.most)

    def covers(self, other: RankRule) -> bool:
        """Whether it holds for every group for which ``other`` does."""
        if self.most is None:
            return self.fewest <= other.fewest
        return other.most is not None and self.holds(other.fewest) and self.holds(other.most)


@dataclass(frozen=True)
class CommRoute:
    """One route of an operation: a backend, or ``native`` for SGLang's own method.

    max_bytes: it carries calls of up to so many bytes (of the larger tensor), None for any size; when: see CaptureRule;
    memory: see MemoryRule; ranks: see RankRule.
    """

    backend: str
    max_bytes: int | None = None
    when: CaptureRule = CaptureRule.ALWAYS
    memory: MemoryRule = MemoryRule.ANY
    ranks: RankRule = RankRule()

    def __str__(self) -> str:
        limit = "" if self.max_bytes is None else f":{self.max_bytes}"
        rules = (str(rule) for rule in (self.when, self.memory, self.ranks))
        return "".join((self.backend, limit, *(f"@{rule}" for rule in rules if rule)))

    def covers(self, later: CommRoute) -> bool:
        """Whether every call that fits ``later`` fits this one, so that behind it ``later`` is never reached."""
        rules = ((self.when, later.when), (self.memory, later.memory))
        if any(own and own != other for own, other in rules) or not self.ranks.covers(later.ranks):
            return False
        return self.max_bytes is None or (later.max_bytes is not None and later.max_bytes <= self.max_bytes)


@dataclass(frozen=True)
class CommRouteOrder:
    """The routes of one operation, the first that fits a call carries it; beyond them the group's backend does."""

    op: str
    routes: tuple[CommRoute, ...]
