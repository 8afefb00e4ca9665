"""Shapes of the end-to-end benchmark that SGLang takes for multimodal, as it reads them; their weights as it uses them.

SGLang's own classes; on a machine without a GPU no more of these models can be made.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.e2e import shapes
from benchmarks.e2e.server_plugin.weights import fill

ROOT = Path(__file__).parents[2]
READ = """
import json, sys
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.multimodal_processor import get_mm_processor, import_processors
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_transformers_utils import get_processor

arguments = ServerArgs(model_path=sys.argv[1], device="cpu", skip_tokenizer_init=True, load_format="dummy")
config = ModelConfig.from_server_args(arguments)
import_processors("sglang.srt.multimodal.processors")
made = get_mm_processor(
    config.hf_config, arguments, get_processor(arguments.tokenizer_path), "default", model_config=config
)
text = config.hf_text_config
print("FOUND", json.dumps({
    "processor": type(made).__name__,
    "dtype": str(config.dtype),
    "linear": len(text.linear_layer_ids),
    "full": text.full_attention_layer_ids,
    "rope": text.rope_scaling,
}))
"""


@pytest.mark.parametrize(
    ("shape", "linear", "full"), [("qwen3.6-27b", 48, range(3, 64, 4)), ("qwen3.6-35b-a3b", 30, range(3, 40, 4))]
)
def test_sglang_reads_the_shapes_and_makes_their_processor(
    shape: str, linear: int, full: range, tmp_path: Path
) -> None:
    """Given a multimodal shape, when SGLang starts with token ids only, then config and processor are the model's."""
    folder = shapes.write(shape, tmp_path / "model")
    environment = {**os.environ, "SGLANG_PLUGINS": "__none__", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", READ, str(folder)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    found = json.loads(line.removeprefix("FOUND "))
    assert found["processor"] == "QwenVLImageProcessor"
    assert (found["dtype"], found["linear"], found["full"]) == ("torch.bfloat16", linear, list(full))
    assert found["rope"]["mrope_section"] == [11, 11, 10] and found["rope"]["rope_theta"] == 10000000


def test_a_gemma_norm_has_its_copy_of_the_new_weight() -> None:
    """Given SGLang's GemmaRMSNorm, when its weight is drawn, then the copy for fused all-reduces is 1 + weight."""
    from sglang.srt.layers.layernorm import GemmaRMSNorm

    model = torch.nn.Sequential(GemmaRMSNorm(64))
    fill(model, seed=1)
    weight, copy = model[0].weight.data, model[0].gemma_weight
    assert weight.abs().max() > 0.1
    assert torch.equal(copy, weight + 1.0)


def test_a_routers_scores_lie_four_times_as_far_apart() -> None:
    """Given a layer with experts, when its weights are drawn, then the router alone is four times a matrix."""
    layer = torch.nn.Module()
    layer.gate, layer.gate_proj = torch.nn.Linear(1024, 64, bias=False), torch.nn.Linear(1024, 64, bias=False)
    filled = fill(torch.nn.ModuleDict({"mlp": layer}), seed=1)
    assert filled["mlp.gate.weight"]["kind"] == "router"
    assert [filled[f"mlp.{name}.weight"]["deviation"] for name in ("gate", "gate_proj")] == [4 / 32, 1 / 32]
    assert layer.gate.weight.std().item() == pytest.approx(4 / 32, rel=0.02)
