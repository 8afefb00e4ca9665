"""A chip vendor follows docs/adding_a_chip.md: the copied template in the tree and as an installed distribution."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import sglang_fl

ROOT = Path(__file__).parents[2]
DOCS = ("docs/adding_a_chip.md", "docs/adding_a_chip_zh.md")
PLACES = {"in-tree": "sglang_fl/comm/backends/vendor/acme/acme.py", "distribution": "installed/acme_comm/acme.py"}
LIMIT_S = 120.0  # against a hang
WORLD_SIZE = 2
SUMS = 12  # what a rank adds up in each case: three dtypes, four shapes
PER_OP, BACKEND = "SGLANG_FL_PER_OP", "SGLANG_FL_DIST_BACKEND"

# The chip's library. A stand-in: it adds up over processes of one machine, through files.
STAND_IN_SDK = '''
"""A stand-in for a chip's collective library: sums host memory over the ranks of one machine, through files."""
import ctypes, os, time, uuid
from pathlib import Path
import torch

calls = 0
open_communicators = 0

def unique_id():
    return uuid.uuid4().bytes

class Communicator:
    def __init__(self, unique_id, world_size, rank):
        global open_communicators
        open_communicators += 1
        self.world_size, self.rank, self.sequence = world_size, rank, 0
        self.folder = Path(os.environ["ACME_FOLDER"]) / unique_id.hex()
        self.folder.mkdir(exist_ok=True)

    def all_reduce(self, address, count, dtype):
        global calls
        calls += 1
        self.sequence += 1
        if not count:
            return
        kind = getattr(torch, dtype.removeprefix("torch."))
        memory = torch.frombuffer((ctypes.c_char * (count * kind.itemsize)).from_address(address), dtype=kind)
        files = [self.folder / "{}-{}".format(self.sequence, rank) for rank in range(self.world_size)]
        partial = self.folder / "partial-{}".format(self.rank)
        torch.save(memory.clone(), partial)
        partial.rename(files[self.rank])
        until = time.monotonic() + 30
        while not all(file.exists() for file in files):
            assert time.monotonic() < until, "a peer did not call all_reduce"
            time.sleep(0.001)
        memory.copy_(torch.stack([torch.load(file) for file in files]).sum(0).to(kind))

    def close(self):
        global open_communicators
        open_communicators -= 1
