"""Puts the .pth file beside the package, which is how each Python process learns of the stand-in."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PTH_FILE = "sglang_fl_kernel_standin.pth"


class BuildWithPth(build_py):
    """setuptools has no declaration for a file in site-packages itself."""

    def run(self) -> None:
        super().run()
        self.copy_file(str(Path(__file__).with_name(PTH_FILE)), str(Path(self.build_lib) / PTH_FILE))


setup(cmdclass={"build_py": BuildWithPth})
