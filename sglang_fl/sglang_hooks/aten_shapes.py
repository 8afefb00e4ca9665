"""Records the ATen calls of SGLang's own model runner on prefill and decode batches, for the sweep of layer 1."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_fl.aten.sweep.cases import CaseFile

# The shapes of a layer repeat, so two layers hold every shape of the whole model.
LAYERS = 2
DECODE_BATCHES = (1, 8, 32)
PREFILL_TOKENS = 4096
_CONTEXT = 33

# config.json of Qwen/Qwen2.5-0.5B-Instruct, with fewer layers.
QWEN2_5_0_5B = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": LAYERS,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
# Names that --record knows without a download; anything else is a folder that holds a config.json.
KNOWN_MODELS = {"qwen2.5-0.5b": QWEN2_5_0_5B}


class RecordingError(RuntimeError):
    """The recording cannot be made; the message says why."""


@dataclass(frozen=True)
class Sampling:
    """How the requests of a phase choose tokens; the name is the phase's suffix."""

    suffix: str
    parameters: dict[str, Any]


SAMPLINGS = (
    Sampling("", {"temperature": 0}),
    Sampling("_sampled", {"temperature": 0.8, "top_p": 0.9, "top_k": 50}),
)


def record(model: str, device: str) -> CaseFile:
    """Run SGLang's ModelRunner with dummy bf16 weights in this process and note its ATen calls.

    Phases: ``prefill_4096`` (one request of 4096 tokens) and ``decode_1``, ``decode_8``, ``decode_32`` (after short
    prompts), greedy; the decode phases again with temperature, top-p and top-k (``decode_1_sampled``, ...). They run
    without CUDA graphs, so that each call is seen: those that a graph would hold. Where the device has graphs,
    ``decode_1_replay``, ... hold what is called around the replay of one.

    model: a name of :data:`KNOWN_MODELS` or a folder with a config.json.
    device: ``cpu`` or ``cuda``. On the CPU SGLang's fused operators and its attention are PyTorch's own, so more is
        recorded than an accelerator runs.

    Raises:
        RecordingError: the model is unknown.
    """
    if device == "cpu":
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    # Calls of compiled functions cannot be seen.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    from sglang_fl.aten.sweep.cases import CaseFile
    from sglang_fl.aten.sweep.recorder import Recorder

    recorder = Recorder(device)
    with _model_folder(model) as folder:
        runner = _model_runner(folder, device)
        with recorder:
            for sampling in SAMPLINGS:
                for batch_size in DECODE_BATCHES:
                    phase = f"decode_{batch_size}{sampling.suffix}"
                    with _without_graphs(runner):
                        _run(runner, recorder, sampling, batch_size, _CONTEXT, phase)
            _run(runner, recorder, SAMPLINGS[0], 1, PREFILL_TOKENS, None)
            for batch_size in DECODE_BATCHES if runner.graph_runner is not None else ():
                _run(runner, recorder, SAMPLINGS[0], batch_size, _CONTEXT, f"decode_{batch_size}_replay")
    return CaseFile(_origin(model, device), recorder.cases())


@contextmanager
def _without_graphs(runner: Any) -> Iterator[None]:
    graphs, runner.graph_runner = runner.graph_runner, None
    try:
        yield
    finally:
        runner.graph_runner = graphs


def _run(
    runner: Any, recorder: Any, sampling: Sampling, batch_size: int, tokens: int, decode_phase: str | None
) -> None:
    """One prefill and, where ``decode_phase`` names it, one decode step; the prefill counts where nothing follows."""
    import torch
    from sglang.bench_one_batch import decode, extend

    runner.req_to_token_pool.clear()
    runner.token_to_kv_pool_allocator.clear()
    requests = _requests(sampling, batch_size, tokens)
    with torch.inference_mode():
        if decode_phase is None:
            with recorder.phase(f"prefill_{tokens}"):
                extend(requests, runner)
            return
        next_tokens, _, batch = extend(requests, runner)
        with recorder.phase(decode_phase):
            decode(next_tokens, batch, runner)


def _requests(sampling: Sampling, count: int, tokens: int) -> list[Any]:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    requests = []
    for place in range(count):
        parameters = SamplingParams(max_new_tokens=4, **sampling.parameters)
        parameters.normalize(None)
        ids = [(place * 997 + position * 31) % 50000 for position in range(tokens)]
        request = Req(rid=str(place), origin_input_text="", origin_input_ids=ids, sampling_params=parameters)
        request.fill_ids = request.origin_input_ids
        request.logprob_start_len = -1
        request.set_extend_input_len(len(request.fill_ids) - len(request.prefix_indices))
        requests.append(request)
    return requests


def _model_runner(folder: Path, device: str) -> Any:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.entrypoints.engine import _set_envs_and_config
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import PortArgs, ServerArgs, set_global_server_args_for_scheduler

    arguments = ServerArgs(
        model_path=str(folder),
        load_format="dummy",
        dtype="bfloat16",
        device=device,
        # What every install has; FlashAttention 3 and FlashInfer are packages of their own.
        attention_backend="triton" if device == "cuda" else None,
        sampling_backend="pytorch" if device == "cuda" else None,
        skip_tokenizer_init=True,
        disable_cuda_graph=device == "cpu",
        cuda_graph_bs=list(DECODE_BATCHES),
        disable_piecewise_cuda_graph=True,
        max_total_tokens=2 * PREFILL_TOKENS,
        chunked_prefill_size=2 * PREFILL_TOKENS,
        max_running_requests=max(DECODE_BATCHES),
    )
    _set_envs_and_config(arguments)
    set_global_server_args_for_scheduler(arguments)
    initialize_moe_config(arguments)
    ports = PortArgs.init_new(arguments)
    return ModelRunner(
        model_config=ModelConfig.from_server_args(arguments),
        mem_fraction_static=arguments.mem_fraction_static or 0.5,
        gpu_id=0,
        tp_rank=0,
        tp_size=1,
        moe_ep_rank=0,
        moe_ep_size=1,
        pp_rank=0,
        pp_size=1,
        nccl_port=ports.nccl_port,
        server_args=arguments,
    )


@contextmanager
def _model_folder(model: str) -> Iterator[Path]:
    if Path(model, "config.json").is_file():
        yield Path(model)
        return
    if model not in KNOWN_MODELS:
        raise RecordingError(
            f"--record {model}: neither a folder with a config.json nor one of {', '.join(KNOWN_MODELS)}."
        )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(KNOWN_MODELS[model]))
        yield Path(folder)


def _origin(model: str, device: str) -> dict[str, str]:
    from importlib.metadata import version

    import torch

    card = torch.cuda.get_device_name() if device == "cuda" else "host"
    return {"model": model, "device": card, "sglang": version("sglang"), "torch": torch.__version__}
