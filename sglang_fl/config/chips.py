"""The one table of the names that a chip goes by: as a vendor, as a platform, in the user's settings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """One kind of chip.

    vendor: canonical name in allow, deny and per-operator settings; platform: canonical name in
    SGLANG_FL_PLATFORM; aliases: further names that mean the same; defaults_file: its platform YAML, or None.
    """

    vendor: str
    platform: str
    aliases: tuple[str, ...] = ()
    defaults_file: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that means this chip, canonical ones first."""
        return tuple(dict.fromkeys((self.platform, self.vendor, *self.aliases)))


CHIPS = (
    Chip(vendor="nvidia", platform="cuda", defaults_file="nvidia.yaml"),
    Chip(vendor="ascend", platform="ascend", aliases=("npu",), defaults_file="ascend.yaml"),
    Chip(vendor="mthreads", platform="musa"),
    Chip(vendor="cpu", platform="cpu", defaults_file="cpu.yaml"),
)

_BY_NAME = {name: chip for chip in CHIPS for name in chip.names}


def find_chip(name: str) -> Chip | None:
    """The chip that `name` means, letter case aside, or None for a name the table does not hold."""
    return _BY_NAME.get(name.lower())


def canonical_vendor(name: str) -> str:
    """`name` as vendors are compared: "cuda" gives "nvidia", "npu" gives "ascend", "musa" gives "mthreads".

    A vendor that the table does not hold (one brought by another distribution) keeps its name in lower case.
    """
    chip = find_chip(name)
    return chip.vendor if chip else name.lower()