'''

# One rank: each case's environment in turn; prints what the group got and whether its sums are right.
RANK = """
import json, os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from sglang_fl.comm import CommunicatorFL
from sglang_fl.comm.agreement import agree
from sglang_fl.comm.communicator import group_context
from sglang_fl.comm.discovery import discover_backends
from sglang_fl.comm.errors import AgreementError
from sglang_fl.comm.policy import communicator_policy
from sglang_fl.config import load_settings
from sglang_fl.selection import Kind

CASES, FOLDER = json.loads(sys.argv[1]), sys.argv[2]
rank, ranks = int(os.environ["RANK"]), list(range(int(os.environ["WORLD_SIZE"])))
dist.init_process_group("gloo", init_method="file://" + FOLDER + "/rendezvous", rank=rank, world_size=len(ranks),
                        timeout=timedelta(seconds=60))
groups = [dist.new_group(ranks, backend="gloo") for _ in range(2)]

def sdk_calls():
    sdk = sys.modules.get("acme_sdk")
    return 0 if sdk is None else sdk.calls

def right(communicator):
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for shape in ((), (5,), (3, 4), (0, 2)):
            mine = torch.full(shape, float(rank + 1)).to(dtype)
            tensor = mine.clone().t() if len(shape) == 2 else mine.clone()
            assert communicator.all_reduce(tensor) is tensor
            assert torch.equal(tensor, torch.full_like(tensor, sum(r + 1 for r in ranks))), (dtype, shape, tensor)
    gathered = communicator.all_gather(torch.tensor([rank, 7]))
    assert gathered.tolist() == [value for r in ranks for value in (r, 7)]
    assert communicator.broadcast(torch.tensor([rank]), src=1).item() == 1

def outcome(variables):
    settings = load_settings({**os.environ, **variables})
    try:
        communicator = CommunicatorFL(
            cpu_group=groups[0], device_group=groups[1], device="cpu", ranks=ranks, name="test", settings=settings
        )
    except AgreementError as error:
        return {"error": str(error)}
    before = sdk_calls()
    right(communicator)
    selection = communicator.agreed.selection
    communicator.destroy()
    reasons = {entry.impl_id: entry.reason for entry in selection.passed_over}
    sdk = sys.modules.get("acme_sdk")
    left = 0 if sdk is None else sdk.open_communicators
    return {"backend": communicator.backend, "sdk": sdk_calls() - before, "left": left, "reasons": reasons}

def inside_sglang():
    settings = load_settings({**os.environ, "SGLANG_FL_PER_OP": "communicator=vendor:acme"})
    context = group_context(*groups, "cpu", ranks, "tp:0", settings, 30.0)
    agreed = agree(context, discover_backends().backends, communicator_policy(settings), frozenset({Kind.VENDOR}))
    return [agreed.backend.name, agreed.transport is not None]

found = {name: outcome(variables) for name, variables in CASES.items()}
found["inside SGLang"] = inside_sglang()
dist.barrier()
dist.destroy_process_group()
print(json.dumps(found))
"""


def _commands(document: str, place: str) -> str:
    """The block of commands that a reader of ``document`` copies."""
    text = (ROOT / document).read_text()
    found = re.search(rf"<!-- {place} -->\n```sh\n(.*?)```", text, re.DOTALL)
    assert found, f"{document} has no block marked {place}"
    return found[1]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with a copy of the package and the chip's library, into which a newcomer may write."""
    folder = tmp_path / "checkout"
    source = Path(sglang_fl.__file__).parent
    shutil.copytree(source, folder / "sglang_fl", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "acme_sdk.py").write_text(STAND_IN_SDK)
    return folder


def _follow(checkout: Path, commands: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PIP_TARGET": str(checkout / "installed")}
    done = subprocess.run(
        ["bash", "-euc", commands], cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _added(checkout: Path, place: str) -> None:
    """The template copied by the document's commands; its device type is then the stand-in's, which is the CPU's."""
    _follow(checkout, _commands(DOCS[0], place))
    file = checkout / PLACES[place]
    text = file.read_text()
    assert text.count('DEVICE_TYPE = "acme"') == 1
    file.write_text(text.replace('DEVICE_TYPE = "acme"', 'DEVICE_TYPE = "cpu"'))


def _run(checkout: Path, cases: Mapping[str, Mapping[str, str]]) -> list[dict[str, Any]]:
    """Each rank's outcome of each case; the ranks are fresh interpreters that see the checkout first."""
    (checkout / "rank.py").write_text(RANK)
    (checkout / "exchange").mkdir()
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SGLANG_", "FLAGCX_"))}
    common = {
        **clean,
        "PYTHONPATH": os.pathsep.join([str(checkout), str(checkout / "installed")]),
        "WORLD_SIZE": str(WORLD_SIZE),
        "ACME_FOLDER": str(checkout / "exchange"),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "HOSTCX_QUIET": "1",
    }
    command = [sys.executable, "rank.py", json.dumps(cases), str(checkout)]
    ranks = [
        subprocess.Popen(
            command,
            cwd=checkout,
            env={**common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD_SIZE)
    ]
    try:
        said = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for process, (output, errors) in zip(ranks, said, strict=True):
        assert process.returncode == 0, output + errors
    return [{**json.loads(output.splitlines()[-1]), "log": errors} for output, errors in said]


@pytest.mark.parametrize("place", PLACES)
def test_both_documents_give_the_same_commands(place: str) -> None:
    """Given the English and the Chinese document, then a reader of either runs the same commands."""
    assert _commands(DOCS[0], place) == _commands(DOCS[1], place)


@pytest.mark.parametrize("place", PLACES)
def test_a_copied_template_is_a_backend(place: str, checkout: Path, hostcx: Path) -> None:
    """Given the template copied as the document says, then the policies choose it, and its library does the sums."""
    _added(checkout, place)
    flagcx = {BACKEND: "auto", "FLAGCX_PATH": str(hostcx)}
    chosen: dict[str, Mapping[str, str]] = {
        "auto": {BACKEND: "auto"},
        "by name": {PER_OP: "communicator=vendor:acme|reference"},
        "by name over a backend": {PER_OP: "communicator=vendor:acme", BACKEND: "torch"},
        "strict": {PER_OP: "communicator=vendor:acme|reference", "SGLANG_FL_STRICT": "1"},
        "allowed": {BACKEND: "auto", "SGLANG_FL_ALLOW_VENDORS": "acme"},
    }
    others = {
        "torch": ("not named by the order torch", {BACKEND: "torch"}),
        "reference first": ("torch comes first", {BACKEND: "auto", "SGLANG_FL_PREFER": "reference"}),
        "reference by name": ("not named by the order reference", {PER_OP: "communicator=reference"}),
        "denied": ("vendor acme is denied", {BACKEND: "auto", "SGLANG_FL_DENY_VENDORS": "acme"}),
        "not allowed": (
            "vendor acme is not among the allowed: nvidia",
            {BACKEND: "auto", "SGLANG_FL_ALLOW_VENDORS": "cuda"},
        ),
    }
    # Last: a library that has been opened is found without a path from then on.
    with_flagcx = {"FlagCX first": flagcx, "vendors first": {**flagcx, "SGLANG_FL_PREFER": "vendor"}}
    found = _run(checkout, {**chosen, **{name: variables for name, (_, variables) in others.items()}, **with_flagcx})
    for rank in found:
        for name in [*chosen, "vendors first"]:
            assert rank[name]["backend"] == "acme", rank[name]
            assert rank[name]["sdk"] == SUMS, rank[name]
            assert rank[name]["left"] == 0, "destroy must close the library's communicator"
        for name, (reason, _) in others.items():
            assert rank[name]["backend"] == "torch", rank[name]
            assert rank[name]["sdk"] == 0
            assert reason in rank[name]["reasons"]["acme"]
        assert rank["FlagCX first"]["backend"] == "flagcx"
        assert rank["FlagCX first"]["reasons"]["acme"] == "flagcx comes first"
        assert rank["inside SGLang"] == ["acme", True], "SGLang's own methods are not the chip's"


BROKEN = {
    "everywhere": "import a_module_that_nobody_has",
    "one_rank": """
        import os
        if os.environ["RANK"] == "1":
            import a_module_that_rank_1_lacks
        from sglang_fl.comm.backends.torch_dist import TorchBackend
        from sglang_fl.selection import Kind
        def register_comm(registry):
            registry.register(TorchBackend("on_rank_0", Kind.VENDOR, vendor="onlyzero"))
        """,
    "raising": """
        from sglang_fl.comm.backends.torch_dist import TorchBackend
        from sglang_fl.selection import Kind
        class Raising(TorchBackend):
            def probe(self, context):
                return {}["the probe's mistake"] if self.name == "probe_raises" else super().probe(context)
            def create(self, context):
                raise OSError("the chip's driver is not loaded") if context.rank else RuntimeError("rank 0 neither")
        def register_comm(registry):
            registry.register(Raising("probe_raises", Kind.VENDOR, vendor="probe"))
            registry.register(Raising("create_raises", Kind.VENDOR, vendor="create"))
        """,
}


def test_a_broken_backend_costs_only_itself(checkout: Path) -> None:
    """Given backends that fail to import, to probe or to be created, on one rank or all, then good ones work on, all
    ranks choose alike, and each failure is reported with its reason."""
    _added(checkout, "in-tree")
    for name, text in BROKEN.items():
        folder = checkout / "sglang_fl/comm/backends/vendor" / name
        folder.mkdir()
        (folder / "__init__.py").touch()
        (folder / "register_comm.py").write_text(textwrap.dedent(text))
    cases = {
        "auto": {BACKEND: "auto"},
        "one rank lacks it": {PER_OP: "communicator=vendor:onlyzero|vendor:acme"},
        "one rank lacks it, strict": {PER_OP: "communicator=vendor:onlyzero|vendor:acme", "SGLANG_FL_STRICT": "1"},
        "its probe raises": {PER_OP: "communicator=vendor:probe|vendor:acme"},
        "its creation raises": {PER_OP: "communicator=vendor:create|vendor:acme"},
        "nobody has it": {PER_OP: "communicator=vendor:nobody|vendor:acme"},
        "nobody has it, strict": {PER_OP: "communicator=vendor:nobody|vendor:acme", "SGLANG_FL_STRICT": "1"},
    }
    found = _run(checkout, cases)
    lacks = "global rank 1: no backend on_rank_0 is installed"
    for rank in found:
        assert rank["auto"]["backend"] == "acme"
        assert "No module named 'a_module_that_nobody_has'" in rank["auto"]["reasons"]["everywhere"]
        assert "communication backend everywhere is left out, it did not register: " in rank["log"]
        assert rank["one rank lacks it"]["backend"] == "acme"
        assert lacks in rank["one rank lacks it"]["reasons"]["on_rank_0"]
        assert "No module named 'a_module_that_rank_1_lacks'" in rank["one rank lacks it"]["reasons"]["on_rank_0"]
        assert lacks in rank["one rank lacks it, strict"]["error"]
        probe = rank["its probe raises"]["reasons"]["probe_raises"]
        assert probe == 'all ranks: its probe raised KeyError: "the probe\'s mistake"'
        create = rank["its creation raises"]["reasons"]["create_raises"]
        assert create == "creation failed on all ranks: RuntimeError: rank 0 neither"
        assert "all ranks: no backend vendor:nobody is installed" in rank["nobody has it"]["reasons"]["vendor:nobody"]
        assert "no backend vendor:nobody is installed" in rank["nobody has it, strict"]["error"]
        assert [rank[name]["backend"] for name in ("its probe raises", "its creation raises", "nobody has it")] == [
            "acme"
        ] * 3
    assert found[0]["one rank lacks it, strict"] == found[1]["one rank lacks it, strict"]
