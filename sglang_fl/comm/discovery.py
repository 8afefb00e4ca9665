"""Which communication backends this process knows: folders of the package and installed distributions."""

from __future__ import annotations

import logging
from functools import cache

from sglang_fl.comm import backends as backends_package
from sglang_fl.comm.types import BackendRegistry
from sglang_fl.selection import discover_entry_points, discover_folders

logger = logging.getLogger(__name__)
TEMPLATE = "template"  # shows how a backend is made; in reports it would only be in the way
ENTRY_POINT_GROUP = "sglang_fl.comm"


@cache
def discover_backends() -> BackendRegistry:
    """Every backend with its name; one that fails to import or register is kept with its reason."""
    registry = BackendRegistry()
    found = [
        folder
        for folder in discover_folders(backends_package, "register_comm", "register_comm")
        if folder.name != TEMPLATE
    ]
    for discovered in [*found, *discover_entry_points(ENTRY_POINT_GROUP)]:
        if discovered.register is None:
            registry.failures[discovered.name] = f"{discovered.origin}: {discovered.error}"
            continue
        try:
            discovered.register(registry)
        except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            registry.failures[discovered.name] = f"{discovered.origin}: {type(error).__name__}: {error}"
    for name, text in registry.failures.items():
        logger.warning("communication backend %s is left out, it did not register: %s", name, text)
    return registry
