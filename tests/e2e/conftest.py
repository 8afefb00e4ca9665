"""Models, answers of SGLang without the plugin, and an environment without settings; each is made once a session."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from filelock import FileLock

from sglang_fl.config.fields import FIELD_BY_VARIABLE
from sglang_fl.testing.tiny_model import Family, write_tiny_model

from .topologies import CONTROL, Answers, Topology, ask

Control = Callable[[Topology], Answers]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session", autouse=True)
def _no_settings() -> Iterator[None]:
    """A developer's own settings must not decide a test."""
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ:
            if name.startswith("SGLANG_") or name in FIELD_BY_VARIABLE:
                patch.delenv(name)
        yield


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[Family, Path]:
    """A folder per family."""
    folder = tmp_path_factory.mktemp("models")
    return {family: write_tiny_model(folder / family.value, family) for family in Family}


@pytest.fixture(scope="session")
def control(models: Mapping[Family, Path], tmp_path_factory: pytest.TempPathFactory) -> Control:
    """What SGLang without the plugin answers at given sizes; each server runs once, also for several test processes."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def answers(topology: Topology) -> Answers:
        kept = shared / f"control-{topology.name}.pickle"
        with FileLock(kept.with_suffix(".lock")):
            if not kept.exists():
                with topology.server(models, tmp_path_factory.mktemp("control"), CONTROL) as server:
                    found = ask(server)
                assert "[sglang_fl]" not in server.logs(), "SGLANG_PLUGINS=__none__ must leave SGLang as it is"
                kept.write_bytes(pickle.dumps(found))
            known: Answers = pickle.loads(kept.read_bytes())
        return known

    return answers
