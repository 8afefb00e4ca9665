"""NCCL's variable is in the environment of SGLang's schedulers before their first group, and the user's value stays."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from sglang_fl.testing.tiny_model import DEFAULT_PROMPTS, Family

from .conftest import ROOT
from .distributions import write_distribution
from .topologies import TP

pytestmark = pytest.mark.e2e

# The CPU stands for a GPU, hostcx for FlagCX over NCCL. What libraries in C see is noted before the first group.
NOTES = '''
"""Gives the CPU what belongs to NCCL, and notes the variables of each process that makes groups."""
import ctypes
import json
import os
from pathlib import Path

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_fl.comm.graph_mixing import LIBRARIES

LIBRARIES["cpu"] = LIBRARIES["cuda"]  # SGLang imports all plugins before it runs the first
NAMES = ("NCCL_GRAPH_MIXING_SUPPORT", "NCCL_NET_DISABLE_INTRA")


def load():
    HookRegistry.register(
        "sglang.srt.distributed.parallel_state.init_distributed_environment", note, HookType.BEFORE
    )


def note(*_, **__):
    library = ctypes.CDLL(None)
    library.getenv.restype = ctypes.c_char_p
    found = {name: library.getenv(name.encode()) for name in NAMES}
    text = json.dumps({name: None if value is None else value.decode() for name, value in found.items()})
    Path(os.environ["NOTES_FOLDER"], str(os.getpid())).write_text(text)
'''
CASES = [
    (None, {"NCCL_GRAPH_MIXING_SUPPORT": "0", "NCCL_NET_DISABLE_INTRA": "1"}, "set: comm.graph_mixing is auto"),
    ("1", {"NCCL_GRAPH_MIXING_SUPPORT": "1", "NCCL_NET_DISABLE_INTRA": None}, "left alone: it is '1' in the"),
]


@pytest.mark.parametrize(("own", "expected", "words"), CASES, ids=["default", "own value"])
def test_schedulers_have_it_before_their_first_group(
    own: str | None, expected: dict[str, str | None], words: str, models: Mapping[Family, Path], tmp_path: Path
) -> None:
    """Given two ranks on one host, when SGLang serves, then each had NCCL's variables before its first group, as they
    were decided or as the user had them, and said so."""
    packages = write_distribution(tmp_path / "packages", "notes", NOTES, "sglang.srt.plugins", "load")
    folder = tmp_path / "noted"
    folder.mkdir()
    variables = {
        "PYTHONPATH": str(packages),
        "NOTES_FOLDER": str(folder),
        "FLAGCX_PATH": str(ROOT / "build/hostcx"),
        "NCCL_CONF_FILE": str(tmp_path / "none"),
        "NCCL_NET_DISABLE_INTRA": None,
        "NCCL_GRAPH_MIXING_SUPPORT": own,
    }
    with TP.server(models, tmp_path, variables) as server:
        assert server.generate(DEFAULT_PROMPTS[0], 4)
        lines = [line for line in server.log().splitlines() if "layer 3, communication: NCCL_GRAPH_MIXING" in line]
    assert [json.loads(path.read_text()) for path in folder.iterdir()] == [expected] * 2
    assert len(lines) == 2 and all(words in line for line in lines), lines
