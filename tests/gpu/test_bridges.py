"""SGLang's real layers and a real engine on a GPU: bridged they give what SGLang's own CUDA methods give.

Needs SGLang with its CUDA packages and flag_gems; nothing is left out in silence. Self-contained.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_fl.config import load_settings
from sglang_fl.dispatch import SelectionPolicy, configure, policy_context, set_manager
from sglang_fl.sglang_hooks.operators.binding import Binder
from sglang_fl.sglang_hooks.operators.bridge import Owner
from sglang_fl.sglang_hooks.operators.layer import dispatch_hook
from sglang_fl.sglang_hooks.operators.lists import ClassLists
from sglang_fl.testing.tiny_model import DEFAULT_PROMPTS, Family, ModelShape, write_tiny_model

pytestmark = pytest.mark.gpu

TOKENS, HIDDEN, HEADS, HEAD_SIZE, EXPERTS = 33, 512, 4, 64, 16
BF16 = torch.bfloat16
PREFERENCES = ("flagos", "vendor", "reference")


@pytest.fixture(scope="module", autouse=True)
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """SGLang's layers can be made, on the GPU, in a group of one rank."""
    from sglang.srt import server_args
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.moe import initialize_moe_config

    arguments = server_args.ServerArgs(model_path="dummy")
    kept, server_args._global_server_args = server_args._global_server_args, arguments
    initialize_moe_config(arguments)
    meeting = tmp_path_factory.mktemp("ranks") / "store"
    parallel_state.init_distributed_environment(
        world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{meeting}", backend="nccl"
    )
    parallel_state.initialize_model_parallel()
    torch.manual_seed(11)
    configure(load_settings({}, platform="cuda"))
    with torch.device("cuda"), torch.inference_mode():
        yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    server_args._global_server_args = kept
    set_manager(None)


@contextmanager
def hooked(prefer: str) -> Iterator[None]:
    """Layer 2 on, without SGLang's registry: it would stay for the rest of the process."""
    from sglang.srt.layers.utils.multi_platform import MultiPlatformOp

    hook, own = dispatch_hook(ClassLists(), Binder("cuda", True)), MultiPlatformOp.dispatch_forward
    with pytest.MonkeyPatch.context() as patch, policy_context(SelectionPolicy(prefer=prefer)):
        patch.setattr(MultiPlatformOp, "dispatch_forward", lambda self: hook.function(own, self))
        yield


def activations() -> tuple[list[Any], tuple[torch.Tensor, ...]]:
    """The gated activations."""
    from sglang.srt.layers.activation import GeluAndMul, SiluAndMul

    return [SiluAndMul(), GeluAndMul("tanh"), GeluAndMul("none")], (torch.randn(TOKENS, 2 * HIDDEN, dtype=BF16),)


def norms() -> tuple[list[Any], tuple[torch.Tensor, ...]]:
    """RMSNorm and GemmaRMSNorm with a residual."""
    from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm

    layers = [RMSNorm(HIDDEN, weight_dtype=BF16), GemmaRMSNorm(HIDDEN).to(BF16)]
    return layers, (torch.randn(TOKENS, HIDDEN, dtype=BF16), torch.randn(TOKENS, HIDDEN, dtype=BF16))


def rotaries() -> tuple[list[Any], tuple[torch.Tensor, ...]]:
    """Both pairings, whole and partial."""
    from sglang.srt.layers.rotary_embedding import RotaryEmbedding

    layers = [
        RotaryEmbedding(HEAD_SIZE, rotary_dim, 4096, 10000, is_neox, BF16)
        for rotary_dim in (HEAD_SIZE, HEAD_SIZE // 2)
        for is_neox in (True, False)
    ]
    positions = torch.randint(0, 4096, (TOKENS,))
    query, key = torch.randn(TOKENS, HEADS * HEAD_SIZE, dtype=BF16), torch.randn(TOKENS, HEAD_SIZE, dtype=BF16)
    return layers, (positions, query, key)


def routers() -> tuple[list[Any], tuple[torch.Tensor, ...]]:
    """Softmax and sigmoid routing."""
    from sglang.srt.layers.moe.topk import TopK

    layers = [TopK(4, layer_id=0), TopK(4, layer_id=0, renormalize=False), TopK(4, layer_id=0, scoring_func="sigmoid")]
    return layers, (torch.randn(TOKENS, HIDDEN, dtype=BF16), torch.randn(TOKENS, EXPERTS))


def tensors(result: Any) -> list[torch.Tensor]:
    """The tensors of a result; of TopK the dense weights, since the order of a token's experts means nothing."""
    if hasattr(result, "topk_ids"):
        dense = torch.zeros(TOKENS, EXPERTS)
        return [dense.scatter_(1, result.topk_ids.long(), result.topk_weights.float())]
    return list(result) if isinstance(result, tuple) else [result]


@pytest.mark.parametrize("make", [activations, norms, rotaries, routers], ids=lambda make: make.__name__)
@pytest.mark.parametrize("prefer", PREFERENCES)
def test_a_layer_gives_what_sglangs_own_cuda_method_gives(make: Any, prefer: str) -> None:
    """Given SGLang's layers, when bridged, then each equals its own CUDA method to bfloat16's last places."""
    with hooked(prefer):
        layers, arguments = make()
    for layer in layers:
        with policy_context(SelectionPolicy(prefer=prefer)):
            found = tensors(layer(*(argument.clone() for argument in arguments)))
        expected = tensors(layer.forward_cuda(*(argument.clone() for argument in arguments)))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.float(), other.float(), atol=2e-2, rtol=1.6e-2)
        is_bridged = isinstance(layer._forward_method.__self__, Owner)
        assert is_bridged or prefer != "reference", type(layer)


