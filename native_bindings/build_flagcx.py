"""Puts the declarations and the C sources of the FlagCX shim together into one abi3 extension."""

from __future__ import annotations

import re
from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parent.parent
DECLARATIONS = ROOT / "native_bindings" / "declarations"
SHIM = ROOT / "csrc" / "flagcx_shim"

# In this order: what is declared is used only by what follows.
SUBJECTS = (
    "types",
    "library",
    "device",
    "jobs",
    "communicator",
    "calls",
    "collectives",
    "point_to_point",
    "memory",
)


def package_version() -> str:
    """The version that the extension is stamped with, read without importing the package."""
    text = (ROOT / "sglang_fl" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, flags=re.MULTILINE)
    if found is None:
        raise RuntimeError(f'{ROOT}/sglang_fl/__init__.py has no line __version__ = "..."')
    return found.group(1)


def make_ffi() -> FFI:
    """The extension's interface, for the key ``cffi_modules`` of setup.py."""
    ffi = FFI()
    for subject in SUBJECTS:
        ffi.cdef((DECLARATIONS / f"{subject}.h").read_text(encoding="utf-8"))
    ffi.set_source(
        "sglang_fl._flagcx",
        '#include "flagcx_shim.h"',
        # Relative to the folder of setup.py, as setuptools wants them.
        sources=sorted(str(path.relative_to(ROOT)) for path in SHIM.glob("*.c")),
        depends=sorted(str(path.relative_to(ROOT)) for path in [*SHIM.glob("*.h"), *DECLARATIONS.glob("*.h")]),
        include_dirs=[str(SHIM.relative_to(ROOT)), str(DECLARATIONS.parent.relative_to(ROOT))],
        define_macros=[
            ("_GNU_SOURCE", None),
            ("SGLANG_FL_PACKAGE_VERSION", f'"{package_version()}"'),
        ],
        extra_compile_args=["-std=c11", "-O2", "-fvisibility=hidden", "-pthread"],
        extra_link_args=["-pthread"],
        libraries=["dl", "m"],
        py_limited_api=True,
    )
    return ffi
