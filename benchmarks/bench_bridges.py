"""What a bridge and a binding add to a call of an operator, against calling the implementation directly.

The implementations do nothing, so that what is left is the way there: the function that stands in a layer's
``_forward_method``, what it checks, and the guard that would hand the call to the next implementation. Each operator
has two, so that there is a next one. That every call arrived at the first implementation is asserted by its count.

What SGLang's own method does as well, and any caller of the standard signature must do, is in both subjects: the views
of query and key by heads, the look at which cache the rotary layer has by now (by the shortest way there is), the
padding mask and the recorders around TopK, SGLang's own type of its result.

BENCH_BRIDGES_FAULT=check plants a fault that the bars must catch: a setting is read in each call.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import repeat
from typing import Any

import torch

from benchmarks.figures import Bar, Figure, Kind, alternate
from sglang_fl.dispatch import BackendImplKind, OpImpl, OpManager, OpRegistry, SelectionPolicy, set_manager
from sglang_fl.dispatch.policy import process_settings
from sglang_fl.dispatch.registry import KNOWN_OPERATORS
from sglang_fl.sglang_hooks.operators.binding import Binder
from sglang_fl.sglang_hooks.operators.bridge import Owner
from sglang_fl.sglang_hooks.operators.table import TABLE

KIND = Kind.OPS
NEEDS_GPU = False
FAULT_VARIABLE, FAULT = "BENCH_BRIDGES_FAULT", "check"

CALLS = 20_000
ROUNDS = 31
LARGEST_DIFFERENCE_NS = 150
TOKENS, HEADS, HEAD_SIZE, EXPERTS, HIDDEN = 2, 4, 16, 8, 64
Call = Callable[[], Any]


class Implementation:
    """Does nothing but count; one function per result, as short as Python can make it."""

    def __init__(self) -> None:
        self.count = 0

    def one(self, op_name: str) -> Callable[..., Any]:
        """The implementation of one operator."""
        pair = torch.ones(TOKENS, 2), torch.zeros(TOKENS, 2, dtype=torch.int32)

        def same(obj: Any, x: Any, *_: Any, **__: Any) -> Any:
            self.count += 1
            return x

        def rotary(obj: Any, q: Any, k: Any, *_: Any) -> Any:
            self.count += 1
            return q, k

        def topk(obj: Any, logits: Any, top_k: int, **_: Any) -> Any:
            self.count += 1
            return pair

        functions: dict[str, Callable[..., Any]] = {"rotary_embedding": rotary, "topk": topk}
        return functions.get(op_name, same)


def bound(layer: Any, arguments: tuple[Any, ...]) -> Callable[..., Any]:
    """The layer's bound ``_forward_method``, as the first call leaves it."""
    row = next(row for row in TABLE if row.name == type(layer).__name__)
    method = Binder("cpu", False).bind(row, layer, layer.forward_cuda, arguments, {})
    if not isinstance(getattr(method, "__self__", None), Owner):
        raise RuntimeError(f"{row.name} was not bridged")
    planted = os.environ.get(FAULT_VARIABLE, "")
    if not planted:
        return method
    if planted != FAULT:
        raise ValueError(f"{FAULT_VARIABLE}={planted}: there is no such fault, only {FAULT}")
    bridged = method

    def checking(*args: Any) -> Any:
        if not process_settings().ops.enabled or os.environ.get("SGLANG_FL_OOT_ENABLED") == "0":
            raise RuntimeError("switched off")
        return bridged(*args)

    return checking


