"""The native part of the build: the extension for FlagCX, or the recorded reason why it is absent."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

# setuptools runs this file without its folder on the path.
sys.path.insert(0, str(Path(__file__).resolve().parent))

EXTENSION = "sglang_fl._flagcx"
REASON_FILE = "_flagcx_absent.txt"


class BuildOrSayWhy(build_ext):
    """Builds the extension; where that fails the package is built without it and keeps the reason.

    Layers 1 and 2 need no FlagCX, and a machine without a compiler can still use them. The reason is a file
    beside the place where the extension would lie; ``sglang_fl.comm.backends.flagcx`` quotes it.
    """

    def build_extension(self, ext: Extension) -> None:
        """Compile, or write the reason down; an old extension or reason never stays beside a new outcome."""
        target = Path(self.get_ext_fullpath(ext.name))
        reason_files = self._reason_files(target)
        try:
            super().build_extension(ext)
        except (BaseError, CCompilerError) as error:
            ext.optional = True  # or the copy into the source tree fails on the missing file
            for path in self._copies_of(target):
                path.unlink(missing_ok=True)
            for path in reason_files:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(f"{error}\n", encoding="utf-8")
            self.warn(f"{EXTENSION} is left out, FlagCX will be unavailable: {error}")
            return
        for path in reason_files:
            path.unlink(missing_ok=True)

    def _reason_files(self, target: Path) -> list[Path]:
        return [folder / REASON_FILE for folder in self._folders(target)]

    def _copies_of(self, target: Path) -> list[Path]:
        """The extension itself, and those that an earlier build may have left under any name it can be loaded by."""
        left = [path for folder in self._folders(target) for path in folder.glob(f"{target.name.split('.')[0]}.*.so")]
        return [target, *left]

    def _folders(self, target: Path) -> list[Path]:
        """The build folder and, for an editable install, the package in the source tree."""
        folders = [target.parent]
        if self.inplace or self.editable_mode:
            folders.append(Path(__file__).resolve().parent / "sglang_fl")
        return folders


setup(
    cffi_modules=["native_bindings/build_flagcx.py:make_ffi"],
    cmdclass={"build_ext": BuildOrSayWhy},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
