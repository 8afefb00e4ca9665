"""What the doctor found, as data: its facts by subject, its problems and warnings; the same for tables and JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

# Raised when a key of the JSON changes its meaning or goes; new keys may come without that.
SCHEMA = 1


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be.

    Attributes:
        area: the section that it belongs to, such as ``network``.
        found: what is wrong, and where it comes from.
        action: what to do.
    """

    area: str
    found: str
    action: str


@dataclass(frozen=True)
class Fact:
    """A name, its value, and what there is to say of it."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Setting:
    """One setting, in the notation of its variable, and where its value comes from."""

    field: str
    value: str
    source: str


@dataclass(frozen=True)
class Layer:
    """One layer, on or off, and why; ``is_on`` is None where it could not be found out."""

    name: str
    is_on: bool | None
    reason: str


@dataclass(frozen=True)
class Other:
    """An implementation that was passed over, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Choice:
    """What carries one operator or collective.

    Attributes:
        item: its name.
        chosen: the implementation; empty if there is none.
        passed_over: the others.
        order: the tokens in whose order they are tried.
        note: what holds beside that: routes by size, rules that are asked later, why there is none.
    """

    item: str
    chosen: str
    passed_over: tuple[Other, ...] = ()
    order: str = ""
    note: str = ""


@dataclass(frozen=True)
class Hooks:
    """The plugin's hooks in one process.

    Attributes:
        process: which: ``main``, as the server's command, or ``spawned``, as its schedulers.
        live: how many are what SGLang calls, by identity.
        total: how many there are.
        dead: the others, each with the reason.
        foreign: hooks of other plugins on the same functions.
        reason: why nothing can be said, or why there are none; empty otherwise.
    """

    process: str
    live: int
    total: int
    dead: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Interface:
    """A network interface of this host; ``is_virtual``: of a container bridge, a tunnel and the like, by its name."""

    name: str
    addresses: tuple[str, ...]
    is_up: bool
    is_loopback: bool
    is_virtual: bool


@dataclass(frozen=True)
class Network:
    """How other hosts reach this one.

    Attributes:
        interfaces: all of them.
        host_name: this host's.
        host_addresses: what it resolves to; empty if it does not.
        host_is_loopback: whether one of them is of this host alone.
        interface: the one that is to be used; empty if there is none.
        address: its address, for MASTER_ADDR where this host is the first one.
        reason: why this one.
        variables: those that name interfaces or addresses, where they are set.
    """

    interfaces: tuple[Interface, ...] = ()
    host_name: str = ""
    host_addresses: tuple[str, ...] = ()
    host_is_loopback: bool = False
    interface: str = ""
    address: str = ""
    reason: str = ""
    variables: tuple[Fact, ...] = ()


@dataclass
class Report:
    """Everything; ``problems`` is what was asked for and cannot work, ``warnings`` what may surprise."""

    problems: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)
    versions: list[Fact] = field(default_factory=list)
    device: list[Fact] = field(default_factory=list)
    settings: list[Setting] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)
    operators: list[Choice] = field(default_factory=list)
    collectives: list[Choice] = field(default_factory=list)
    hooks: list[Hooks] = field(default_factory=list)
    network: Network = field(default_factory=Network)

    @property
    def is_right(self) -> bool:
        """Whether there is no problem."""
        return not self.problems

    def add(self, part: Report) -> None:
        """Put what one look has found to the rest; what was found before, in as many words, is not told twice."""
        known = [finding.found for finding in (*self.problems, *self.warnings)]
        for own, new in ((self.problems, part.problems), (self.warnings, part.warnings)):
            own += [finding for finding in new if not any(text in finding.found for text in known)]
        for each in fields(self):
            if each.name not in ("problems", "warnings", "network"):
                getattr(self, each.name).extend(getattr(part, each.name))
        if part.network != Network():
            self.network = part.network

    def as_json(self) -> dict[str, Any]:
        """Every key is always there, in this order."""
        return {"schema": SCHEMA, "ok": self.is_right, **asdict(self)}
