"""Recorders for the tests of the binding: a fresh one for each test, none left blocked."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_fl.comm.backends.flagcx import FlagCXCommunicator, FlagCXLibrary

from .recorder import Recorder, build

MakeRecorder = Callable[..., Recorder]
LIMIT_S = 30.0  # generous: nothing in these tests takes that long


@pytest.fixture(scope="session")
def recorder_builds(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Builds each variant once a session."""
    built: dict[tuple[object, ...], Path] = {}

    def get(form: int = 14, id_bytes: int = 256, hidden: tuple[str, ...] = ()) -> Path:
        key = (form, id_bytes, hidden)
        if key not in built:
            built[key] = build(tmp_path_factory.mktemp("recorder") / "libflagcx.so", form, id_bytes, hidden)
        return built[key]

    return get


@pytest.fixture
def make_recorder(recorder_builds: Callable[..., Path], tmp_path: Path) -> Iterator[MakeRecorder]:
    """A copy of its own for each test: the loader keeps one state per file."""
    made: list[Recorder] = []

    def make(form: int = 14, id_bytes: int = 256, hidden: tuple[str, ...] = ()) -> Recorder:
        path = tmp_path / f"libflagcx-{len(made)}.so"
        shutil.copy(recorder_builds(form, id_bytes, hidden), path)
        made.append(Recorder(path))
        return made[-1]

    yield make
    for recorder in made:
        for name in set(recorder.names()):
            recorder.unblock(name)


@pytest.fixture
def recorder(make_recorder: MakeRecorder) -> Recorder:
    """A recorder in the form of FlagCX's head."""
    return make_recorder()


@pytest.fixture
def library(recorder: Recorder) -> FlagCXLibrary:
    """The recorder, opened."""
    return FlagCXLibrary.open(recorder.path)


@pytest.fixture
def communicator(library: FlagCXLibrary) -> Iterator[FlagCXCommunicator]:
    """Rank 1 of 2 on the recorder."""
    made = FlagCXCommunicator.create(library, library.unique_id(), 2, 1, LIMIT_S)
    yield made
    if made.is_open:
        made.close()
