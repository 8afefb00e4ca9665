"""FlagGems as layer 1 sees it: is it here, which version, for which device, and which operators does it replace."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, cast

PACKAGE = "flag_gems"
LIST = "_FULL_CONFIG"
FIRST_VERSION, OLD_VERSIONS = "5.0", ("1.", "2.", "3.", "4.")
NOT_IMPORTED, NO_DEVICE = "cannot be imported", "cannot tell its device"
# FlagGems 5.0 has DeviceDetector in the first module, 5.3 and later in the second.
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

    def without_schema(self, names: Iterable[str]) -> list[str]:
        """The functions of ``names`` for whose operators this PyTorch has no schema, sorted: it never calls them."""
        called = {entry.name for entry in self.entries if has_schema(entry.key)}
        return sorted(set(names) - called)

    def default_exclusions(self) -> set[str]:
        """The functions that FlagGems leaves out by itself on this device: none of its kernels is right for all.

        In 5.0 these are the vendor's list and the ``exclude`` lists of its enable_configs.yaml; a call of ``enable``
        with a list of one's own loses the latter.
        """
        with foreign_code(self.version, "does not say which operators it leaves out by itself"):
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


def why_unusable() -> str:
    """Why there is no FlagGems that can be used, as far as that is known without its import; "" where there is one."""
    if not is_installed():
        return "flag_gems is not installed: pip install flag-gems"
    if importlib.util.find_spec("triton") is None:
        return "flag_gems is installed, but triton, which its kernels are written in, is not"
    number, spec = installed_version(), importlib.util.find_spec(PACKAGE)
    if number is None or spec is None or spec.origin is None or not number.startswith(OLD_VERSIONS):
        return ""
    return "" if LIST in Path(spec.origin).read_text(errors="replace") else _has_no_list(number)


def load() -> Gems:
    """Import FlagGems and read its list. It detects its device while it is imported.

    Raises:
        GemsError: it is not installed, finds no device that it knows, is broken, or of a version with other names.
    """
    if not is_installed():
        raise GemsError("flag_gems is not installed: pip install flag-gems")
    with foreign_code(installed_version(), NOT_IMPORTED):
        module = importlib.import_module(PACKAGE)
        number = str(getattr(module, "__version__", None) or installed_version() or "of unknown version")
    with foreign_code(number, NO_DEVICE):
        detector = _detector(number)
        vendor, device, key = detector.vendor_name, detector.name, _dispatch_key(detector)
    if not hasattr(module, LIST):
        raise GemsError(_has_no_list(number))
    with foreign_code(number, "has not the list that sglang_fl knows"):
        return Gems(module, number, tuple(_entries(module)), vendor, device, key)


def has_schema(key: str) -> bool:
    """Whether this PyTorch has the ATen operator ``key``; a kernel can be registered for one that it has not."""
    import torch

    base, _, overload = key.partition(".")
    try:
        # torch.ops would look it up, but raises for other reasons as well.
        torch._C._dispatch_find_schema_or_throw(f"aten::{base}", overload)
    except RuntimeError:
        return False
    return True


@contextmanager
def foreign_code(number: str | None, problem: str) -> Iterator[None]:
    """Around all that runs FlagGems' code: whatever that raises, also to end the process, is a reason of layer 1.

    number: FlagGems' version, None where it is not known. problem: what could not be had, for the reason.

    Raises:
        GemsError: names FlagGems, its version and the exception. KeyboardInterrupt passes.
    """
    try:
        yield
    except (GemsError, KeyboardInterrupt):
        raise
    except BaseException as error:
        name = PACKAGE if number is None else f"{PACKAGE} {number}"
        raise GemsError(f"{name} {_problem(problem, error)}") from error


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


def _detector(number: str) -> Any:
    for name in DETECTOR_MODULES:
        found = _find(name, "DeviceDetector")
        if found is not None:
            return found()
    raise GemsError(f"{PACKAGE} {number} has DeviceDetector neither in {' nor in '.join(DETECTOR_MODULES)}")


def _dispatch_key(detector: Any) -> str:
    return str(getattr(detector, "dispatch_key", None) or detector.name.upper())


def _find(module: str, attribute: str) -> Any:
    """None where there is no such module; one that cannot be imported raises."""
    try:
        return getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        return None


def _has_no_list(number: str) -> str:
    return (
        f"{PACKAGE} {number} has no _FULL_CONFIG, the list of its operators that {FIRST_VERSION} and later have: "
        f"pip install 'flag-gems>={FIRST_VERSION}'"
    )


def _problem(problem: str, error: BaseException) -> str:
    text = " ".join(str(error).split())
    if problem in (NOT_IMPORTED, NO_DEVICE) and ("no device" in text.lower() or "not supported" in text):
        return f"finds no device that it knows here ({text})"
    if isinstance(error, ModuleNotFoundError):
        return f"lacks a package: {text}. Install it beside {PACKAGE}"
    return f"{problem}: {type(error).__name__}: {text}"
