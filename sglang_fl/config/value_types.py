"""How the text of a variable or a YAML node becomes a value, one class per type of setting."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import yaml

from sglang_fl.config.chips import CHIPS, canonical_vendor
from sglang_fl.config.problems import closest
from sglang_fl.config.values import BackendKind, OpBackend, OpOrder, TextEnum

T = TypeVar("T")

NOT_SET = "not set"
MAX_BACKENDS_PER_OP = 3
MAX_SECONDS = 365 * 24 * 3600
MIN_SECONDS = 0.001  # less is over before a call could begin

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_ATEN_NAMESPACE = re.compile(r"\s*(?:torch[.]ops[.])?aten(?:::|[.])(.*)", re.DOTALL)
_NUMBER = re.compile(r"[+-]?([0-9]+([.][0-9]*)?|[.][0-9]+)([eE][+-]?[0-9]+)?")
_TAG_PREFIX = "tag:yaml.org,2002:"
_TAG_WORDS = {
    "null": "nothing",
    "bool": "the boolean",
    "int": "the integer",
    "float": "the number",
    "timestamp": "the date",
}
_BOOLEANS = {
    "1": True, "true": True, "yes": True, "on": True,
    "0": False, "false": False, "no": False, "off": False,
}  # fmt: skip


class InvalidValueError(ValueError):
    """A value that its type refuses; the loader adds where it stands and for which field.

    line: the 1-based line inside a YAML file, or None for text.
    """

    def __init__(self, found: str, allowed: str, suggestion: str | None = None, line: int | None = None) -> None:
        super().__init__(f"found {found}; allowed: {allowed}")
        self.found = found
        self.allowed = allowed
        self.suggestion = suggestion
        self.line = line


def line_of(node: yaml.Node) -> int:
    """The 1-based line on which a node begins."""
    return int(node.start_mark.line) + 1


def describe(node: yaml.Node) -> str:
    """A YAML node in words, for an error: a scalar with its value, a list or mapping by its kind."""
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    if not isinstance(node, yaml.ScalarNode):
        return "a mapping"
    word = _TAG_WORDS.get(node.tag.removeprefix(_TAG_PREFIX))
    if word == "nothing":
        return word
    return f"{word} {node.value}" if word else repr(node.value)


def parse_node(node: yaml.Node, allowed: str, parse: Callable[[str], T], tags: tuple[str, ...] = ("str",)) -> T:
    """`parse` of the text of a scalar node whose YAML type is one of `tags`; errors get the node's line."""
    if not isinstance(node, yaml.ScalarNode) or node.tag.removeprefix(_TAG_PREFIX) not in tags:
        raise InvalidValueError(describe(node), allowed, line=line_of(node))
    try:
        return parse(node.value)
    except InvalidValueError as error:
        error.line = line_of(node)
        raise


class ValueType(ABC):
    """Reads one type of setting from both of its notations and writes it back."""

    @property
    @abstractmethod
    def allowed(self) -> str:
        """What a user may write, in words."""

    @abstractmethod
    def from_text(self, text: str) -> object:
        """The value of a variable's non-empty text; InvalidValueError if it is none."""

    @abstractmethod
    def from_node(self, node: yaml.Node) -> object:
        """The value of a YAML node; InvalidValueError, with its line, if it is none."""

    @abstractmethod
    def to_text(self, value: Any) -> str:
        """`value` in the notation of a variable, equal for equal meanings; ``not set`` for None."""

    @abstractmethod
    def to_yaml(self, value: Any) -> str:
        """`value` as it stands behind ``key:`` in a YAML file."""


class ScalarType(ValueType):
    """A type whose YAML notation is the same single text as its variable's."""

    tags: tuple[str, ...] = ("str",)

    def from_node(self, node: yaml.Node) -> object:
        return parse_node(node, self.allowed, self.from_text, self.tags)

    def to_text(self, value: Any) -> str:
        return NOT_SET if value is None else str(value)

    def to_yaml(self, value: Any) -> str:
        return self.to_text(value)


