"""Layer 2 in the real SGLang: the documents' examples give SGLang's own tokens and exactly the promised lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from sglang_fl.testing.server import Environment, ServerError
from sglang_fl.testing.tiny_model import DEFAULT_PROMPTS, Family

from .conftest import Control
from .distributions import write_distribution
from .scripts import run_script
from .topologies import ONE, QWEN3, QWEN3_MOE_TP, Answers, Topology, ask

pytestmark = pytest.mark.e2e

REFERENCE = "reference(reference)"
DENSE = frozenset({"RMSNorm", "RotaryEmbedding", "SiluAndMul"})


@dataclass(frozen=True)
class Example:
    """A configuration and what it promises.

    Attributes:
        topology: the server's sizes and model.
        classes: the operator classes that the dispatch log names, and no other.
        environment: variables.
        yaml: the configuration file; "" for none.
    """

    topology: Topology
    classes: frozenset[str]
    environment: Environment = field(default_factory=dict)
    yaml: str = ""


EXAMPLES = {
    "yaml-blacklist": Example(
        ONE, DENSE - {"RotaryEmbedding"}, yaml="prefer: reference\noot_blacklist:\n  - RotaryEmbedding\n"
    ),
    "environment-over-yaml": Example(
        QWEN3,
        DENSE,
        {"SGLANG_FL_PREFER": "reference", "SGLANG_FL_OOT_WHITELIST": "RMSNorm,SiluAndMul,RotaryEmbedding"},
        "prefer: flagos\n",
    ),
    "experts-on-two-ranks": Example(
        QWEN3_MOE_TP,
        frozenset({"RMSNorm", "RotaryEmbedding", "TopK", "UnquantizedFusedMoEMethod"}),
        {"SGLANG_FL_PREFER": "reference"},
    ),
}


def unique(path: Path) -> list[str]:
    """What ``sort -u`` prints."""
    return sorted(set(path.read_text().splitlines()))


def lines(**chosen: str) -> list[str]:
    """The dispatch log's lines for these classes."""
    return sorted(f"[OOT-DISPATCH] {name} → {choice}" for name, choice in chosen.items())


@dataclass(frozen=True)
class Served:
    """What a server answered and wrote: ``logprobs`` are those of a prompt's greedy tokens."""

    answers: Answers
    logprobs: tuple[float, ...]
    log: str
    dispatched: list[list[str]]


Serve = Callable[[str], Served]


def serve(topology: Topology, environment: Environment, models: Mapping[Family, Path], folder: Path) -> Served:
    """Run a server, ask it, and read the dispatch log of each rank."""
    path = folder / "dispatch.log"
    with topology.server(models, folder, {**environment, "SGLANG_FL_DISPATCH_LOG": str(path)}) as server:
        answers = ask(server)
        sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        request = {"text": DEFAULT_PROMPTS[0], "sampling_params": sampling, "return_logprob": True}
        reply = server.post("/generate", request)
        log = server.log()
    paths = [path, *(folder / f"{path.name}.rank{rank}" for rank in range(1, server.world_size))]
    assert sorted(folder.glob("dispatch.log*")) == sorted(paths)
    logprobs = tuple(entry[0] for entry in reply["meta_info"]["output_token_logprobs"])
    return Served(answers, logprobs, log, [unique(each) for each in paths])


