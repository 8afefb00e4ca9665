"""Where libflagcx lies, and whether the file found can be loaded at all, in words that dlopen does not have."""

from __future__ import annotations

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
        FlagCXError: NOT_FOUND with the paths tried, WRONG_FILE with what the file is.
    """
    if not flagcx_path:
        return FILE_NAME
    given = Path(flagcx_path)
    if not given.exists():
        raise FlagCXError(
            ResultCode.NOT_FOUND, "open FlagCX", f"FLAGCX_PATH is {flagcx_path}, which does not exist. {ALLOWED}"
        )
    path = _in_folder(given) if given.is_dir() else given
    check_file(path)
    return str(path.absolute())


def _in_folder(folder: Path) -> Path:
    tried = [folder / place / FILE_NAME for place in PLACES]
    for path in tried:
        if path.exists():
            return path
    raise FlagCXError(
        ResultCode.NOT_FOUND,
        "open FlagCX",
        f"FLAGCX_PATH is the folder {folder}, which has no library; tried {', '.join(map(str, tried))}. {ALLOWED}",
    )


def check_file(path: Path) -> None:
    """Raise unless ``path`` is an ELF shared object for this process's architecture.

    Raises:
        FlagCXError: WRONG_FILE.
    """
    if not path.is_file():
        raise _wrong_file(path, "it is not a regular file")
    try:
        with path.open("rb") as file:
            header = file.read(20)
    except OSError as error:
        raise _wrong_file(path, f"it cannot be read: {error.strerror}") from error
    found = architecture_of(header)
    if found is None:
        raise _wrong_file(path, f"it is no ELF file, it begins with {header[:16]!r}")
    if not found.is_shared_object:
        raise _wrong_file(path, "it is an ELF file but not a shared object")
    with Path("/proc/self/exe").open("rb") as file:
        own = architecture_of(file.read(20))
    if own is not None and (own.bits, own.machine) != (found.bits, found.machine):
        raise _wrong_file(path, f"it was built for {found}, this process is {own}; build FlagCX on this machine")


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


def _wrong_file(path: Path, found: str) -> FlagCXError:
    return FlagCXError(ResultCode.WRONG_FILE, "open FlagCX", f"{path}: {found}. {ALLOWED}")
