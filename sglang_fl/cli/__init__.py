"""The command line, ``python -m sglang_fl``: one module of this folder per command."""

from sglang_fl.cli.frame import main

__all__ = ["main"]
