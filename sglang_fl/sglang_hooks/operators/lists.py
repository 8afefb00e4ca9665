"""SGLANG_FL_OOT_BLACKLIST and SGLANG_FL_OOT_WHITELIST: which classes the plugin takes over."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_fl.config import Settings
from sglang_fl.sglang_hooks.operators.table import TABLE, Bridged, find, known_classes


@dataclass(frozen=True)
class ClassLists:
    """Class names; one of a layer's class or of any class that it derives from counts.

    Attributes:
        blacklist: classes that keep SGLang's own method.
        whitelist: the only classes that are taken over; None: all.
    """

    blacklist: frozenset[str] = frozenset()
    whitelist: frozenset[str] | None = None

    @classmethod
    def from_settings(cls, settings: Settings) -> ClassLists:
        """The lists of the settings."""
        whitelist = settings.ops.whitelist
        return cls(frozenset(settings.ops.blacklist), None if whitelist is None else frozenset(whitelist))

    def allow(self, names: frozenset[str]) -> bool:
        """Whether a class with ``names``, its own and its ancestors', is taken over."""
        if names & self.blacklist:
            return False
        return self.whitelist is None or bool(names & self.whitelist)

    def bridge_of(self, cls: type) -> Bridged | None:
        """The bridge that serves ``cls``; None where it keeps SGLang's own method."""
        row = find(cls)
        names = frozenset(ancestor.__name__ for ancestor in cls.__mro__)
        return row if row is not None and self.allow(names) else None

    def rows(self) -> tuple[Bridged, ...]:
        """The bridges that are left: those of a class, or of one of its variants, that the lists allow."""
        return tuple(row for row in TABLE if any(self.allow(names) for names in _names(row)))

    def describe(self) -> str:
        """For the report; "" without lists."""
        if self.whitelist is not None:
            return f"only {', '.join(sorted(self.whitelist))}"
        return f"without {', '.join(sorted(self.blacklist))}" if self.blacklist else ""


def _names(row: Bridged) -> list[frozenset[str]]:
    ancestors = {"MultiPlatformOp", "Module", *_BASES.get(row.name, ()), row.name}
    return [frozenset({*ancestors, *own}) for own in ((), *((variant,) for variant in row.variants))]


_BASES = {"MRotaryEmbedding": ("RotaryEmbedding",)}


def unknown_class_names(settings: Settings) -> list[str]:
    """A line for each listed class that has no bridge."""
    known = (*known_classes(), "MultiPlatformOp")
    problems = [
        problem for name in ("ops.blacklist", "ops.whitelist") for problem in settings.unknown_names(name, known)
    ]
    return [f"no such operator class has a bridge: {problem}" for problem in problems]
