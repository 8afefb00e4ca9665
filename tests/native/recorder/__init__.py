"""The recording library: built by the tests, opened like any libflagcx, asked afterwards what it was called with."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("recorder.c")
# RECORDER_FORM: the oldest release of each form.
FORMS = {7: "0.7 to 0.10", 11: "0.11 and 0.12", 13: "0.13", 14: "head"}


def build(output: Path, form: int = 14, id_bytes: int = 256, hidden: Iterable[str] = ()) -> Path:
    """Compile the recorder to ``output`` without the symbols in ``hidden``."""
    output.parent.mkdir(parents=True, exist_ok=True)
    script = output.with_suffix(".map")
    names = "".join(f"{name}; " for name in hidden)
    script.write_text(f"{{ global: *; local: {names}}};\n" if names else "{ global: *; };\n")
    command = ["cc", "-std=gnu11", "-O1", "-fPIC", "-shared", "-pthread", f"-DRECORDER_FORM={form}"]
    command += [f"-DRECORDER_ID_BYTES={id_bytes}", f"-Wl,--version-script={script}", "-o", str(output), str(SOURCE)]
    subprocess.run(command, check=True)
    return output


@dataclass(frozen=True)
class Call:
    """One recorded call: the function and its arguments in their order."""

    name: str
    values: dict[str, str]

    def __getitem__(self, key: str) -> int:
        return int(self.values[key])


class Recorder:
    """The test's side of one built recorder; ``path`` is what FLAGCX_PATH would name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._control = ctypes.CDLL(str(path))
        self._control.recorder_copy.restype = ctypes.c_size_t
        self._control.recorder_copy.argtypes = [ctypes.c_char_p, ctypes.c_size_t]

    def calls(self, name: str = "") -> list[Call]:
        """Recorded calls, of ``name`` only if it is given."""
        lines = [line.split() for line in self._text().splitlines()]
        calls = [Call(words[0], dict(word.split("=", 1) for word in words[1:])) for words in lines]
        return [call for call in calls if name in ("", call.name)]

    def _text(self) -> str:
        """A consistent copy: other threads may be writing."""
        size = 0
        while True:
            buffer = ctypes.create_string_buffer(size)
            needed = self._control.recorder_copy(buffer, size)
            if needed <= size:
                return buffer.raw[:needed].decode()
            size = 2 * needed

    def names(self) -> list[str]:
        """The names of all recorded calls, in order."""
        return [call.name for call in self.calls()]

    def only(self, name: str) -> Call:
        """The one recorded call of ``name``."""
        (call,) = self.calls(name)
        return call

    def forget(self) -> None:
        """Start a new record."""
        self._control.recorder_reset()

    def answer(self, name: str, code: int) -> None:
        """Let the function ``name`` answer ``code`` from now on."""
        self._control.recorder_answer(name.encode(), code)

    def block(self, name: str) -> None:
        """Let the function ``name`` block after it has been recorded."""
        self._control.recorder_block(name.encode(), 1)

    def unblock(self, name: str) -> None:
        """Let it go on."""
        self._control.recorder_block(name.encode(), 0)

    def set_unique_id(self, unique_id: bytes) -> None:
        """What flagcxGetUniqueId hands out; as many bytes as the recorder was built for."""
        self._control.recorder_set_unique_id(unique_id)

    def set_vendor(self, name: str) -> None:
        self._control.recorder_set_vendor(name.encode())

    def set_last_error(self, text: str) -> None:
        self._control.recorder_set_last_error(text.encode())

    def set_async_error(self, code: int) -> None:
        self._control.recorder_set_async_error(code)
