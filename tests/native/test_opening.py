"""Which library is opened, and a clear error for everything that is none."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_fl.comm.backends.flagcx import FlagCXError, FlagCXLibrary, ResultCode
from sglang_fl.comm.backends.flagcx.locate import PLACES

from .conftest import LIMIT_S, MakeRecorder
from .recorder import Recorder

ALLOWED = "FLAGCX_PATH may name a folder that holds build/lib/libflagcx.so, lib/libflagcx.so, lib64/libflagcx.so"


def opening_error(path: Path | str) -> FlagCXError:
    with pytest.raises(FlagCXError) as raised:
        FlagCXLibrary.open(path)
    return raised.value


def install(recorder: Recorder, folder: Path, place: str) -> Path:
    target = folder / place / "libflagcx.so"
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(recorder.path, target)
    return target


@pytest.mark.parametrize("place", PLACES)
def test_a_folder_is_searched_in_each_place(place: str, recorder: Recorder, tmp_path: Path) -> None:
    target = install(recorder, tmp_path / "flagcx", place)
    assert FlagCXLibrary.open(tmp_path / "flagcx").path == str(target)


def test_the_places_have_an_order(recorder: Recorder, tmp_path: Path) -> None:
    """A built checkout comes before what was installed into it."""
    for place in reversed(PLACES):
        target = install(recorder, tmp_path / "flagcx", place)
        assert FlagCXLibrary.open(tmp_path / "flagcx").path == str(target)


def test_a_path_to_the_file_is_taken(recorder: Recorder) -> None:
    assert FlagCXLibrary.open(str(recorder.path)).path == str(recorder.path)


def test_the_environment_is_read_where_no_path_is_given(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAGCX_PATH", str(recorder.path))
    assert FlagCXLibrary.open().path == str(recorder.path)


@pytest.mark.parametrize("flagcx_path", [None, ""])
def test_unset_and_empty_mean_the_loaders_search_path(
    flagcx_path: str | None, recorder: Recorder, tmp_path: Path
) -> None:
    """In a process of its own, since the loader reads LD_LIBRARY_PATH when a process starts."""
    target = install(recorder, tmp_path, "search")
    environment = {name: value for name, value in os.environ.items() if name != "FLAGCX_PATH"}
    environment["LD_LIBRARY_PATH"] = str(target.parent)
    if flagcx_path is not None:
        environment["FLAGCX_PATH"] = flagcx_path
    program = "from sglang_fl.comm.backends.flagcx import FlagCXLibrary; print(FlagCXLibrary.open().path)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert done.stdout.strip() == str(target)


def test_nothing_on_the_loaders_search_path_is_an_error_that_says_so() -> None:
    error = opening_error("")
    assert error.code == ResultCode.NOT_LOADED
    assert "libflagcx.so: cannot open shared object file" in str(error)
    assert "from the loader's search path, since FLAGCX_PATH is not set" in str(error)
    assert ALLOWED in str(error)


def test_a_missing_path(tmp_path: Path) -> None:
    error = opening_error(tmp_path / "nowhere")
    assert error.code == ResultCode.NOT_FOUND
    assert f"FLAGCX_PATH is {tmp_path}/nowhere, which does not exist. {ALLOWED}" in str(error)


def test_a_folder_without_a_library_lists_what_was_tried(tmp_path: Path) -> None:
    error = opening_error(tmp_path)
    assert error.code == ResultCode.NOT_FOUND
    tried = ", ".join(f"{tmp_path}/{place}/libflagcx.so" for place in PLACES)
    assert f"FLAGCX_PATH is the folder {tmp_path}, which has no library; tried {tried}. {ALLOWED}" in str(error)


def write_text(path: Path, recorder: Recorder) -> str:
    path.write_text("INPUT(-lflagcx)  # a linker script, for example\n")
    return r"it is no ELF file, it begins with b'INPUT\(-lflagcx\)"


def write_nothing(path: Path, recorder: Recorder) -> str:
    path.touch()
    return "it is no ELF file, it begins with b''"


def write_other_architecture(path: Path, recorder: Recorder) -> str:
    content = bytearray(recorder.path.read_bytes())
    content[18:20] = (243).to_bytes(2, "little")
    path.write_bytes(content)
    return r"it was built for 64-bit RISC-V, this process is 64-bit \S+; build FlagCX on this machine"


def write_32_bit(path: Path, recorder: Recorder) -> str:
    content = bytearray(recorder.path.read_bytes())
    content[4] = 1
    path.write_bytes(content)
    return "it was built for 32-bit"


def write_object_file(path: Path, recorder: Recorder) -> str:
    subprocess.run(["cc", "-c", "-x", "c", "-o", path, os.devnull], check=True)
    return "it is an ELF file but not a shared object"


def write_pipe(path: Path, recorder: Recorder) -> str:
    os.mkfifo(path)
    return "it is not a regular file"


def write_symbolic_link_to_nothing(path: Path, recorder: Recorder) -> str:
    path.symlink_to(path.parent / "gone")
    return "which does not exist"


WRONG_FILES = [
    write_text,
    write_nothing,
    write_other_architecture,
    write_32_bit,
    write_object_file,
    write_pipe,
    write_symbolic_link_to_nothing,
]


@pytest.mark.parametrize("write", WRONG_FILES)
def test_a_file_that_is_no_library_for_this_process(
    write: Callable[[Path, Recorder], str], recorder: Recorder, tmp_path: Path
) -> None:
    path = tmp_path / "wrong.so"
    expected = write(path, recorder)
    error = opening_error(path)
    assert error.code in (ResultCode.WRONG_FILE, ResultCode.NOT_FOUND)
    assert re.search(rf"{re.escape(str(path))}.*{expected}", str(error))
    assert ALLOWED in str(error)


@pytest.mark.parametrize("size", [20, 63, 64, 200, 1000, 4096, -100])
def test_a_file_that_is_cut_off_does_not_reach_the_loader(size: int, recorder: Recorder, tmp_path: Path) -> None:
    """dlopen maps what the header promises and dies of SIGBUS where the file ends before: a broken-off copy."""
    path = tmp_path / "cut.so"
    whole = recorder.path.read_bytes()
    end = loaded_end(path, whole) + size if size < 0 else size
    path.write_bytes(whole[:end])
    error = opening_error(path)
    assert error.code == ResultCode.WRONG_FILE
    assert f"{path}: it is cut off: it has {end} bytes, its header says" in str(error)


def loaded_end(path: Path, content: bytes) -> int:
    """Where the last loaded segment ends, as binutils read it."""
    path.write_bytes(content)
    lines = subprocess.run(["readelf", "-lW", path], capture_output=True, text=True, check=True).stdout.splitlines()
    loads = [line.split() for line in lines if line.lstrip().startswith("LOAD")]
    return max(int(words[1], 16) + int(words[4], 16) for words in loads)


@pytest.mark.parametrize("name", ["a" * 300, "a/" * 3000, "nul\0byte"], ids=["long name", "long path", "nul"])
def test_a_path_that_no_system_call_takes(name: str, tmp_path: Path) -> None:
    error = opening_error(f"{tmp_path}/{name}")
    assert error.code == ResultCode.NOT_FOUND
    assert ALLOWED in str(error)


@pytest.mark.parametrize("table", [2**64 - 1, 2**63, 2**63 - 1, 2**40])
def test_a_header_that_places_its_table_beyond_all_files(table: int, recorder: Recorder, tmp_path: Path) -> None:
    path = tmp_path / "absurd.so"
    content = bytearray(recorder.path.read_bytes())
    content[32:40] = table.to_bytes(8, "little")  # e_phoff
    path.write_bytes(content)
    error = opening_error(path)
    assert error.code == ResultCode.WRONG_FILE
    assert f"{path}: it is cut off: it has {len(content)} bytes, its header says" in str(error)


def test_no_free_file_descriptor_is_said_as_that(recorder: Recorder) -> None:
    """In a process of its own that uses all its descriptors up."""
    program = f"""
