"""Find backends: folders of the package that hold a registration module, and installed distributions."""

from __future__ import annotations

import importlib
import pkgutil
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Discovered:
    """One place that offers implementations.

    Attributes:
        name: folder or entry point name.
        origin: dotted module, or ``distribution: module:function`` of an entry point.
        register: the function to call with a registry; None if importing it failed.
        error: why importing it failed, with the traceback's last lines; empty if it did not.
    """

    name: str
    origin: str
    register: Callable[[Any], None] | None
    error: str = ""


def discover_folders(package: ModuleType, module_name: str, function_name: str) -> list[Discovered]:
    """Every subpackage of ``package`` (to any depth) that contains ``module_name``, in sorted order.

    One that fails to import costs itself, never its neighbours: its error is kept in the result.
    """
    found = []
    for dotted in sorted(_modules_named(package, module_name)):
        name = dotted.split(".")[-2]
        found.append(_load(name, dotted, partial(_attribute, dotted, function_name)))
    return found


def discover_entry_points(group: str) -> list[Discovered]:
    """Every entry point of ``group`` among the installed distributions, sorted by name."""
    found = []
    for point in sorted(entry_points(group=group), key=lambda point: point.name):
        distribution = point.dist.name if point.dist else "unknown distribution"
        found.append(_load(point.name, f"{distribution}: {point.value}", point.load))
    return found


def _modules_named(package: ModuleType, module_name: str) -> Iterator[str]:
    # The folders are walked without importing them: a broken neighbour must not stop the walk.
    pending = [(package.__name__, list(package.__path__))]
    while pending:
        prefix, paths = pending.pop()
        for info in pkgutil.iter_modules(paths):
            dotted = f"{prefix}.{info.name}"
            if info.ispkg:
                pending.append((dotted, [f"{path}/{info.name}" for path in paths]))
            elif info.name == module_name:
                yield dotted


def _attribute(dotted: str, function_name: str) -> Callable[[Any], None]:
    function: Callable[[Any], None] = getattr(importlib.import_module(dotted), function_name)
    return function


def _load(name: str, origin: str, load: Callable[[], Callable[[Any], None]]) -> Discovered:
    try:
        return Discovered(name, origin, load())
    except (Exception, SystemExit) as error:  # noqa: BLE001 - third-party code; the error is kept and reported with the backend
        last = "".join(traceback.format_exception(error)[-2:]).strip()
        return Discovered(name, origin, None, f"{type(error).__name__}: {error}\n{last}")