def test_a_bridged_layer_is_captured_and_replayed() -> None:
    """Given bound layers, when captured in a graph after a warm-up, then a replay follows new data."""
    with hooked("flagos"):
        (norm, _), (x, residual) = norms()
        with policy_context(SelectionPolicy()):
            norm(x.clone(), residual.clone())
    static, added = x.clone(), residual.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, _ = norm(static, added)
    fresh = torch.randn_like(x)
    static.copy_(fresh)
    added.copy_(residual)
    graph.replay()
    torch.cuda.synchronize()
    expected, _ = norm.forward_native(fresh, residual)
    torch.testing.assert_close(output.float(), expected.float(), atol=2e-2, rtol=1.6e-2)


ENGINE = """
import json, sys
import sglang

if __name__ == "__main__":
    engine = sglang.Engine(model_path=sys.argv[1], mem_fraction_static=0.2, attention_backend="triton",
                           sampling_backend="pytorch", grammar_backend="none",
                           dtype="bfloat16", log_level="info", disable_radix_cache=True)
    replies = engine.generate(json.loads(sys.argv[2]), {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
                              return_logprob=True)
    logprobs = [[entry[0] for entry in reply["meta_info"]["output_token_logprobs"]] for reply in replies]
    print("RESULT", json.dumps({"tokens": [reply["output_ids"] for reply in replies], "logprobs": logprobs}))
    engine.shutdown()
"""


def engine(model: Path, folder: Path, **variables: str) -> tuple[dict[str, Any], str]:
    """A real engine's greedy tokens and log probabilities, and its log."""
    script = folder / "engine.py"
    script.write_text(ENGINE)
    environment = {**os.environ, **variables}
    command = [sys.executable, str(script), str(model), json.dumps(list(DEFAULT_PROMPTS))]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=500, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0 and lines, done.stdout[-6000:]
    return json.loads(lines[0].removeprefix("RESULT ")), done.stdout


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3 with heads of 64."""
    folder = tmp_path_factory.mktemp("model")
    return write_tiny_model(folder, Family.QWEN3, shape=ModelShape(heads=8, kv_heads=2, head_dim=64))


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """SGLang without the plugin."""
    return engine(model, tmp_path_factory.mktemp("alone"), SGLANG_PLUGINS="__none__")[0]


# The documents' examples: variables, and what they promise.
EXAMPLES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "flagos": (
        {"SGLANG_FL_PREFER": "flagos"},
        dict.fromkeys(("RMSNorm", "RotaryEmbedding", "SiluAndMul"), "flagos(flagos)"),
    ),
    "vendor-for-one": (
        {"SGLANG_FL_PER_OP": "rms_norm=vendor|flagos;silu_and_mul=flagos"},
        {"RMSNorm": "vendor(vendor.nvidia)", "RotaryEmbedding": "flagos(flagos)", "SiluAndMul": "flagos(flagos)"},
    ),
    "blacklist": (
        {"SGLANG_FL_OOT_BLACKLIST": "RotaryEmbedding"},
        {"RMSNorm": "flagos(flagos)", "SiluAndMul": "flagos(flagos)"},
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_serves_right_and_writes_the_promised_lines(
    name: str, model: Path, alone: dict[str, Any], tmp_path: Path
) -> None:
    """Given an example, when served, then numbers are SGLang's to bfloat16, lines as promised, no piecewise graph."""
    variables, promised = EXAMPLES[name]
    log = tmp_path / "dispatch.log"
    found, output = engine(model, tmp_path, USE_FLAGGEMS="0", SGLANG_FL_DISPATCH_LOG=str(log), **variables)
    wanted = sorted(f"[OOT-DISPATCH] {cls} → {choice}" for cls, choice in promised.items())
    assert sorted(set(log.read_text().splitlines())) == wanted
    assert "piecewise CUDA graphs: off for this server" in output
    for one, other in zip(found["logprobs"], alone["logprobs"], strict=True):
        # Later tokens may part where two are as likely to bfloat16.
        assert one[0] == pytest.approx(other[0], abs=0.05)