import os, resource
from sglang_fl.comm.backends.flagcx import FlagCXError
from sglang_fl.comm.backends.flagcx.locate import find
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
try:
    while True:
        os.dup(0)
except OSError:
    pass
for free in range(3):
    try:
        find({str(recorder.path)!r})
        print("found")
    except FlagCXError as error:
        print(error)
    os.close(63 - free)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "NO_FILE_DESCRIPTOR" in lines[0]
    assert f"{recorder.path}: EMFILE, Too many open files" in lines[0]
    assert "ulimit -n" in lines[0]
    assert lines[1:] == ["found", "found"]


def test_a_library_that_cannot_be_linked_is_the_loaders_error(tmp_path: Path) -> None:
    path = tmp_path / "unresolved.so"
    source = "int absent_function(void); int flagcxGetUniqueId(void) { return absent_function(); }"
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-o", path, "-"], input=source, text=True, check=True)
    error = opening_error(path)
    assert error.code == ResultCode.NOT_LOADED
    assert "undefined symbol: absent_function" in str(error)


@pytest.mark.parametrize(
    ("form", "hidden", "named"),
    [
        (14, ("flagcxGetUniqueId",), "lacks flagcxGetUniqueId;"),
        (14, ("flagcxCommInitRank", "flagcxCommDestroy"), "lacks flagcxCommInitRank, flagcxCommDestroy;"),
        (7, ("flagcxHandleInit",), "lacks flagcxDeviceHandleInit and flagcxDeviceHandleFree (or the older"),
    ],
)
def test_a_library_that_lacks_what_no_communicator_can_do_without(
    form: int, hidden: tuple[str, ...], named: str, make_recorder: MakeRecorder
) -> None:
    path = make_recorder(form, hidden=hidden).path
    error = opening_error(path)
    assert error.code == ResultCode.MISSING_SYMBOL
    assert f"{path} (from FLAGCX_PATH={path}) {named}" in str(error)


def test_some_other_shared_library(tmp_path: Path) -> None:
    path = tmp_path / "other.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-o", path, os.devnull], check=True)
    error = opening_error(path)
    assert error.code == ResultCode.MISSING_SYMBOL
    assert "it is no FlagCX of release 0.7 or later" in str(error)


def test_a_library_whose_start_fails_says_what_it_answered(recorder: Recorder) -> None:
    recorder.answer("flagcxDeviceHandleInit", 2)
    error = opening_error(recorder.path)
    assert (error.code, error.name) == (ResultCode.SYSTEM_ERROR, "flagcxSystemError")
    assert str(recorder.path) in str(error)