def subjects(implementation: Implementation) -> dict[str, tuple[Call, Call]]:
    """Class to its bound call and the direct one."""
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.moe import topk as topk_module
    from sglang.srt.layers.rotary_embedding import RotaryEmbedding

    x, residual = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, HIDDEN)
    activation, norm = SiluAndMul(), RMSNorm(HIDDEN)
    silu, rms = implementation.one("silu_and_mul"), implementation.one("rms_norm")
    through_silu, through_rms = bound(activation, (x,)), bound(norm, (x,))

    rotary = RotaryEmbedding(HEAD_SIZE, HEAD_SIZE, 64, 10000, True, torch.float32)
    positions, query, key = torch.arange(TOKENS), torch.randn(TOKENS, HEADS * HEAD_SIZE), torch.randn(TOKENS, HEAD_SIZE)
    rope = implementation.one("rotary_embedding")
    through_rotary = bound(rotary, (positions, query, key))
    buffers, cache = rotary._buffers, rotary.cos_sin_cache
    cos, sin = cache.chunk(2, dim=-1)

    def rotate() -> Any:
        if buffers["cos_sin_cache"] is not cache:
            raise RuntimeError("the cache was replaced")
        tokens = positions.shape[0]
        q, k = query.view(tokens, -1, HEAD_SIZE), key.view(tokens, -1, HEAD_SIZE)
        rope(rotary, q, k, cos, sin, positions, False, True)
        return query, key

    router, logits = topk_module.TopK(2, layer_id=0), torch.randn(TOKENS, EXPERTS)
    choose = implementation.one("topk")
    through_topk = bound(router, (x, logits))
    config = router.topk_config

    def route() -> Any:
        weights, ids = choose(router, logits, 2, correction_bias=None)
        ids, weights = topk_module._post_process_topk_ids(
            topk_ids=ids, topk_weights=weights, topk_config=config, router_logits=logits, layer_id=0
        )
        topk_module.get_global_expert_distribution_recorder().on_select_experts(topk_ids=ids)
        return topk_module.StandardTopKOutput(weights, ids, logits)

    return {
        "SiluAndMul": (lambda: through_silu(x), lambda: silu(activation, x)),
        "RMSNorm": (lambda: through_rms(x), lambda: rms(norm, x)),
        "RMSNorm with a residual": (lambda: through_rms(x, residual), lambda: rms(norm, x, residual)),
        "RotaryEmbedding": (lambda: through_rotary(positions, query, key), rotate),
        "TopK": (lambda: through_topk(x, logits), route),
    }


def run() -> list[Figure]:
    """Measure each class bound and direct, in turns."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    from sglang.srt import server_args
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.rotary_embedding import base

    arguments = server_args.ServerArgs(model_path="dummy")
    server_args._global_server_args = arguments
    base._is_cpu = True
    initialize_moe_config(arguments)
    implementation, registry = Implementation(), OpRegistry()
    for impl_id, kind in (("flagos", BackendImplKind.DEFAULT), ("reference", BackendImplKind.REFERENCE)):
        registry.register_many([OpImpl(op, impl_id, kind, implementation.one(op)) for op in KNOWN_OPERATORS])
    set_manager(OpManager(registry, SelectionPolicy()))
    try:
        return measured(implementation)
    finally:
        set_manager(None)


def measured(implementation: Implementation) -> list[Figure]:
    """The figures."""

    def nanoseconds(call: Call) -> Callable[[], float]:
        def sample() -> float:
            before, start = implementation.count, time.perf_counter_ns()
            for _ in repeat(None, CALLS):
                call()
            took = time.perf_counter_ns() - start
            if implementation.count - before != CALLS:
                raise RuntimeError(f"{implementation.count - before} of {CALLS} calls arrived at the implementation")
            return took / CALLS

        return sample

    figures = []
    with torch.no_grad():  # as SGLang serves
        for name, (through, direct) in subjects(implementation).items():
            samples = alternate({"bound": nanoseconds(through), "direct": nanoseconds(direct)}, ROUNDS)
            bar = Bar.difference_at_most(LARGEST_DIFFERENCE_NS)
            reference = "the implementation, called directly"
            figures.append(Figure(name, "ns", samples["bound"], samples["direct"], reference, bar))
    return figures
