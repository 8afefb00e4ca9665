"""A stand-in for the base class of vllm-plugin-FL's backends: it has nothing of ours."""

from abc import ABC, abstractmethod


class Backend(ABC):
    """Name and availability."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name."""

    @abstractmethod
    def is_available(self) -> bool:
        """Whether it can be used."""
