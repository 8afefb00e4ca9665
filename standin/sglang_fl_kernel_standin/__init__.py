"""Answers ``import sgl_kernel`` where nothing else does, in every process: a .pth file adds an import finder.

So it does for the modules of FlashInfer that SGLang imports on every CUDA device without asking whether they are there.

No folder named sgl_kernel is installed: a real distribution puts its files there, and pip overwriting and
later removing files of another distribution breaks both. The finder stands last in ``sys.meta_path``, so that
a real sgl_kernel wins wherever it lies and whenever it was installed; once removed, the stand-in is back.

This module is loaded at each start of Python, so it imports nothing but ``sys`` until SGLang asks.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

MODULE_NAME = "sgl_kernel"
FLASHINFER = "flashinfer"


class StandInFinder:
    """The last of ``sys.meta_path``: knows the stand-in's modules, and is asked when no other finder does."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The stand-in's spec for ``sgl_kernel`` and, where that is the stand-in, its submodules; or None."""
        package = fullname.partition(".")[0]
        if package not in (MODULE_NAME, FLASHINFER):
            return None
        from sglang_fl_kernel_standin import modules

        make = modules.make_spec if package == MODULE_NAME else modules.make_flashinfer_spec
        return make(fullname, sys._getframe(1))


def activate() -> None:
    """Append the finder to ``sys.meta_path``, once."""
    if StandInFinder not in sys.meta_path:
        sys.meta_path.append(StandInFinder)
