"""FlagGems as layer 1 sees it: is it here, which version, for which device, and which operators does it replace."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, cast

PACKAGE = "flag_gems"
# FlagGems 4.2 and 5.0 have DeviceDetector in the first module, 5.3 and later in the second.
DETECTOR_MODULES = ("flag_gems.runtime.backend.device", "flag_gems.runtime.backend.device_finder")


class GemsError(RuntimeError):
    """FlagGems cannot be used here; the message says why, as the reason of a layer that is off."""


@dataclass(frozen=True)
class Entry:
    """One kernel of FlagGems' list.

    key: the ATen operator, ``add.Tensor`` (``argmax`` for a default overload).
    name: the function's name, which FlagGems' include and exclude lists hold: ``add``. One function may have more
        than one key.
    function: the function itself.
    """

    key: str
    name: str
    function: Callable[..., Any]


@dataclass(frozen=True)
class Gems:
    """FlagGems, imported.

    entries: its list, without what its own conditions exclude. vendor, device, dispatch_key: what its DeviceDetector
    found: ``nvidia``, ``cuda``, ``CUDA``.
    """

    module: ModuleType
    version: str
    entries: tuple[Entry, ...]
    vendor: str
    device: str
    dispatch_key: str

    def names(self) -> set[str]:
        """The function names, as FlagGems' lists hold them."""
        return {entry.name for entry in self.entries}

    def keys(self, names: Iterable[str]) -> list[str]:
        """The ATen operators of the functions ``names``, in FlagGems' order."""
        wanted = set(names)
        return [entry.key for entry in self.entries if entry.name in wanted]

    def default_exclusions(self) -> set[str]:
        """The functions that FlagGems leaves out by itself on this device: none of its kernels is right for all.

        In 5.0 these are the vendor's list and the ``exclude`` lists of its enable_configs.yaml; a call of ``enable``
        with a list of one's own loses the latter.
        """
        excluded = set(self._vendor_exclusions())
        resolve = _find(f"{PACKAGE}.config", "resolve_user_setting")
        if resolve is not None:
            with warnings.catch_warnings():
                # It warns of each file that has no such list.
                warnings.simplefilter("ignore")
                excluded |= set(resolve("default", "exclude"))
        return excluded & self.names()

    def _vendor_exclusions(self) -> Iterable[str]:
        unused = _find(f"{PACKAGE}.runtime.backend", "get_unused_ops")
        # NVIDIA has no list and FlagGems does not ask for one.
        if unused is None or self.vendor == "nvidia":
            return ()
        found: Iterable[str] = unused(self.vendor)
        return found


def is_installed() -> bool:
    """Whether flag_gems can be found; it is not imported."""
    return importlib.util.find_spec(PACKAGE) is not None


def installed_version() -> str | None:
    """Version of the installed flag_gems, None if it is not installed as a distribution."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return None


def load() -> Gems:
    """Import FlagGems and read its list. It detects its device while it is imported.

    Raises:
        GemsError: it is not installed, finds no device that it knows, is broken, or of a version with other names.
    """
    if not is_installed():
        raise GemsError("flag_gems is not installed: pip install flag-gems")
    try:
        module = importlib.import_module(PACKAGE)
    except Exception as error:
        raise GemsError(_import_failure(error)) from error
    number = str(getattr(module, "__version__", None) or installed_version() or "of unknown version")
    detector = _detector()
    try:
        entries = tuple(_entries(module))
        return Gems(module, number, entries, detector.vendor_name, detector.name, _dispatch_key(detector))
    except (AttributeError, TypeError, IndexError) as error:
        raise GemsError(f"flag_gems {number} has not the list that sglang_fl knows ({error})") from error


@contextmanager
def replaced(entries: Iterable[Entry], dispatch_key: str) -> Iterator[None]:
    """Inside, PyTorch calls the functions of ``entries`` for their operators on the device; then its own again."""
    import torch

    # torch.library is not typed.
    library: Any = cast("Any", torch.library).Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            # PyTorch warns of each kernel that is put over another.
            warnings.simplefilter("ignore")
            for entry in entries:
                library.impl(entry.key, entry.function, dispatch_key)
        yield
    finally:
        library._destroy()


def _entries(module: ModuleType) -> Iterator[Entry]:
    for key, function, *conditions in module._FULL_CONFIG:
        if all(condition() for condition in conditions if callable(condition)):
            yield Entry(key, getattr(function, "__name__", str(function)), function)


def _detector() -> Any:
    for name in DETECTOR_MODULES:
        found = _find(name, "DeviceDetector")
        if found is not None:
            return found()
    raise GemsError(f"flag_gems has DeviceDetector neither in {' nor in '.join(DETECTOR_MODULES)}")


def _dispatch_key(detector: Any) -> str:
    return str(getattr(detector, "dispatch_key", None) or detector.name.upper())


def _find(module: str, attribute: str) -> Any:
    try:
        return getattr(importlib.import_module(module), attribute, None)
    except ImportError:
        return None


def _import_failure(error: Exception) -> str:
    text = " ".join(str(error).split())
    if "No device" in text or "not supported" in text:
        return f"flag_gems finds no device that it knows here ({text})"
    if isinstance(error, ModuleNotFoundError):
        return f"flag_gems lacks a package: {text}. Install it beside flag_gems"
    return f"flag_gems cannot be imported: {type(error).__name__}: {text}"
