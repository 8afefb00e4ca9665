"""hostcx as a file and as memory: what it exports and needs, how strangers meet in it, what it takes and leaves.

Its functions are walked by the C driver (``make sanitize``) and by the conformance matrix. Run as a script,
this file is one rank of those tests: nothing but ctypes, so that its memory is that of the library.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "csrc" / "hostcx"
HEADERS = (ROOT / "csrc" / "include" / "flagcx_api.h", SOURCES / "hostcx.h")
LIMIT_S = 120.0  # liveness only
MEBIBYTE = 1 << 20
FLOAT32, SUM, ID_BYTES = 7, 0, 256
SEALS = 0x1 | 0x2 | 0x4  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW
F_GET_SEALS = 1034


def make(directory: Path) -> list[str]:
    """The lines that ``make`` prints for this output directory."""
    command = ["make", "--no-print-directory", "-C", str(SOURCES), f"OUT={directory}"]
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS")}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S, env=environment)
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def directory() -> Path:
    return Path(make(ROOT / "build" / "hostcx")[-1])


@pytest.fixture(scope="module")
def library(directory: Path) -> Path:
    return directory / "lib" / "libflagcx.so"


def tool(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S).stdout


def start(library: Path, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    """One rank in a process that shares nothing with the others but its standard input and output."""
    return subprocess.Popen(
        [sys.executable, "-I", __file__, str(library), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PATH": os.environ["PATH"], **environment},
    )


def run_pair(library: Path, task: str, *arguments: object, **environment: str) -> list[tuple[list[str], str]]:
    """Rank 0 makes the id and prints it, rank 1 reads it; the further output and the errors of both."""
    ranks = [start(library, task, rank, *arguments, **environment) for rank in (0, 1)]
    assert ranks[0].stdout is not None
    unique_id = ranks[0].stdout.readline()
    assert unique_id.strip(), ranks[0].communicate(timeout=LIMIT_S)[1]
    outputs = [ranks[1].communicate(unique_id, timeout=LIMIT_S), ranks[0].communicate(timeout=LIMIT_S)]
    for process, (_, errors) in zip(reversed(ranks), outputs, strict=True):
        assert process.returncode == 0, errors
    return [(output.splitlines(), errors) for output, errors in reversed(outputs)]


def test_make_prints_the_directory_last_and_does_nothing_twice(directory: Path) -> None:
    """Given a built library, when it is made again, then only its directory is printed."""
    assert make(directory) == [str(directory)]
    for name in ("lib/libflagcx.so", "include/flagcx_api.h", "include/hostcx.h"):
        assert (directory / name).is_file(), name


def test_it_exports_exactly_what_its_headers_declare(library: Path) -> None:
    """Given the headers, when the library's symbols are listed, then none is missing and none is added."""
    text = "".join(header.read_text() for header in HEADERS)
    text = re.sub(r"#ifdef FLAGCX_API_LEGACY.*?#else", "", text, flags=re.DOTALL)
    declared = set(re.findall(r"^FLAGCX_API [^;(]*?(\w+)\(", text, flags=re.MULTILINE))
    lines = tool("nm", "--dynamic", "--defined-only", str(library)).splitlines()
    assert {line.split()[-1] for line in lines} == declared
    assert len(declared) > 50


def test_it_needs_the_c_library_and_nothing_else(library: Path) -> None:
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", tool("readelf", "--dynamic", str(library))))
    assert needed <= {"libc.so.6", "libpthread.so.0", f"ld-linux-{os.uname().machine.replace('_', '-')}.so.2"}, needed


def test_strangers_meet_by_the_id_alone(library: Path) -> None:
    """Given two processes that share only the id, when they reduce, then both have the sum and counted their calls."""
    for output, _ in run_pair(library, "sum"):
        assert output == ["3.0", "flagcxAllReduce 1"]


@pytest.mark.parametrize(("environment", "lines"), [({}, 1), ({"HOSTCX_QUIET": "1"}, 0), ({"HOSTCX_QUIET": ""}, 1)])
def test_it_says_once_what_it_is_for(library: Path, environment: dict[str, str], lines: int) -> None:
    for _, errors in run_pair(library, "sum", **environment):
        assert errors.count("for tests and development") == lines


def test_a_message_of_one_gibibyte_takes_less_than_64_mebibytes_more(library: Path) -> None:
    """Given 1 GiB on each rank, when it is reduced, then the peaks of both ranks, shared pages in them, grow little."""
    outputs = [output for output, _ in run_pair(library, "large", 1024)]
    extra_kib = sum(int(output[0]) for output in outputs)
    assert all(output[1] == "right" for output in outputs)
    assert 0 < extra_kib < 64 * 1024, f"{extra_kib / 1024:.1f} MiB more"


