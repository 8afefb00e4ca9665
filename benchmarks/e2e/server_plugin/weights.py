"""Random weights of which each matters, drawn on the model's own device, the same in every run.

Norms are 1 +- 0.1, matrices N(0, 1 / fan in), biases N(0, 0.1^2), embeddings N(0, 1); an embedding that is the output
matrix too counts as a matrix, since it would otherwise repeat its input. The fan in of a matrix that is split
along its input is that of the whole. A router is a matrix four times as large: with scores that lie closer together
the rounding of its input would decide which experts compute, and no two implementations would agree.

A tensor's numbers depend on the seed, its name, its size and, where it is split over ranks, its part: so replicated
tensors are equal on all ranks. What is not known to be split counts as replicated; parts that are equal would only be
a special model, replicas that differ would be a wrong one.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

DIGEST_ELEMENTS = 256
# PyTorch's own normal_ by type of device: layer 1 may replace it before the model is made.
_own_normal: dict[str, Any] = {}
_KEYS = {"cpu": torch._C.DispatchKey.CPU, "cuda": torch._C.DispatchKey.CUDA}
GEMMA_COPY = "gemma_weight"


class Kind(str, Enum):
    """What a parameter is."""

    NORM = "norm"
    # Its layer multiplies by 1 + weight.
    NORM_ABOUT_ZERO = "norm about zero"
    MATRIX = "matrix"
    ROUTER = "router"
    EMBEDDING = "embedding"
    BIAS = "bias"


# Mean and deviation; that of the kinds in BY_FAN_IN is divided by the square root of the fan in.
DISTRIBUTIONS = {
    Kind.NORM: (1.0, 0.1),
    Kind.NORM_ABOUT_ZERO: (0.0, 0.1),
    Kind.MATRIX: (0.0, 1.0),
    Kind.ROUTER: (0.0, 4.0),
    Kind.EMBEDDING: (0.0, 1.0),
    Kind.BIAS: (0.0, 0.1),
}
BY_FAN_IN = (Kind.MATRIX, Kind.ROUTER)
# SGLang's name of the matrix that scores the experts.
ROUTER_NAME = "gate"


@dataclass(frozen=True)
class Shard:
    """Which part of a whole tensor a rank has.

    Attributes:
        part: names the part; empty where all ranks have the whole.
        input_parts: into how many parts the input is split.
    """

    part: str = ""
    input_parts: int = 1


def fill(model: torch.nn.Module, seed: int) -> dict[str, dict[str, Any]]:
    """Give every floating-point parameter its numbers; what each became, by name.

    Raises:
        ValueError: a parameter of fewer than 16 bits, for whose scales there is no rule here.
    """
    output = {
        id(module.weight)
        for name, module in model.named_modules(remove_duplicate=False)
        if name.endswith("lm_head") and isinstance(getattr(module, "weight", None), torch.Tensor)
    }
    filled = {}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not torch.is_floating_point(parameter):
                continue
            full_name = f"{module_name}.{name}"
            if torch.finfo(parameter.dtype).bits < 16:
                raise ValueError(f"{full_name} is {parameter.dtype}; weights of 16 bits or more can be drawn")
            kind = Kind.MATRIX if id(parameter) in output else kind_of(module, name, parameter)
            if kind is Kind.MATRIX and module_name.rpartition(".")[2] == ROUTER_NAME:
                kind = Kind.ROUTER
            shard = shard_of(module, name)
            _draw(parameter.data, kind, shard, f"{seed}/{full_name}/{shard.part}")
            filled[full_name] = {
                "kind": kind.value,
                "part": shard.part,
                "deviation": _deviation(parameter, kind, shard),
                "digest": _digest(parameter.data),
            }
        if GEMMA_COPY in dict(module.named_buffers(recurse=False)):
            # SGLang's loader keeps 1 + weight beside the weight; FlashInfer's fused all-reduce takes that one.
            module.get_buffer(GEMMA_COPY).copy_(module.get_parameter("weight").data + 1.0)
    return filled


def remember_kernels() -> None:
    """Keep PyTorch's own kernels, before anything may have replaced them, so that all runs draw the same numbers."""
    for device in ("cpu", "cuda") if torch.version.cuda else ("cpu",):
        _own_normal[device] = torch.library.get_kernel("aten::normal_", _KEYS[device])


def kind_of(module: torch.nn.Module, name: str, parameter: torch.Tensor) -> Kind:
    """By the module's class, the parameter's own name and its dimensions."""
    classes = _class_names(module)
    if parameter.dim() > 1:
        is_embedding = classes & {"VocabParallelEmbedding", "Embedding"} and "ParallelLMHead" not in classes
        return Kind.EMBEDDING if is_embedding else Kind.MATRIX
    if "bias" in name or not any("norm" in each.lower() for each in classes):
        return Kind.BIAS
    return Kind.NORM_ABOUT_ZERO if any("Gemma" in each for each in classes) else Kind.NORM


def shard_of(module: torch.nn.Module, name: str) -> Shard:
    """By SGLang's classes of layers that split their parameters."""
    classes, values = _class_names(module), vars(module)
    if "ColumnParallelLinear" in classes:
        return Shard(f"tp{module.tp_rank}") if values["tp_size"] > 1 else Shard()
    if "RowParallelLinear" in classes:
        is_split = values["tp_size"] > 1 and name != "bias"
        return Shard(f"tp{module.tp_rank}", values["tp_size"]) if is_split else Shard()
    if "VocabParallelEmbedding" in classes:
        start = values["shard_indices"].padded_org_vocab_start_index
        return Shard(f"from{start}") if values["tp_size"] > 1 else Shard()
    if "FusedMoE" in classes:
        sizes = values["moe_ep_size"], values["moe_tp_size"]
        part = f"ep{module.moe_ep_rank}tp{module.moe_tp_rank}" if max(sizes) > 1 else ""
        return Shard(part, values["moe_tp_size"] if name == "w2_weight" else 1)
    return Shard()


def _class_names(module: torch.nn.Module) -> set[str]:
    return {each.__name__ for each in type(module).__mro__}


def _deviation(parameter: torch.Tensor, kind: Kind, shard: Shard) -> float:
    deviation = DISTRIBUTIONS[kind][1]
    if kind not in BY_FAN_IN:
        return deviation
    return deviation / math.sqrt(parameter.shape[-1] * shard.input_parts)


def _draw(tensor: torch.Tensor, kind: Kind, shard: Shard, key: str) -> None:
    generator = torch.Generator(device=tensor.device)
    generator.manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "little"))
    mean, deviation = DISTRIBUTIONS[kind][0], _deviation(tensor, kind, shard)
    own = _own_normal.get(tensor.device.type)
    if own is None:
        tensor.normal_(mean, deviation, generator=generator)
    else:
        keys = torch._C.DispatchKeySet(_KEYS[tensor.device.type])
        own.call_boxed(keys, tensor, mean, deviation, generator=generator)


def _digest(tensor: torch.Tensor) -> str:
    """Of the first and last elements; enough to tell equal from different numbers."""
    flat = tensor.flatten()
    ends = [part.cpu().float().numpy().tobytes() for part in (flat[:DIGEST_ELEMENTS], flat[-DIGEST_ELEMENTS:])]
    return hashlib.sha256(b"".join(ends)).hexdigest()[:16]
