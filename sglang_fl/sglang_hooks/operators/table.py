"""Which of SGLang's classes have a bridge, by name: nothing here imports them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from sglang_fl.sglang_hooks.operators.activation import GELU_AND_MUL, SILU_AND_MUL
from sglang_fl.sglang_hooks.operators.bridge import Bridge
from sglang_fl.sglang_hooks.operators.fused_moe import FUSED_MOE
from sglang_fl.sglang_hooks.operators.normalization import GEMMA_RMS_NORM, RMS_NORM
from sglang_fl.sglang_hooks.operators.rotary import MROTARY_EMBEDDING, ROTARY_EMBEDDING
from sglang_fl.sglang_hooks.operators.topk import TOPK

_LAYERS = "sglang.srt.layers"
BASE_CLASS = f"{_LAYERS}.utils.multi_platform.MultiPlatformOp"


@dataclass(frozen=True)
class Bridged:
    """One of SGLang's classes and its bridge.

    Attributes:
        module: where SGLang defines the class.
        name: of the class; what black and white lists hold.
        bridge: the bridge.
        variants: subclasses that only set the class up in another way, so that the bridge serves them too.
    """

    module: str
    name: str
    bridge: Bridge
    variants: tuple[str, ...] = ()

    @property
    def op_name(self) -> str:
        """The operator that the bridge calls."""
        return self.bridge.op_name


TABLE = (
    Bridged(f"{_LAYERS}.activation", "SiluAndMul", SILU_AND_MUL),
    Bridged(f"{_LAYERS}.activation", "GeluAndMul", GELU_AND_MUL),
    Bridged(f"{_LAYERS}.layernorm", "RMSNorm", RMS_NORM),
    Bridged(f"{_LAYERS}.layernorm", "GemmaRMSNorm", GEMMA_RMS_NORM),
    Bridged(
        f"{_LAYERS}.rotary_embedding.base",
        "RotaryEmbedding",
        ROTARY_EMBEDDING,
        (
            "LinearScalingRotaryEmbedding",
            "YaRNScalingRotaryEmbedding",
            "Llama3RotaryEmbedding",
            "DynamicNTKScalingRotaryEmbedding",
            "DynamicNTKAlphaRotaryEmbedding",
            "Gemma4RotaryEmbedding",
            "ScalingRotaryEmbedding",
        ),
    ),
    Bridged(
        f"{_LAYERS}.rotary_embedding.mrope",
        "MRotaryEmbedding",
        MROTARY_EMBEDDING,
        ("YaRNScalingMRotaryEmbedding",),
    ),
    Bridged(f"{_LAYERS}.moe.topk", "TopK", TOPK),
    Bridged(f"{_LAYERS}.quantization.unquant", "UnquantizedFusedMoEMethod", FUSED_MOE),
)
_BY_CLASS = {(row.module, row.name): row for row in TABLE}


def known_classes() -> tuple[str, ...]:
    """Every class name that a black or white list can mean."""
    return tuple(name for row in TABLE for name in (row.name, *row.variants))


def find(cls: type) -> Bridged | None:
    """The bridge that serves ``cls``, by the nearest class of its MRO that has one.

    None as well for a subclass that overrides ``forward`` or one of the methods behind it: its author's method stands.
    """
    for ancestor in cls.__mro__:
        row = _BY_CLASS.get((ancestor.__module__, ancestor.__name__))
        if row is not None:
            return row
        if any(name == "forward" or name.startswith("forward_") for name in vars(ancestor)):
            return None
    return None


def misfits(rows: Iterable[Bridged] = TABLE) -> list[str]:
    """Bridges whose parameters are not those of the installed SGLang's methods.

    Looks only at modules that are loaded: where none of them is, no layer runs. A scheduler has loaded them all
    before its plugins.
    """
    return [problem for row in rows for problem in _misfits(row)]


def _misfits(row: Bridged) -> Iterator[str]:
    module = sys.modules.get(row.module)
    if module is None:
        return
    target = getattr(module, row.name, None)
    if target is None:
        yield f"{row.module}.{row.name} does not exist in the installed SGLang"
        return
    wanted = list(row.bridge.parameters)
    # Of the platforms' methods the two that every class has; the others are called with the same arguments.
    for name in ("forward_native", "forward_cuda"):
        found = parameters_of(getattr(target, name))[1:]
        if found != wanted:
            yield (
                f"{row.module}.{row.name}.{name} has the parameters ({', '.join(found)}), "
                f"the plugin knows ({', '.join(wanted)})"
            )


def parameters_of(function: Callable[..., object]) -> list[str]:
    """The parameters as Python writes them, without annotations; ``*`` stands before those that are keywords only."""
    signature = inspect.signature(function, follow_wrapped=True)
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    text = str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))
    return text.removeprefix("(").removesuffix(")").split(", ") if plain else []
