"""The finished cases of a sweep, kept so that another one with the same folder goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from sglang_fl.aten.sweep.results import Result

# What of an origin a measurement depends on; model and SGLang are the recording's, and equal calls are equal.
_MEASURED_ON = ("flag_gems", "card", "torch", "triton")
_REMEDY = "Give another --out, or remove the file to measure all of it again."


class SweepError(RuntimeError):
    """The sweep cannot run; the message says why."""


class Partial:
    """A file of JSON lines: what is measured on (``{"origin": ...}``), then ``{"key": ..., "result": ...}`` each.

    origin: as a table has it; results of another FlagGems, card, torch or Triton cannot stand in the same table.
    """

    def __init__(self, path: Path, origin: Mapping[str, str], say: Callable[[str], None]) -> None:
        """Read what is there, or begin the file.

        Raises:
            SweepError: it is of another origin, or a line of it cannot be read; names the file and what to do.
        """
        self._path = path
        self.results: dict[str, Result] = {}
        lines = self._lines(say)
        if not lines:
            self._append({"origin": dict(origin)})
            return
        self._check_origin(lines[0], origin)
        for number, line in enumerate(lines[1:], start=2):
            try:
                entry = json.loads(line)
                self.results[entry["key"]] = Result(**entry["result"])
            except (ValueError, KeyError, TypeError) as error:
                raise SweepError(
                    f"{path}:{number} is no result of a sweep ({type(error).__name__}: {error}). Remove the line to "
                    f"measure its case again. Or: {_REMEDY}"
                ) from error

    def add(self, key: str, result: Result) -> None:
        """Keep the result of a case."""
        self.results[key] = result
        self._append({"key": key, "result": asdict(result)})

    def _append(self, entry: dict[str, object]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def _lines(self, say: Callable[[str], None]) -> list[str]:
        """All whole lines; one that was torn, where the sweep was killed while it wrote, is taken away."""
        if not self._path.exists():
            return []
        text = self._path.read_text(errors="replace")
        *lines, torn = text.split("\n")
        if torn:
            say(f"{self._path}: the last line is torn, and its case is measured again")
            whole = self._path.with_name(f"{self._path.name}.whole")
            whole.write_text("".join(f"{line}\n" for line in lines))
            whole.replace(self._path)
        return lines

    def _check_origin(self, line: str, origin: Mapping[str, str]) -> None:
        try:
            found = dict(json.loads(line)["origin"])
        except (ValueError, KeyError, TypeError):
            raise SweepError(
                f"{self._path} does not say in its first line what it was measured on. {_REMEDY}"
            ) from None
        other = [name for name in _MEASURED_ON if origin.get(name) != found.get(name)]
        if other:
            differences = ", ".join(f"{name} {found.get(name)}, here {origin.get(name)}" for name in other)
            raise SweepError(f"{self._path} holds results of another sweep ({differences}). {_REMEDY}")
