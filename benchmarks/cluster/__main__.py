"""``python -m benchmarks.cluster``."""

from __future__ import annotations

import sys

from benchmarks.cluster.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
