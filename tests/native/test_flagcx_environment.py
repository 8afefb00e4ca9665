"""Values of variables that end the process inside FlagCX, or fail there without a word, are caught before."""

from __future__ import annotations

import reprlib
from pathlib import Path

import pytest

from sglang_fl.comm.backends.flagcx import FlagCXCommunicator, FlagCXError, FlagCXLibrary, ResultCode
from sglang_fl.comm.backends.flagcx import environment as flagcx_environment
from sglang_fl.comm.backends.flagcx.environment import INTEGERS, NOT_EMPTY, check, configuration_files

from .conftest import LIMIT_S
from .recorder import Recorder

NO_FILES: tuple[Path, ...] = ()


@pytest.mark.parametrize("name", INTEGERS)
def test_an_empty_number_is_an_error_that_names_the_variable(name: str) -> None:
    with pytest.raises(FlagCXError, match=rf"{name} is set but empty \(from the environment\).*abort") as raised:
        check({name: ""}, NO_FILES)
    assert raised.value.code == ResultCode.BAD_ENVIRONMENT


# std::stoi: throws invalid_argument where no digits come first, out_of_range beyond int.
@pytest.mark.parametrize(
    "value",
    [" ", "yes", "true", "-", "+", ".5", "2147483648", "-2147483649", "x1", "9" * 5000],
    ids=reprlib.repr,
)
def test_what_stoi_throws_on_is_an_error(value: str) -> None:
    with pytest.raises(FlagCXError, match="a whole number, such as 0 or 1"):
        check({"FLAGCX_USE_HETERO_COMM": value}, NO_FILES)


@pytest.mark.parametrize(
    "value",
    ["0", "1", " 1", "+1", "-1", "1.5", "1 # on", "2147483647", "-2147483648", "\t7", "0" * 5000],
    ids=reprlib.repr,
)
def test_what_stoi_reads_is_allowed(value: str) -> None:
    check({"FLAGCX_USE_HETERO_COMM": value}, NO_FILES)


@pytest.mark.parametrize("name", NOT_EMPTY)
def test_an_empty_text_that_only_fails_later_is_an_error(name: str) -> None:
    with pytest.raises(FlagCXError, match=f"{name} is set but empty.*fails to create any communicator"):
        check({name: ""}, NO_FILES)
    check({name: "127.0.0.1:5000"}, NO_FILES)


def test_unset_and_unknown_variables_are_none_of_our_business() -> None:
    check({"FLAGCX_DEBUG": "", "FLAGCX_SOCKET_IFNAME": "", "HOME": "/"}, NO_FILES)


def test_a_configuration_file_is_read_as_flagcx_reads_it(tmp_path: Path) -> None:
    """The variable wins over the files, the first file over the second; lines are split at the first =."""
    bad, good = tmp_path / "bad.conf", tmp_path / "good.conf"
    bad.write_text("FLAGCX_DEBUG=WARN\nno separator\nFLAGCX_USE_TUNER=\n")
    good.write_text("FLAGCX_USE_TUNER=1=2\n")
    with pytest.raises(FlagCXError, match=f"FLAGCX_USE_TUNER is set but empty \\(from {bad}\\)"):
        check({}, (tmp_path / "absent.conf", bad, good))
    check({}, (good, bad))
    check({"FLAGCX_USE_TUNER": "0"}, (bad,))
    bad.write_text(" FLAGCX_USE_TUNER=\n#FLAGCX_USE_TUNER=\n")
    check({}, (bad,))


def test_a_configuration_file_that_is_no_text_is_read_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "binary.conf"
    path.write_bytes(b"\xff\xfe=\x80\nFLAGCX_USE_TUNER=\xff\n")
    with pytest.raises(FlagCXError, match="FLAGCX_USE_TUNER is "):
        check({}, (path,))


def test_flagcx_reads_the_home_of_the_user_database_and_etc() -> None:
    assert [path.name for path in configuration_files()] == [".flagcx.conf", "flagcx.conf"]


@pytest.mark.parametrize("step", ["open", "unique_id", "create"])
def test_every_step_that_lets_flagcx_read_variables_checks_them(
    step: str, recorder: Recorder, library: FlagCXLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = {
        "open": lambda: FlagCXLibrary.open(recorder.path),
        "unique_id": library.unique_id,
        "create": lambda: FlagCXCommunicator.create(library, bytes(256), 1, 0, LIMIT_S),
    }
    recorder.forget()
    monkeypatch.setenv("FLAGCX_USE_HETERO_COMM", "")
    with pytest.raises(FlagCXError) as raised:
        steps[step]()
    assert raised.value.code == ResultCode.BAD_ENVIRONMENT
    assert recorder.names() == []


def test_the_users_own_configuration_file_is_looked_at(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / ".flagcx.conf"
    path.write_text("FLAGCX_USE_HOST_COMM=on\n")
    monkeypatch.setattr(flagcx_environment, "configuration_files", lambda: (path,))
    with pytest.raises(FlagCXError, match=rf"FLAGCX_USE_HOST_COMM is 'on' \(from {path}\)"):
        FlagCXLibrary.open(recorder.path)
