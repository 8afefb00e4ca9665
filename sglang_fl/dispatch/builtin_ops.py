"""Registers every backend: the folders of ``backends`` and the installed distributions; a broken one costs itself."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_fl.config import canonical_vendor
from sglang_fl.dispatch import backends as backends_package
from sglang_fl.dispatch.registry import OpRegistry
from sglang_fl.dispatch.types import BackendImplKind
from sglang_fl.selection import Discovered, discover_entry_points, discover_folders

ENTRY_POINT_GROUP = "sglang_fl.ops"
TEMPLATE = "template"  # shows how a backend is made; in reports it would only be in the way
_FOLDER_KINDS = {"flaggems": BackendImplKind.DEFAULT, "reference": BackendImplKind.REFERENCE}


@dataclass(frozen=True)
class BrokenBackend:
    """A backend that did not register.

    Attributes:
        name: its folder's or entry point's name.
        reason: where it comes from and what was raised.
        kind: what it would have been.
        vendor: canonical name for kind VENDOR, otherwise empty.
    """

    name: str
    reason: str
    kind: BackendImplKind
    vendor: str = ""


def register_all(registry: OpRegistry) -> tuple[BrokenBackend, ...]:
    """Register everything that is found; the result is what could not be, with the reason.

    Each backend registers as a whole or not at all, so that a mistake in its last line leaves no half of it.
    """
    folders = discover_folders(backends_package, "register_ops", "register_builtins")
    found = [folder for folder in folders if folder.name != TEMPLATE]
    outcomes = [_register(registry, backend) for backend in [*found, *discover_entry_points(ENTRY_POINT_GROUP)]]
    return tuple(broken for broken in outcomes if broken is not None)


def _register(registry: OpRegistry, backend: Discovered) -> BrokenBackend | None:
    if backend.register is None:
        return _broken(backend, backend.error)
    own = OpRegistry()
    try:
        backend.register(own)
        registry.register_many(own.all_implementations())
    except Exception as error:  # noqa: BLE001 - third-party code; the reason is kept and reported
        return _broken(backend, f"{type(error).__name__}: {error}")
    return None


def _broken(backend: Discovered, error: str) -> BrokenBackend:
    is_folder = backend.origin.startswith(f"{backends_package.__name__}.")
    kind = _FOLDER_KINDS.get(backend.name, BackendImplKind.VENDOR) if is_folder else BackendImplKind.VENDOR
    vendor = canonical_vendor(backend.name) if kind is BackendImplKind.VENDOR else ""
    return BrokenBackend(backend.name, f"it did not register: {backend.origin}: {error}", kind, vendor)
