"""Two nodes on one machine with real FlagCX over sockets: the self-test, and a server whose ranks are on both.

Each node is a process tree with a host name, mounts and /dev/shm of its own where this user may make them (root, or a
user namespace); else both share them, which a warning says. Node r uses GPU r, or all use the only one.
"""

from __future__ import annotations

import os
import subprocess
import warnings
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import pytest
import torch

from sglang_fl.testing.audits import VARIABLE, ProcessAudit, audit_path, inactive, settled_audits
from sglang_fl.testing.server import CPU_ENVIRONMENT, Server
from sglang_fl.testing.tiny_model import DEFAULT_PROMPTS, ModelShape, write_tiny_model
from tests.gpu.places import Places, places, run_together

pytestmark = pytest.mark.gpu

NODES = 2
NEW_TOKENS = 16
PROMPTS = DEFAULT_PROMPTS[:2]
# Width and heads of Qwen2.5-0.5B; weights that matter, and a vocabulary of its own.
SHAPE = ModelShape(layers=4, heads=14, kv_heads=2, head_dim=64)
# With two ranks a sum has one order, so bfloat16 gives the same bits whatever carries it.
ARGUMENTS = (
    "--device=cuda",
    "--dtype=bfloat16",
    "--attention-backend=triton",
    "--sampling-backend=pytorch",
    "--mem-fraction-static=0.3",
    "--cuda-graph-max-bs=2",
    "--disable-piecewise-cuda-graph",
)
_READY_LIMIT_S = 240.0
_SELF_TEST_LIMIT_S = 180.0
_SELF_TEST_OPERATIONS = "all_reduce,all_gather,reduce_scatter,broadcast,send"

# Arguments: a hosts file, the node's name, its command.
_BECOME_A_NODE = """
mount -t tmpfs tmpfs /dev/shm
mount --bind "$1" /etc/hosts
hostname "$2"
shift 2
exec "$@"
"""
_WAYS_TO_ISOLATE = (
    ("unshare", "--mount", "--uts"),
    ("unshare", "--user", "--map-root-user", "--mount", "--uts"),
)
Prefixes = tuple[list[str], list[str]]


@pytest.fixture(scope="module")
def stand() -> Places:
    """One rank a node, through the network also where each has a GPU of its own."""
    places(NODES)  # skips
    return Places(NODES, is_shared=True)


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> Prefixes:
    """What a command of each node begins with."""
    hosts_file = tmp_path_factory.mktemp("nodes") / "hosts"
    hosts_file.write_text("127.0.0.1 localhost node-0 node-1\n")
    reasons = []
    for way in _WAYS_TO_ISOLATE:
        first, second = ([*way, "sh", "-ec", _BECOME_A_NODE, "sh", str(hosts_file), f"node-{node}"] for node in (0, 1))
        try:
            done = subprocess.run([*first, "true"], capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            reasons.append(str(error))
            continue
        if done.returncode == 0:
            return first, second
        reasons.append(f"{' '.join(way)}: {done.stderr.strip()}")
    warnings.warn(f"the nodes share host name and /dev/shm: {'; '.join(reasons)}", stacklevel=1)
    return [], []


def _gpu(node: int) -> str:
    """The only one that the node's processes see."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = given.split(",") if given else [str(number) for number in range(torch.cuda.device_count())]
    return visible[node % len(visible)]


@dataclass
class ServerOnNodes(Server):
    """One ``sglang.launch_server`` whose nodes are told apart by ``prefixes`` of their commands."""

    _: KW_ONLY
    prefixes: Prefixes
    nodes: int = NODES

    def command(self, node: int = 0) -> list[str]:
        """The exact command of one node."""
        return [*self.prefixes[node], *super().command(node)]


@dataclass(frozen=True)
class Served:
    """What a server answered, and what its ranks reported afterwards."""

    tokens: list[list[int]]
    audits: list[ProcessAudit]
    problems: list[str]


def _variables(stand: Places, node: int) -> Mapping[str, str]:
    network = {name: value for name, value in stand.environment(node).items() if not name.startswith("LOCAL_")}
    return {**network, "CUDA_VISIBLE_DEVICES": _gpu(node), "SGLANG_HOST_IP": "127.0.0.1"}


def _serve(backend: str, model: Path, folder: Path, stand: Places, prefixes: Prefixes) -> Served:
    audit = folder / "audit.json"
    environment = {
        **dict.fromkeys(CPU_ENVIRONMENT),
        "SGLANG_FL_DIST_BACKEND": backend,
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",  # each node sees what the other takes of the same GPU
        VARIABLE: str(audit),
    }
    own = {node: _variables(stand, node) for node in range(NODES)}
    server = ServerOnNodes(
        model, folder, ARGUMENTS, environment, own, tp=NODES, ready_limit_s=_READY_LIMIT_S, prefixes=prefixes
    )
    with server:
        print(
            f"{backend}: ready after {server.ready_after_s:.1f} s\n{server.shell_command(0)}\n{server.shell_command(1)}"
        )
        tokens = [server.generate(prompt, NEW_TOKENS) for prompt in PROMPTS]
        audits = settled_audits(audit, server.world_size)
        problems = inactive(server, audits)
    assert all(audit_path(audit, rank).exists() for rank in range(NODES)), server.logs()[-9000:]
    return Served(tokens, audits, problems)


def test_a_server_on_both_gives_the_same_tokens_with_flagcx_as_with_torch(
    stand: Places, prefixes: Prefixes, tmp_path: Path
) -> None:
    """Given a model whose tokens depend on every reduction, when FlagCX carries it between the nodes, then the tokens
    are those of torch.distributed, are no monotone, and both ranks report FlagCX and every hook live."""
    model = write_tiny_model(tmp_path / "model", shape=SHAPE)
    by_backend = {}
    for backend in ("torch", "flagcx"):
        (tmp_path / backend).mkdir()
        by_backend[backend] = _serve(backend, model, tmp_path / backend, stand, prefixes)
    for backend, served in by_backend.items():
        assert not served.problems
        for audit in served.audits:
            (group,) = [group for group in audit.shared_groups if group.name == "tp:0"]
            assert group.backend == backend
            assert group.calls["all_reduce"] > 0
    assert by_backend["flagcx"].tokens == by_backend["torch"].tokens
    assert all(len(set(tokens)) >= NEW_TOKENS // 4 for tokens in by_backend["flagcx"].tokens)


def test_the_self_test_is_right_on_both(stand: Places, prefixes: Prefixes, tmp_path: Path) -> None:
    """Given torchrun on each node, when the self-test runs on FlagCX, then nothing is wrong on two hosts."""
    test = ["-m", "sglang_fl.comm.selftest", "--quick", "--timeout=30", "--backend=flagcx"]
    launches = [
        ([*prefixes[node], *command], {**environment, "CUDA_VISIBLE_DEVICES": _gpu(node)})
        for node, (command, environment) in enumerate(stand.torchruns([*test, f"--op={_SELF_TEST_OPERATIONS}"]))
    ]
    codes, said = run_together(launches, tmp_path, _SELF_TEST_LIMIT_S)
    assert not any(codes), said
    assert f"on 2 rank(s) of {NODES if prefixes[0] else 1} host(s)" in said
    assert "nothing wrong" in said
