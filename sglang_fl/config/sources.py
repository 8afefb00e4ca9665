"""Where a setting's value came from: the origin that every report prints beside the value."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class SourceKind(Enum):
    """The four origins, strongest first; the value is the word that reports print."""

    ENVIRONMENT = "environment"
    YAML = "YAML"
    PLATFORM = "platform"
    DEFAULT = "default"


@dataclass(frozen=True)
class Source:
    """The origin of one value.

    where: the variable's name, ``file.yaml:LINE``, the platform file's name ("detected" for the platform
    itself), or "default".
    """

    kind: SourceKind
    where: str

    def __str__(self) -> str:
        return self.where if self.kind is SourceKind.DEFAULT else f"{self.kind.value} {self.where}"


DEFAULT_SOURCE = Source(SourceKind.DEFAULT, "default")
DETECTED_SOURCE = Source(SourceKind.PLATFORM, "detected")
