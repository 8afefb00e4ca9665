"""Register hooks with SGLang's HookRegistry, check them against the installed SGLang, and prove that they are live."""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from types import ModuleType
from typing import Any


class HookKind(str, Enum):
    """As SGLang's ``HookType``, which cannot be imported before SGLang is."""

    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"


# Parameters that SGLang puts before the target's own when it calls a hook.
LEADING_PARAMETERS = {HookKind.BEFORE: 0, HookKind.AFTER: 1, HookKind.AROUND: 1}


@dataclass(frozen=True)
class Hook:
    """One hook.

    Attributes:
        target: dotted path of the function or method.
        function: what SGLang calls; its parameters after the leading one equal the target's.
        kind: before, after or around.
    """

    target: str
    function: Callable[..., Any]
    kind: HookKind = HookKind.AROUND


def register(hooks: Iterable[Hook]) -> None:
    """Hand the hooks to SGLang, which applies them when all plugins have been executed."""
    from sglang.srt.plugins import hook_registry

    wanted = list(hooks)
    for hook in wanted:
        hook_registry.HookRegistry.register(hook.target, hook.function, hook_registry.HookType(hook.kind.value))
    Propagation.install(hook_registry, (hook.target for hook in wanted))


class Propagation:
    """Stands for SGLang's ``_propagate_patch``, which gives a hooked function to all modules that have imported it.

    SGLang looks through every name of every module for each hook: some 30 ms, in each process that loads plugins. Here
    it is done once for all hooks of ours, and again where modules have come in between.
    """

    def __init__(self, own: Callable[[object, object, object], int], targets: Iterable[str]) -> None:
        """``own``: SGLang's; it is called for what is not among ``targets``."""
        self._own = own
        found = [function for target in targets if (function := _function_at(target)) is not None]
        self._wanted = {id(function): function for function in found}
        self._places: dict[int, list[tuple[ModuleType, str]]] = {}
        self._modules = -1

    @classmethod
    def install(cls, hook_registry: ModuleType, targets: Iterable[str]) -> None:
        """In the place of SGLang's function, if this SGLang has one of these parameters."""
        own = getattr(hook_registry, "_propagate_patch", None)
        if own is not None and _parameters(own) == ["original", "wrapped", "source_module"]:
            setattr(hook_registry, "_propagate_patch", cls(own, targets))  # noqa: B010 - it has no such declaration

    def __call__(self, original: object, wrapped: object, source_module: object) -> int:
        """See SGLang's; the number of names that were changed."""
        if id(original) not in self._wanted:
            return self._own(original, wrapped, source_module)
        if len(sys.modules) != self._modules:
            self._look_up()
        changed = 0
        for module, name in self._places.get(id(original), ()):
            if module is source_module or vars(module).get(name) is not original:
                continue
            try:
                setattr(module, name, wrapped)
            except (AttributeError, TypeError):
                continue
            changed += 1
        return changed

    def _look_up(self) -> None:
        self._modules, self._places = len(sys.modules), {}
        for module in list(sys.modules.values()):
            if isinstance(module, ModuleType):
                for name, value in list(vars(module).items()):
                    if id(value) in self._wanted:
                        self._places.setdefault(id(value), []).append((module, name))


def _function_at(target: str) -> Any:
    """What SGLang takes for the original, of a class or static method the function beneath; None if there is none."""
    place, _, name = target.rpartition(".")
    try:
        holder = pkgutil.resolve_name(place)
    except (ImportError, AttributeError, ValueError):
        return None
    raw = vars(holder).get(name) if isinstance(holder, type) else None
    return raw.__func__ if isinstance(raw, (classmethod, staticmethod)) else getattr(holder, name, None)


def misfits(hooks: Iterable[Hook]) -> list[str]:
    """What of ``hooks`` does not fit the installed SGLang: a missing target, or other parameters.

    Imports the targets' modules. Called before the hooks are applied.
    """
    problems = []
    for hook in hooks:
        try:
            target = pkgutil.resolve_name(hook.target)
        except (ImportError, AttributeError) as error:
            problems.append(f"{hook.target} does not exist in the installed SGLang ({error})")
            continue
        wanted, found = _own_parameters(hook), _parameters(target)
        if wanted != found:
            problems.append(
                f"{hook.target} has the parameters ({', '.join(found)}), the plugin knows ({', '.join(wanted)})"
            )
    return problems


