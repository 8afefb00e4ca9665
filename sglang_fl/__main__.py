"""``python -m sglang_fl``."""

from sglang_fl.cli import main

if __name__ == "__main__":
    main()