@pytest.fixture(scope="module")
def example(models: Mapping[Family, Path], tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Serves an example; each once."""

    @cache
    def served(name: str) -> Served:
        chosen, folder = EXAMPLES[name], tmp_path_factory.mktemp(name)
        environment = dict(chosen.environment)
        if chosen.yaml:
            config = folder / "my_config.yaml"
            config.write_text(chosen.yaml)
            environment["SGLANG_FL_CONFIG"] = str(config)
        return serve(chosen.topology, environment, models, folder)

    return served


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_keeps_the_tokens_and_writes_the_promised_lines(name: str, example: Serve, control: Control) -> None:
    """Given an example of the documents, when served, then SGLang's tokens come, and each rank's log is as promised."""
    served, promised = example(name), EXAMPLES[name]
    assert served.answers == control(promised.topology)
    wanted = lines(**dict.fromkeys(promised.classes, REFERENCE))
    assert served.dispatched == [wanted] * promised.topology.tp
    for cls in promised.classes:
        assert served.log.count(f"[sglang_fl] {cls}: ") == 1, "one line for a class, of rank 0"
    assert "layer 2, fused operators: on: order reference, flagos, vendor" in served.log


# A vendor by the public recipe: its silu_and_mul is one per cent off. Another whose every call fails.
PLANTED = """
import functools

import torch
import torch.nn.functional as F

from sglang_fl.dispatch.backends import Backend
from sglang_fl.dispatch.types import BackendImplKind, BackendPriority, OpImpl


class PlantedBackend(Backend):
    @property
    def name(self) -> str:
        return "planted"

    def is_available(self) -> bool:
        return True

    def silu_and_mul(self, obj, x):
        d = x.shape[-1] // 2
        return 1.01 * F.silu(x[..., :d]) * x[..., d:]

    def rms_norm(self, obj, x, residual=None):
        raise RuntimeError("this chip is on fire")


def _bind_is_available(fn, is_available_fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        return fn(*args, **kwargs)
    wrapper._is_available = is_available_fn
    return wrapper


def register_builtins(registry) -> None:
    backend = PlantedBackend()
    registry.register_many([
        OpImpl(
            op_name=op_name,
            impl_id=f"vendor.{vendor}",
            kind=BackendImplKind.VENDOR,
            fn=_bind_is_available(getattr(backend, op_name), backend.is_available),
            vendor=vendor,
            priority=BackendPriority.VENDOR,
        )
        for vendor, op_name in (("planted", "silu_and_mul"), ("on_fire", "rms_norm"))
    ])
"""


def test_a_planted_error_of_one_per_cent_is_seen(example: Serve, models: Mapping[Family, Path], tmp_path: Path) -> None:
    """Given an installed vendor that is one per cent off, and a denied one, when served, then the numbers differ."""
    packages = write_distribution(tmp_path / "packages", "planted", PLANTED, "sglang_fl.ops", "register_builtins")
    environment = {
        "PYTHONPATH": str(packages),
        "SGLANG_FL_PREFER": "vendor",
        "SGLANG_FL_DENY_VENDORS": "on_fire",
    }
    served = serve(ONE, environment, models, tmp_path)
    right = example("yaml-blacklist")
    # Two servers that are right differ by 1e-6, see the margin of the models' tokens.
    assert max(abs(one - other) for one, other in zip(served.logprobs, right.logprobs, strict=True)) > 1e-3
    assert served.dispatched == [
        lines(SiluAndMul="vendor(vendor.planted)", RMSNorm=REFERENCE, RotaryEmbedding=REFERENCE)
    ]
    assert "not vendor.on_fire: vendor on_fire is denied" in served.log
    assert "no such vendor is known" not in served.log


def test_strict_and_an_absent_preference_end_the_server_before_a_scheduler_starts(
    models: Mapping[Family, Path], tmp_path: Path
) -> None:
    """Given strict and a vendor that is not here, then the server ends with one message: operator and reason."""
    server = ONE.server(models, tmp_path, {"SGLANG_FL_STRICT": "1", "SGLANG_FL_PREFER": "vendor"})
    codes = server.run_to_end()
    log = server.log()
    assert codes == [1]
    assert "\nsglang_fl: SGLANG_FL_STRICT is set: No available implementation for silu_and_mul: " in log, log
    assert "sgl_kernel is the stand-in" in log
    assert "Traceback" not in log and "server_args=" not in log


def test_an_order_that_leaves_nothing_ends_the_server_at_the_first_call(
    models: Mapping[Family, Path], tmp_path: Path
) -> None:
    """Given an order without a usable implementation, when a token is asked for, then the server ends and says why."""
    with ONE.server(models, tmp_path, {"SGLANG_FL_PER_OP": "rms_norm=vendor"}) as server:
        with pytest.raises(ServerError):
            server.generate("Hello", 1)
        (process,) = server.processes
        assert process.wait(timeout=60) != 0
        log = server.log()
    assert "SelectionError: No available implementation for rms_norm: nothing is available" in log
    assert "not vendor.nvidia: sgl_kernel is the stand-in" in log


OFF = """
import sys
import sglang.srt.managers.scheduler
from sglang.srt.layers.utils.multi_platform import MultiPlatformOp
from sglang.srt.server_args import ServerArgs
before = MultiPlatformOp.dispatch_forward, ServerArgs._handle_piecewise_cuda_graph
from sglang.srt.plugins import load_plugins
load_plugins()
print("SAME", before == (MultiPlatformOp.dispatch_forward, ServerArgs._handle_piecewise_cuda_graph))
"""


def test_switched_off_sglangs_dispatch_is_the_same_object(tmp_path: Path) -> None:
    """Given SGLANG_FL_OOT_ENABLED=0, when SGLang loads its plugins, then its dispatch and graphs are untouched."""
    outcome = run_script(OFF, tmp_path, {"SGLANG_FL_OOT_ENABLED": "0"})
    assert outcome.returncode == 0, outcome.errors
    assert outcome.lines("SAME ") == ["True"]