class Boolean(ScalarType):
    """On or off."""

    tags = ("bool", "int", "str")
    allowed = "1, true, yes, on or 0, false, no, off, in any case"

    def from_text(self, text: str) -> bool:
        try:
            return _BOOLEANS[text.strip().lower()]
        except KeyError:
            raise InvalidValueError(repr(text), self.allowed, closest(text, _BOOLEANS)) from None

    def to_text(self, value: Any) -> str:
        return "1" if value else "0"

    def to_yaml(self, value: Any) -> str:
        return "true" if value else "false"


@dataclass(frozen=True)
class Choice(ScalarType):
    """One of a few words, letter case aside. words: every accepted spelling in lower case and its value."""

    words: Mapping[str, object]
    shown: tuple[str, ...]

    @property
    def allowed(self) -> str:
        return f"one of {', '.join(self.shown)}"

    def from_text(self, text: str) -> object:
        word = text.strip().lower()
        if word in self.words:
            return self.words[word]
        raise InvalidValueError(repr(text), self.allowed, closest(word, self.shown))


def choice_of(members: type[TextEnum]) -> Choice:
    """A choice among an enumeration's members."""
    return Choice({member.value.lower(): member for member in members}, tuple(m.value for m in members))


def choice_of_platforms() -> Choice:
    """A choice among the platforms of the chip table, by any of their names."""
    aliases = [name for chip in CHIPS for name in chip.names if name != chip.platform]
    words = {name: chip.platform for chip in CHIPS for name in chip.names}
    return Choice(words, (*(chip.platform for chip in CHIPS), *aliases))


class Text(ScalarType):
    """Any text but the empty one."""

    allowed = "any text but the empty one"

    def from_text(self, text: str) -> str:
        if not text.strip():
            raise InvalidValueError(repr(text), self.allowed)
        return text.strip()


class Seconds(ScalarType):
    """A time limit: a number of seconds, at least a millisecond and never endless. The value is a float."""

    tags = ("int", "float", "str")
    allowed = f"a number of seconds from {MIN_SECONDS}, such as 90 or 0.5, at most {MAX_SECONDS} (a year)"

    def from_text(self, text: str) -> float:
        token = text.strip()
        if not _NUMBER.fullmatch(token):
            number = token.rstrip("sS ")
            raise InvalidValueError(repr(text), self.allowed, number if _NUMBER.fullmatch(number) else None)
        value = float(token)
        if not MIN_SECONDS <= value <= MAX_SECONDS:
            raise InvalidValueError(repr(text), self.allowed)
        return value

    def to_text(self, value: Any) -> str:
        return NOT_SET if value is None else str(float(value)).removesuffix(".0")


class PathText(ScalarType):
    """A path; a leading ``~`` is the home folder. That it exists is checked where it is used."""

    allowed = "a path"

    def from_text(self, text: str) -> Path:
        if not text.strip():
            raise InvalidValueError(repr(text), self.allowed)
        try:
            return Path(text.strip()).expanduser()
        except RuntimeError as error:
            raise InvalidValueError(f"{text!r} ({error})", "a path whose ~user exists") from error


def _same(name: str) -> str:
    return name


def _check_name(text: str, allowed: str) -> str:
    name = text.strip()
    if not name:
        raise InvalidValueError("an empty entry", allowed)
    if not _NAME.fullmatch(name):
        raise InvalidValueError(repr(name), allowed)
    return name


@dataclass(frozen=True)
class Names(ValueType):
    """A list of names; order and repetition carry no meaning.

    item: what one name is; canonical: makes two names for one thing equal; may_be_empty: whether ``[]`` means
    something in YAML (an empty black list does, an empty white list is a mistake); bare: takes off what may stand
    around a name, before it is checked.
    """

    item: str
    canonical: Callable[[str], str] = _same
    may_be_empty: bool = True
    bare: Callable[[str], str] = _same

    @property
    def allowed(self) -> str:
        return f"a list of {self.item}, separated by commas in a variable, as [a, b] in YAML"

    def from_text(self, text: str) -> tuple[str, ...]:
        return self._unique(self._check(entry) for entry in text.split(","))

    def from_node(self, node: yaml.Node) -> tuple[str, ...]:
        if not isinstance(node, yaml.SequenceNode):
            raise InvalidValueError(describe(node), self.allowed, line=line_of(node))
        if not node.value and not self.may_be_empty:
            raise InvalidValueError("an empty list", f"{self.allowed}, at least one", line=line_of(node))
        return self._unique(parse_node(entry, self.allowed, self._check) for entry in node.value)

    def _check(self, text: str) -> str:
        return _check_name(self.bare(text), self.allowed)

    def _unique(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.canonical(name) for name in names))

    def to_text(self, value: Any) -> str:
        return ",".join(sorted(value)) if value else NOT_SET

    def to_yaml(self, value: Any) -> str:
        return f"[{', '.join(value)}]"


