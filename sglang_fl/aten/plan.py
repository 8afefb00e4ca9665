"""Which ATen operators FlagGems is to replace: the settings' lists and profile against FlagGems' real list."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sglang_fl.aten.gems import Gems
from sglang_fl.config import AtenProfile, Settings, closest

_LISTS = ("aten.whitelist", "aten.blacklist", "aten.verified", "aten.wrong")


@dataclass(frozen=True)
class Plan:
    """What to replace.

    names: FlagGems' function names, sorted. chosen_by: profile or list with its source, for the report.
    is_everything: whether FlagGems' whole list is meant, less ``left_out``. left_out: names that a black list or
    FlagGems itself takes away. unknown: a text for each name that FlagGems does not have. wrong: what the platform's
    list of wrong operators takes from profile full.
    """

    names: tuple[str, ...]
    chosen_by: str
    is_everything: bool
    left_out: tuple[str, ...]
    unknown: tuple[str, ...]
    wrong: tuple[str, ...] = ()


def make_plan(settings: Settings, gems: Gems) -> Plan:
    """Decide from the settings: an explicit white list, else the profile, less the black list.

    A white list is taken as it is. From a profile FlagGems' own default exclusions are taken as well, and from profile
    full what is known to be wrong on the platform.
    """
    resolver = NameResolver(gems)
    unknown = tuple(text for field in _LISTS for text in _unknown(settings, field, resolver, gems))
    aten = settings.aten
    if aten.whitelist is not None:
        names = resolver.resolve(aten.whitelist)
        return Plan(_sorted(names), f"white list ({_where(settings, 'aten.whitelist')})", False, (), unknown)
    left_out = gems.default_exclusions() | resolver.resolve(aten.blacklist)
    is_everything = aten.profile is AtenProfile.FULL
    all_names = gems.names() if is_everything else resolver.resolve(aten.verified)
    wrong = (all_names & resolver.resolve(aten.wrong)) - left_out if is_everything else set()
    source = "aten.profile" if is_everything else "aten.verified"
    chosen_by = f"profile {aten.profile} ({_where(settings, source)})"
    if aten.blacklist:
        chosen_by += f" less the black list ({_where(settings, 'aten.blacklist')})"
    return Plan(
        names=_sorted(all_names - left_out - wrong),
        chosen_by=chosen_by,
        is_everything=is_everything,
        left_out=_sorted(all_names & left_out),
        unknown=unknown,
        wrong=_sorted(wrong),
    )


class NameResolver:
    """FlagGems' function names of what users write.

    That is such a name (``add``, ``true_divide``), an ATen operator (``div.Tensor``) or the same without its overload
    (``div``: every function that FlagGems has for it; also ``softmax`` for ``_softmax``).
    """

    def __init__(self, gems: Gems) -> None:
        self._by_spelling: dict[str, set[str]] = {}
        for entry in gems.entries:
            base = entry.key.partition(".")[0]
            for spelling in (entry.key, base, base.strip("_")):
                self._by_spelling.setdefault(spelling, set()).add(entry.name)
        # FlagGems' own names mean just that function, not those of an ATen operator of the same name.
        self._by_spelling |= {name: {name} for name in gems.names()}

    def resolve(self, names: Iterable[str]) -> set[str]:
        """Names that are not known add nothing; see :meth:`is_known`."""
        return {found for name in names for found in self._by_spelling.get(name, ())}

    def is_known(self, name: str) -> bool:
        """Whether FlagGems has something of that name."""
        return name in self._by_spelling

    def suggestion(self, name: str) -> str | None:
        """The nearest name that is known."""
        return closest(name, sorted(self._by_spelling))


def _unknown(settings: Settings, field: str, resolver: NameResolver, gems: Gems) -> Iterable[str]:
    for name in settings.value(field) or ():
        if resolver.is_known(name):
            continue
        suggestion = resolver.suggestion(name)
        hint = f" Did you mean {suggestion!r}?" if suggestion else ""
        yield (
            f"{_where(settings, field)}: FlagGems {gems.version} has no operator {name!r}; it is left as it is.{hint} "
            "Correct the name or remove it."
        )


def _where(settings: Settings, field: str) -> str:
    return settings.source(field).where


def _sorted(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names))
