"""What can be wrong with a setting, said the same way everywhere: where, found, allowed, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One wrong setting.

    where: the variable, ``file.yaml:LINE`` or file that holds it; field: the setting's name or "";
    found: what stands there; allowed: what may stand there; action: what to do; suggestion: a close
    allowed value or None.
    """

    where: str
    field: str
    found: str
    allowed: str
    action: str
    suggestion: str | None = None

    def __str__(self) -> str:
        field = f" ({self.field})" if self.field else ""
        suggestion = f" Did you mean {self.suggestion}?" if self.suggestion else ""
        return f"{self.where}{field}: found {self.found}; allowed: {self.allowed}.{suggestion} {self.action}"


class SettingsError(ValueError):
    """Wrong settings: every problem of one load, in one message. ``problems`` holds them one by one."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        if not problems:
            raise ValueError("a SettingsError needs at least one problem")
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return f"sglang_fl: a setting is wrong. {self.problems[0]}"
        lines = [f"  {number}. {problem}" for number, problem in enumerate(self.problems, start=1)]
        return "\n".join([f"sglang_fl: {len(self.problems)} settings are wrong:", *lines])


def closest(text: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The candidate nearest to `text`, letter case aside, or None if none is close."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    matches = difflib.get_close_matches(text.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[matches[0]] if matches else None