def without_namespace(name: str) -> str:
    """``softmax`` of ``aten::softmax``, as profilers print it, ``aten.softmax`` and ``torch.ops.aten.softmax``."""
    found = _ATEN_NAMESPACE.fullmatch(name)
    return found[1] if found else name


class OpOrders(ValueType):
    """Per operator, the ordered backends to try."""

    allowed = (
        f"per operator 1 to {MAX_BACKENDS_PER_OP} different entries of flagos, vendor, reference, "
        "vendor:NAME: op=vendor|flagos;op2=reference in a variable, op: [vendor, flagos] in YAML"
    )

    def from_text(self, text: str) -> tuple[OpOrder, ...]:
        orders: dict[str, OpOrder] = {}
        for entry in text.split(";"):
            op, equals, backends = entry.partition("=")
            if not equals:
                found = repr(entry.strip()) if entry.strip() else "an empty entry"
                raise InvalidValueError(found, self.allowed)
            self._add(orders, [self._backend(token) for token in backends.split("|")], op)
        return self._sorted(orders)

    def from_node(self, node: yaml.Node) -> tuple[OpOrder, ...]:
        if not isinstance(node, yaml.MappingNode):
            raise InvalidValueError(describe(node), self.allowed, line=line_of(node))
        orders: dict[str, OpOrder] = {}
        for key, value in node.value:
            if not isinstance(value, yaml.SequenceNode):
                raise InvalidValueError(describe(value), self.allowed, line=line_of(value))
            backends = [parse_node(entry, self.allowed, self._backend) for entry in value.value]
            parse_node(key, self.allowed, partial(self._add, orders, backends))
        return self._sorted(orders)

    def _add(self, orders: dict[str, OpOrder], backends: list[OpBackend], op_text: str) -> None:
        op = _check_name(op_text, self.allowed)
        if op in orders:
            raise InvalidValueError(f"the operator {op} twice", self.allowed)
        if not 1 <= len(backends) <= MAX_BACKENDS_PER_OP:
            raise InvalidValueError(f"{len(backends)} entries for {op}", self.allowed)
        if len(set(backends)) != len(backends):
            raise InvalidValueError(f"an entry twice for {op}", self.allowed)
        orders[op] = OpOrder(op, tuple(backends))

    def _backend(self, text: str) -> OpBackend:
        token = text.strip()
        kinds = {kind.value: kind for kind in BackendKind}
        if token.lower() in kinds:
            return OpBackend(kinds[token.lower()])
        kind, colon, vendor = token.partition(":")
        if colon and kind.lower() == BackendKind.VENDOR and _NAME.fullmatch(vendor):
            return OpBackend(BackendKind.VENDOR, canonical_vendor(vendor))
        raise InvalidValueError(repr(token), self.allowed, self._suggestion(token, kinds))

    def _suggestion(self, token: str, kinds: Iterable[str]) -> str | None:
        prefix, dot, vendor = token.partition(".")
        if dot and prefix.lower() == BackendKind.VENDOR:
            return f"{BackendKind.VENDOR}:{vendor}"
        if any(token.lower() in chip.names for chip in CHIPS):
            return f"{BackendKind.VENDOR}:{token.lower()}"
        return closest(token, kinds)

    def _sorted(self, orders: Mapping[str, OpOrder]) -> tuple[OpOrder, ...]:
        return tuple(orders[op] for op in sorted(orders))

    def to_text(self, value: Any) -> str:
        return ";".join(f"{o.op}={'|'.join(map(str, o.backends))}" for o in value) if value else NOT_SET

    def to_yaml(self, value: Any) -> str:
        return "".join(f"\n  {o.op}: [{', '.join(map(str, o.backends))}]" for o in value) or "{}"
