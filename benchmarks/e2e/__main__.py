"""``python -m benchmarks.e2e``."""

from __future__ import annotations

import sys

from benchmarks.e2e.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
