"""Looks that may take long, crash or hang run in processes of their own, which end within a limit whatever they do."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

# The parent's module path as it is: a process that python -c starts would put its folder in front of it.
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from sglang_fl.cli.doctor.children import child; child(*sys.argv[2:])"
)
_SPARE_S = 3.0  # for a process to say where it stood, before it is killed
_KEPT_LINES = 25
_TICK_S = 0.1

Part = tuple[str, Callable[[], Any]]
"""What is looked at next, in words that follow "looking at", and the function that does it."""


@dataclass(frozen=True)
class Failure:
    """A part that gave no result, and why; ``is_refusal``: the plugin's own word, which is complete."""

    reason: str
    is_refusal: bool = False


class Child:
    """One process that does parts one after the other; what it has found so far is kept if it is lost.

    Attributes:
        results: part to its result, or to a :class:`Failure`.
        doing: the part that it is at; empty before the first and after the last.
    """

    def __init__(self, module: str, limit_s: float) -> None:
        """``module``: has ``parts()``, the parts in their order; ``limit_s``: for all of them together, seconds."""
        self.results: dict[str, Any] = {}
        self.doing = ""
        self._limit_s = limit_s
        self._end_s = time.monotonic() + limit_s + _SPARE_S
        self._errors = TemporaryFile()  # noqa: SIM115 - read after the process has ended, then closed
        read, write = os.pipe()
        paths = json.dumps([path or str(Path.cwd()) for path in sys.path])
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, paths, module, str(write), str(limit_s)],
            pass_fds=(write,),
            stdin=subprocess.DEVNULL,
            stdout=self._errors,
            stderr=self._errors,
            start_new_session=True,
        )
        os.close(write)
        self._reader = threading.Thread(target=self._read, args=(os.fdopen(read, "rb"),), daemon=True)
        self._reader.start()

    def _read(self, pipe: IO[bytes]) -> None:
        with pipe, contextlib.suppress(EOFError, pickle.UnpicklingError):
            while True:
                name, result = pickle.load(pipe)
                if result is None:
                    self.doing = name
                else:
                    self.results[name] = result
                    self.doing = ""

    def wait(self, tick: Callable[[], None]) -> None:
        """Until the process has ended, or is killed; ``tick`` is called ten times a second."""
        while self._process.poll() is None and time.monotonic() < self._end_s:
            tick()
            time.sleep(_TICK_S)
        is_late = self._process.poll() is None
        self.kill()
        code = self._process.wait()
        self._reader.join(_SPARE_S)
        if self.doing or code:
            self.results[self.doing or "the start of a process"] = Failure(self._reason(code, is_late))
        self._errors.close()

    def kill(self) -> None:
        """End it, and what it has started; nothing happens if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _reason(self, code: int, is_late: bool) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        said = "\n".join(lines[-_KEPT_LINES:])
        if is_late or "Timeout (" in said:
            words = f"it did not end within {self._limit_s:g} s"
        elif code < 0:
            words = f"its process was ended by {_signal_name(-code)}"
        else:
            words = f"its process ended with code {code}"
        return f"{words}. It said last:\n{said}" if said else words


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def child(module: str, descriptor: str, limit_s: str) -> None:
    """The process's side: runs the parts of ``module``, and tells each before and after."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(float(limit_s), exit=True)
    pipe = os.fdopen(int(descriptor), "wb")
    os.set_inheritable(pipe.fileno(), False)  # what this process starts must not keep it open
    sys.argv = ["sglang"]  # what the plugin refuses is to reach this process as it reaches SGLang's command
    __import__(module)
    for name, result in _done(sys.modules[module].parts()):
        pickle.dump((name, result), pipe)
        pipe.flush()
    faulthandler.cancel_dump_traceback_later()
    os._exit(0)  # a library's clean-up at exit could hang


def _done(parts: list[Part]) -> Iterator[tuple[str, Any]]:
    for number, (name, look) in enumerate(parts):
        yield name, None
        outcome = _outcome(look)
        yield name, outcome
        if number == 0 and isinstance(outcome, Failure):
            return  # the others stand on the first, and would fail for the same reason


def _outcome(look: Callable[[], Any]) -> Any:
    try:
        return look()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - third-party code; the reason is kept and reported
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = str(error) or type(error).__name__
        if isinstance(error, SystemExit):
            return Failure(text, is_refusal=True)
        return Failure(f"{type(error).__name__}: {text} ({where.filename}:{where.lineno})")