def dead(hooks: Iterable[Hook]) -> list[str]:
    """Which of ``hooks`` are not live, by identity, with the place where the old function is still in use.

    Looks through every loaded module: some 0.1 s once SGLang is loaded, so not for a path that serves requests.
    """
    problems = []
    replaced = {}
    for hook in hooks:
        chain = _wrapping_chain_of(hook)
        if not _is_applied(hook, chain):
            problems.append(f"{hook.target}: SGLang did not apply the hook")
        elif chain[-1] is not chain[0]:
            replaced[id(chain[-1])] = hook.target
    problems += [
        f"{replaced[id(value)]}: {module}.{name} is still the unhooked function"
        for module, name, value in _module_bindings()
        if id(value) in replaced
    ]
    return problems


def count_applied(hooks: Iterable[Hook]) -> int:
    """How many of ``hooks`` are what their targets lead to at this moment; cheap."""
    return sum(_is_applied(hook, _wrapping_chain_of(hook)) for hook in hooks)


def foreign(hooks: Iterable[Hook]) -> list[str]:
    """Other plugins' hooks on the same targets: one around ours may keep calls from us, one beneath is not reached.

    ``hooks``: all of ours, since two of them may have one target.
    """
    hooks = list(hooks)
    ours = {id(hook.function) for hook in hooks}
    found = []
    for hook in hooks:
        chain = _wrapping_chain_of(hook)
        place = next((place for place, function in enumerate(chain) if hook.function in _closure(function)), None)
        if place is None:
            continue
        found += [
            f"{hook.target}: {name} lies around ours and decides what reaches it"
            for name in _names(_without(ours, chain[:place]))
        ]
        if hook.kind is HookKind.AROUND:
            beneath = _names(_without(ours, chain[place + 1 : -1]))
            found += [f"{hook.target}: {name} lies beneath ours and is not reached" for name in beneath]
    return found


def beneath(hook: Hook) -> Callable[..., Any]:
    """What ``hook`` wraps in this process: SGLang's own function, or the hook of another plugin beneath ours.

    Raises:
        LookupError: the hook is not live.
    """
    chain = _wrapping_chain_of(hook)
    for outer, inner in pairwise(chain):
        if hook.function in _closure(outer):
            found: Callable[..., Any] = inner
            return found
    raise LookupError(f"{hook.target}: SGLang did not apply the hook")


def _without(ours: set[int], chain: Iterable[Any]) -> list[Any]:
    """The wrapping functions that hold none of our hooks."""
    return [function for function in chain if ours.isdisjoint(map(id, _closure(function)))]


def _names(functions: Iterable[Any]) -> list[str]:
    """The hooks that wrapping functions hold: what they enclose beside the function that they wrap."""
    names = []
    for function in functions:
        own = [v for v in _closure(function) if callable(v) and v is not getattr(function, "__wrapped__", None)]
        holder = own[0] if own else function
        names.append(f"{getattr(holder, '__module__', '?')}.{getattr(holder, '__qualname__', repr(holder))}")
    return names


def _own_parameters(hook: Hook) -> list[str]:
    return _parameters(hook.function)[LEADING_PARAMETERS[hook.kind] :]


def _parameters(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function, follow_wrapped=True).parameters.values()
    return [str(parameter.replace(annotation=inspect.Parameter.empty)) for parameter in parameters]


def _wrapping_chain_of(hook: Hook) -> list[Any]:
    """What the target leads to now, and what that wraps, down to SGLang's own function."""
    chain = [pkgutil.resolve_name(hook.target)]
    while getattr(chain[-1], "__wrapped__", None) is not None:
        chain.append(chain[-1].__wrapped__)
    return chain


def _is_applied(hook: Hook, chain: Iterable[Any]) -> bool:
    return any(hook.function is value for function in chain for value in _closure(function))


def _closure(function: Any) -> list[Any]:
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]


def _module_bindings() -> Iterator[tuple[str, str, Any]]:
    for module_name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                yield module_name, name, value
