"""The modules and kernels of the stand-in: importable where SGLang needs that, an error when called."""

from __future__ import annotations

import opcode
import os
import sys
from importlib import metadata
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import NoReturn

from sglang_fl_kernel_standin import FLASHINFER, MODULE_NAME, guards

REAL_DISTRIBUTION = "sglang-kernel"
MARKER = "__sglang_fl_standin__"
ORIGIN = "stand-in by sglang_fl, holds no kernels"
_IMPORT_FROM = opcode.opmap["IMPORT_FROM"]
# SGLang's own switch for FlashInfer; without it a module that was loaded would count as FlashInfer itself.
_FLASHINFER_SWITCH = "SGLANG_IS_FLASHINFER_AVAILABLE"


class KernelNotAvailableError(RuntimeError):
    """A kernel of sgl_kernel was called where only the stand-in is installed."""


class _MissingAttributeError(KernelNotAvailableError, AttributeError):
    """The same, where a name is read off the module: ``hasattr`` says no, as a feature test needs to hear."""


class _MissingImportError(ImportError):
    """Raised where the importer is ready for ImportError and takes its fallback."""


def _wanted_release() -> str:
    """What the installed SGLang requires as its real kernels, such as sglang-kernel==0.4.2."""
    try:
        requirements = metadata.requires("sglang") or []
    except metadata.PackageNotFoundError:
        requirements = []
    wanted = (line.split(";")[0].strip() for line in requirements if line.startswith(REAL_DISTRIBUTION))
    return next(wanted, REAL_DISTRIBUTION)


def explain(name: str) -> str:
    """What is missing, and what to install, for the kernel or module of that dotted name."""
    if name.partition(".")[0] == FLASHINFER:
        return (
            f"{name} is not available: FlashInfer is not installed, and this {FLASHINFER} is the stand-in of sglang_fl "
            "that lets SGLang import without it. Install FlashInfer, or keep SGLang from calling it: "
            "--attention-backend triton --sampling-backend pytorch."
        )
    return (
        f"{name} is not available: this sgl_kernel is the stand-in of sglang_fl (distribution "
        "sglang-fl-kernel-standin), which holds no kernels. Install the real one for this chip, which then "
        f'takes precedence (NVIDIA: pip install --no-deps "{_wanted_release()}"; other chips: the vendor\'s '
        "build), or keep SGLang from calling it, with another backend or an operator of sglang_fl."
    )


class StandInKernel:
    """Takes the place of a kernel, type or table of ``sgl_kernel``: can be imported, cannot be used."""

    def __init__(self, name: str) -> None:
        setattr(self, MARKER, True)
        self.__name__ = self.__qualname__ = name

    def __getattr__(self, attribute: str) -> StandInKernel:
        if attribute.startswith("__"):
            raise AttributeError(f"{self!r} has no attribute {attribute!r}")
        return StandInKernel(f"{self.__name__}.{attribute}")

    def __call__(self, *_args: object, **_keywords: object) -> NoReturn:
        """Raise KernelNotAvailableError with the kernel's name and what to install."""
        raise KernelNotAvailableError(explain(self.__name__))

    def __repr__(self) -> str:
        return f"<{self.__name__}, {ORIGIN}>"


class StandInModule(ModuleType):
    """``sgl_kernel`` or a submodule of it; carries MARKER, by which sglang_fl tells it from a real one."""

    def __getattr__(self, attribute: str) -> object:
        """A kernel for an unguarded ``from`` import, ImportError for a guarded one, else AttributeError."""
        name = f"{self.__name__}.{attribute}"
        if attribute.startswith("__"):
            raise AttributeError(f"{self!r} has no attribute {attribute!r}")
        frame = sys._getframe(1)
        # importlib asks for the name before it looks for a submodule; then the statement itself asks.
        if guards.is_importlib(frame.f_code):
            return StandInKernel(name)
        if not _runs_from_import(frame):
            raise _MissingAttributeError(explain(name))
        if guards.is_guarded(frame):
            raise _MissingImportError(explain(name), name=self.__name__)
        return StandInKernel(name)


def _runs_from_import(frame: FrameType) -> bool:
    return frame.f_code.co_code[frame.f_lasti] == _IMPORT_FROM


# Operators of torch that SGLang describes to Dynamo where it finds a CUDA device, without asking whether they exist.
_OPERATORS = {
    "moe_fused_gate": (
        "(Tensor input, Tensor bias, int num_expert_group, int topk_group, int topk, int num_fused_shared_experts=0, "
        "float routed_scaling_factor=0, bool apply_routed_scaling_factor_on_output=False) -> (Tensor, Tensor)"
    ),
}
_libraries: list[object] = []


def _define_operators() -> None:
    """Give torch, where it is loaded, the operators' names; to call one is the same error as for any kernel."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    namespace = getattr(torch.ops, MODULE_NAME)
    for name, schema in _OPERATORS.items():
        if hasattr(namespace, name):
            continue
        library = torch.library.Library(MODULE_NAME, "FRAGMENT")
        library.define(f"{name}{schema}")
        library.impl(name, StandInKernel(f"{MODULE_NAME}.{name}"), "CompositeExplicitAutograd")
        _libraries.append(library)


class _StandInLoader(Loader):
    """Makes the modules; there is nothing to execute."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = StandInModule(spec.name, "Stand-in by sglang_fl: holds no kernels.")
        setattr(module, MARKER, True)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == MODULE_NAME:
            _define_operators()


def make_spec(fullname: str, caller: FrameType) -> ModuleSpec | None:
    """The spec of ``sgl_kernel`` or of a submodule; None for what is not to be found. ``caller`` is importlib's.

    The package itself is always found: SGLang imports it both with and without a guard, and asks
    ``torch.ops.sgl_kernel`` for the operator that it needs after a guarded import. A submodule is not found
    by a guarded import, nor beside a real package.
    """
    if fullname != MODULE_NAME:
        if not hasattr(sys.modules.get(MODULE_NAME), MARKER):
            return None
        importer = guards.importing_frame(caller)
        if importer is not None and guards.is_guarded(importer):
            return None
    return ModuleSpec(fullname, _StandInLoader(), origin=ORIGIN, is_package=True)


def make_flashinfer_spec(fullname: str, caller: FrameType) -> ModuleSpec | None:
    """The spec of ``flashinfer`` or of a submodule, for a statement of SGLang's that falls back on nothing; or None.

    SGLang imports two of its modules wherever it finds a CUDA device, and asks for all the others: those questions,
    and everybody else's, hear that FlashInfer is not there.
    """
    importer = guards.importing_frame(caller)
    if importer is None or str(importer.f_globals.get("__name__", "")).partition(".")[0] != "sglang":
        return None
    if guards.is_guarded(importer):
        return None
    os.environ[_FLASHINFER_SWITCH] = "false"
    return ModuleSpec(fullname, _StandInLoader(), origin=ORIGIN, is_package=True)
