"""The chip's library, as far as the recipe asks for it."""

import os


def device_count() -> int:
    """As many as the test says."""
    return int(os.environ.get("MY_CHIP_DEVICES", "1"))
