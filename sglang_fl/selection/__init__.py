"""Discover implementations, select one by policy, explain why: knows neither operators nor collectives."""

from sglang_fl.selection.discover import Discovered, discover_entry_points, discover_folders
from sglang_fl.selection.select import (
    Availability,
    Candidate,
    Kind,
    PassedOver,
    Policy,
    Selection,
    SelectionError,
    select,
)

__all__ = [
    "Availability",
    "Candidate",
    "Discovered",
    "Kind",
    "PassedOver",
    "Policy",
    "Selection",
    "SelectionError",
    "discover_entry_points",
    "discover_folders",
    "select",
]
