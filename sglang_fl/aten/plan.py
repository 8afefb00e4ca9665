"""Which ATen operators FlagGems is to replace: the settings' lists and profile against FlagGems' real list."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sglang_fl.aten.gems import Gems
from sglang_fl.config import AtenProfile, Settings, SourceKind, closest

# The lists of what is to be replaced, as opposed to left out.
_REPLACING = ("aten.whitelist", "aten.verified")


@dataclass(frozen=True)
class Plan:
    """What to replace.

    names: FlagGems' function names, sorted. chosen_by: profile or list with its source, for the report.
    is_everything: whether FlagGems' whole list is meant, less ``left_out``. left_out: names that a black list or
    FlagGems itself takes away. unknown: a text for each name of a user's list that FlagGems, or PyTorch, does not have.
    wrong: what the platform's list of wrong operators takes from profile full. without_schema: what would be meant,
    but PyTorch has no operator for. not_here: names of the platform's own lists that this FlagGems does not have.
    """

    names: tuple[str, ...]
    chosen_by: str
    is_everything: bool
    left_out: tuple[str, ...]
    unknown: tuple[str, ...]
    wrong: tuple[str, ...] = ()
    without_schema: tuple[str, ...] = ()
    not_here: tuple[str, ...] = ()


def make_plan(settings: Settings, gems: Gems) -> Plan:
    """Decide from the settings: an explicit white list, else the profile, less the black list.

    A white list is taken as it is. From a profile FlagGems' own default exclusions are taken as well, and from profile
    full what is known to be wrong on the platform.
    """
    resolver = NameResolver(gems)
    aten = settings.aten
    unknown = tuple(text for field in aten.used_lists() for text in _unknown(settings, field, resolver, gems))
    if aten.whitelist is not None:
        names = resolver.resolve(aten.whitelist)
        missing = gems.without_schema(names)
        chosen_by = f"white list ({_where(settings, 'aten.whitelist')})"
        return Plan(_sorted(names - {*missing}), chosen_by, False, (), unknown, without_schema=tuple(missing))
    left_out = gems.default_exclusions() | resolver.resolve(aten.blacklist)
    is_everything = aten.profile is AtenProfile.FULL
    all_names = gems.names() if is_everything else resolver.resolve(aten.verified)
    wrong = (all_names & resolver.resolve(aten.wrong)) - left_out if is_everything else set()
    source = "aten.profile" if is_everything else "aten.verified"
    chosen_by = f"profile {aten.profile} ({_where(settings, source)})"
    if aten.blacklist:
        chosen_by += f" less the black list ({_where(settings, 'aten.blacklist')})"
    missing = gems.without_schema(all_names - left_out - wrong)
    return Plan(
        names=_sorted(all_names - left_out - wrong - {*missing}),
        chosen_by=chosen_by,
        is_everything=is_everything,
        left_out=_sorted(all_names & left_out),
        unknown=unknown,
        wrong=_sorted(wrong),
        without_schema=tuple(missing),
        not_here=_not_here(settings, resolver),
    )


class NameResolver:
    """FlagGems' function names of what users write.

    That is such a name (``add``, ``true_divide``), an ATen operator (``div.Tensor``, ``mm.default``) or the same
    without its overload (``div``: every function that FlagGems has for it; also ``softmax`` for ``_softmax``).
    """

    def __init__(self, gems: Gems) -> None:
        self._version = gems.version
        self._by_spelling: dict[str, set[str]] = {}
        self._by_key: dict[str, str] = {entry.key: entry.name for entry in gems.entries}
        for entry in gems.entries:
            base = entry.key.partition(".")[0]
            for spelling in (entry.key, base, base.strip("_")):
                self._by_spelling.setdefault(spelling, set()).add(entry.name)
        # FlagGems' own names mean just that function, not those of an ATen operator of the same name.
        self._by_spelling |= {name: {name} for name in gems.names()}

    def resolve(self, names: Iterable[str]) -> set[str]:
        """Names that are not known add nothing; see :meth:`is_known`."""
        return {found for name in names for found in self._functions(name)}

    def operators(self, names: Iterable[str]) -> set[str]:
        """The ATen operators of what users write: one with its overload is itself, others all of their functions'."""
        found = set()
        for name in names:
            key = name.removesuffix(".default")
            functions = set(self._functions(name))
            is_operator = key in self._by_key and name not in self._by_spelling.get(name, ())
            found |= {key} if is_operator else {key for key, function in self._by_key.items() if function in functions}
        return found

    def is_known(self, name: str) -> bool:
        """Whether FlagGems has something of that name."""
        return bool(self._functions(name))

    def _functions(self, name: str) -> Iterable[str]:
        base, _, overload = name.rpartition(".")
        if overload == "default" and base in self._by_key:
            return (self._by_key[base],)
        return self._by_spelling.get(name, ())

    def problem(self, name: str) -> str:
        """That FlagGems does not have ``name``, and the nearest that it has: of the same operator, if it has that."""
        base = name.partition(".")[0]
        same = [known for known in self._by_spelling if known.partition(".")[0] == base]
        suggestion = closest(name, sorted(same or self._by_spelling), cutoff=0.0 if same else 0.6)
        hint = f" Did you mean {suggestion!r}?" if suggestion else ""
        return f"FlagGems {self._version} has no operator {name!r}.{hint}"


def _unknown(settings: Settings, field: str, resolver: NameResolver, gems: Gems) -> Iterable[str]:
    """Of the user's own lists: a text for each name that replaces, or leaves out, nothing."""
    if _is_platforms(settings, field):
        return
    for name in settings.value(field) or ():
        found = resolver.resolve([name])
        if not found:
            problem = resolver.problem(name)
        elif field in _REPLACING and len(gems.without_schema(found)) == len(found):
            problem = f"this PyTorch has no operator for FlagGems' {name!r}."
        else:
            continue
        yield f"{_where(settings, field)}: {problem} It is left as it is. Correct the name or remove it."


def _not_here(settings: Settings, resolver: NameResolver) -> tuple[str, ...]:
    fields = [field for field in settings.aten.used_lists() if _is_platforms(settings, field)]
    return tuple(name for field in fields for name in settings.value(field) if not resolver.is_known(name))


def _is_platforms(settings: Settings, field: str) -> bool:
    """Whether a list comes with this package: its user can do nothing about it."""
    return settings.source(field).kind in (SourceKind.PLATFORM, SourceKind.DEFAULT)


def _where(settings: Settings, field: str) -> str:
    return settings.source(field).where


def _sorted(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names))