def test_the_memory_is_its_owners_alone_has_no_name_and_keeps_its_size(library: Path) -> None:
    """Given an id that nobody has joined yet, when its memory is looked at, then it is a sealed memfd of mode 600."""
    process = start(library, "hold")
    assert process.stdout is not None
    try:
        target, mode, seals = process.stdout.readline().split()
    finally:
        process.communicate("\n", timeout=LIMIT_S)
    assert target.startswith("/memfd:")
    assert stat.filemode(int(mode)) == "-rw-------"
    assert int(seals) & SEALS == SEALS


class Library:
    """The few calls that a rank of these tests makes."""

    def __init__(self, path: str) -> None:
        self.calls = ctypes.CDLL(path)
        self.calls.flagcxGetLastError.restype = ctypes.c_char_p
        self.calls.hostcxCallCountOf.restype = ctypes.c_uint64
        # Sync, memcpy, ...: entry 12 of the device handle boxes a raw stream.
        handle = ctypes.POINTER(ctypes.c_void_p)()
        self.check(self.calls.flagcxDeviceHandleInit(ctypes.byref(handle)))
        self.stream = ctypes.c_void_p()
        copy = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(handle[12])
        self.check(copy(ctypes.addressof(self.stream), None))
        self.communicator = ctypes.c_void_p()

    def check(self, code: int) -> None:
        if code != 0:
            sys.exit(f"code {code}: {self.calls.flagcxGetLastError(None).decode()}")

    def unique_id(self) -> bytes:
        unique_id = ctypes.create_string_buffer(ID_BYTES)
        self.check(self.calls.flagcxGetUniqueId(unique_id))
        return unique_id.raw

    def meet(self, rank: int) -> None:
        """Rank 0 prints the id as hexadecimal digits, rank 1 reads it."""
        if rank == 0:
            unique_id = self.unique_id()
            print(unique_id.hex(), flush=True)
        else:
            unique_id = bytes.fromhex(sys.stdin.readline())
        buffer = ctypes.create_string_buffer(unique_id, ID_BYTES)
        self.check(self.calls.flagcxCommInitRank(ctypes.byref(self.communicator), 2, buffer, rank))

    def all_reduce(self, address: int, count: int) -> None:
        buffer = ctypes.c_void_p(address)
        code = self.calls.flagcxAllReduce(
            buffer, buffer, ctypes.c_size_t(count), FLOAT32, SUM, self.communicator, self.stream
        )
        self.check(code)

    def destroy(self) -> None:
        self.check(self.calls.flagcxCommDestroy(self.communicator))


def sum_one_number(library: Library, rank: int) -> None:
    value = ctypes.c_float(rank + 1)
    library.meet(rank)
    library.all_reduce(ctypes.addressof(value), 1)
    library.destroy()
    print(value.value)
    print("flagcxAllReduce", library.calls.hostcxCallCountOf(b"flagcxAllReduce"))


def peak_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1])  # type: ignore[index]


def reduce_much(library: Library, rank: int, mebibytes: int) -> None:
    """Prints by how many KiB the peak grew, and whether a sample of the sums is right."""
    size = mebibytes * MEBIBYTE
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    numbers = (ctypes.c_float * (size // 4)).from_buffer(memory)
    block = (ctypes.c_float * (MEBIBYTE // 4))(*[rank + 1.0] * (MEBIBYTE // 4))
    for start_of_block in range(0, size, MEBIBYTE):
        ctypes.memmove(ctypes.addressof(numbers) + start_of_block, block, MEBIBYTE)
    library.meet(rank)
    before = peak_kib()
    library.all_reduce(ctypes.addressof(numbers), size // 4)
    print(peak_kib() - before)
    library.destroy()
    print("right" if all(numbers[i] == 3.0 for i in range(0, size // 4, 9973)) else "wrong")


def hold(library: Library) -> None:
    """Prints what the memory of a fresh id is, and keeps it until a line comes."""
    import fcntl

    library.unique_id()
    for entry in Path("/proc/self/fd").iterdir():
        if entry.is_symlink() and "memfd:" in str(entry.readlink()):
            seals = fcntl.fcntl(os.open(entry, os.O_RDONLY), F_GET_SEALS)
            print(str(entry.readlink()).split()[0], entry.stat().st_mode, seals, flush=True)
            break
    sys.stdin.readline()


def run_rank(path: str, task: str, *arguments: str) -> None:
    library = Library(path)
    tasks = {"sum": sum_one_number, "large": reduce_much, "hold": hold}
    tasks[task](library, *map(int, arguments))


if __name__ == "__main__":
    run_rank(*sys.argv[1:])
