"""Where libflagcx lies, and whether the file found can be loaded at all, in words that dlopen does not have."""

from __future__ import annotations

import errno
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from sglang_fl.comm.backends.flagcx.errors import FlagCXError, ResultCode

FILE_NAME = "libflagcx.so"
# Below FLAGCX_PATH: a built checkout first, then installations.
PLACES = ("build/lib", "lib", "lib64")
ALLOWED = (
    f"FLAGCX_PATH may name a folder that holds {', '.join(f'{place}/{FILE_NAME}' for place in PLACES)}, "
    "or the library file itself; unset it to use the loader's search path"
)

# e_machine of the ELF header, for the machines that run FlagCX.
MACHINES = {3: "x86", 40: "Arm", 62: "x86-64", 183: "AArch64", 243: "RISC-V", 258: "LoongArch"}
CLASSES = {1: "32-bit", 2: "64-bit"}
_ELF_SHARED_OBJECT = 3
_ELF_64_BIT = 2
_PT_LOAD = 1
_PROGRAM_HEADER_BYTES = 56
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)


@dataclass(frozen=True)
class Architecture:
    """What an ELF header says the file is for."""

    bits: str
    machine: str
    is_shared_object: bool

    def __str__(self) -> str:
        return f"{self.bits} {self.machine}"


def find(flagcx_path: str) -> str:
    """What to hand to dlopen: an absolute path, or the bare file name for the loader to search.

    Args:
        flagcx_path: the value of FLAGCX_PATH; empty counts as unset.

    Raises:
        FlagCXError: NOT_FOUND with the paths tried, WRONG_FILE with what the file is, NO_FILE_DESCRIPTOR.
    """
    if not flagcx_path:
        return FILE_NAME
    given = Path(flagcx_path)
    absent = _why_absent(given)
    if absent:
        raise FlagCXError(ResultCode.NOT_FOUND, "open FlagCX", f"FLAGCX_PATH is {flagcx_path}, {absent}. {ALLOWED}")
    path = _in_folder(given) if given.is_dir() else given
    check_file(path)
    return str(path.absolute())


def _why_absent(path: Path) -> str:
    """Empty if something is there; Path.exists raises on a name that is too long."""
    try:
        path.stat()
    except FileNotFoundError:
        return "which does not exist"
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        return f"which names no file: {error}"
    return ""


def _in_folder(folder: Path) -> Path:
    tried = [folder / place / FILE_NAME for place in PLACES]
    for path in tried:
        if not _why_absent(path):
            return path
    raise FlagCXError(
        ResultCode.NOT_FOUND,
        "open FlagCX",
        f"FLAGCX_PATH is the folder {folder}, which has no library; tried {', '.join(map(str, tried))}. {ALLOWED}",
    )


def check_file(path: Path) -> None:
    """Raise unless ``path`` is an ELF shared object for this process's architecture.

    Raises:
        FlagCXError: WRONG_FILE, NO_FILE_DESCRIPTOR.
    """
    if not path.is_file():
        raise _wrong_file(path, "it is not a regular file")
    try:
        _check_content(path)
    except OSError as error:
        if error.errno in _NO_DESCRIPTOR:
            details = f"{path}: {errno.errorcode[error.errno]}, {error.strerror}"
            raise FlagCXError(ResultCode.NO_FILE_DESCRIPTOR, "open FlagCX", details) from error
        raise _wrong_file(path, f"it cannot be read: {error.strerror}") from error


def _check_content(path: Path) -> None:
    with path.open("rb") as file:
        header = file.read(20)
    found = architecture_of(header)
    if found is None:
        raise _wrong_file(path, f"it is no ELF file, it begins with {header[:16]!r}")
    if not found.is_shared_object:
        raise _wrong_file(path, "it is an ELF file but not a shared object")
    with Path("/proc/self/exe").open("rb") as file:
        own = architecture_of(file.read(20))
    if own is not None and (own.bits, own.machine) != (found.bits, found.machine):
        raise _wrong_file(path, f"it was built for {found}, this process is {own}; build FlagCX on this machine")
    needed, present = _bytes_to_load(path), path.stat().st_size
    if needed > present:
        raise _wrong_file(
            path, f"it is cut off: it has {present} bytes, its header says {needed} or more; copy it again"
        )


def architecture_of(header: bytes) -> Architecture | None:
    """Read the first 20 bytes of a file (ELF specification, e_ident, e_type, e_machine); None if it is no ELF."""
    if len(header) < 20 or header[:4] != b"\x7fELF":
        return None
    order = ">" if header[5] == 2 else "<"
    kind, machine = struct.unpack_from(f"{order}HH", header, 16)
    return Architecture(
        bits=CLASSES.get(header[4], f"class {header[4]}"),
        machine=MACHINES.get(machine, f"machine {machine}") + (", big-endian" if order == ">" else ""),
        is_shared_object=kind == _ELF_SHARED_OBJECT,
    )


def _bytes_to_load(path: Path) -> int:
    """How long the file must be for the loader, which a shorter one would kill with SIGBUS.

    From the 64-bit program header table (ELF specification); 0, no statement, for a 32-bit file.
    """
    with path.open("rb") as file:
        present = os.fstat(file.fileno()).st_size
        header = file.read(64)
        if len(header) < 64 or header[4] != _ELF_64_BIT:
            return 64 if header[4] == _ELF_64_BIT else 0
        order = ">" if header[5] == 2 else "<"
        (table,) = struct.unpack_from(f"{order}Q", header, 32)
        entry_bytes, entries = struct.unpack_from(f"{order}HH", header, 54)
        needed: int = table + entry_bytes * entries
        if needed > present:
            return needed
        file.seek(table)
        content = file.read(entry_bytes * entries)
    for start in range(0, len(content) - _PROGRAM_HEADER_BYTES + 1, max(entry_bytes, _PROGRAM_HEADER_BYTES)):
        (kind,) = struct.unpack_from(f"{order}I", content, start)
        offset, _, _, size = struct.unpack_from(f"{order}QQQQ", content, start + 8)
        if kind == _PT_LOAD:
            needed = max(needed, offset + size)
    return needed


def _wrong_file(path: Path, found: str) -> FlagCXError:
    return FlagCXError(ResultCode.WRONG_FILE, "open FlagCX", f"{path}: {found}. {ALLOWED}")
