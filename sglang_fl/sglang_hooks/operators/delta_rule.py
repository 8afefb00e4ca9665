"""The gated delta rule of Qwen3-Next and Qwen3.5: SGLang's functions, unless a backend brings one of the same name.

An implementation registers under the function's own name and takes the function's own parameters, by keyword, without
a layer; ``scale`` is never None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_fl.dispatch import OwnMethodError, get_manager
from sglang_fl.selection import SelectionError
from sglang_fl.sglang_hooks.operators.binding import Binder, describe
from sglang_fl.sglang_hooks.operators.own_method import is_own_method
from sglang_fl.sglang_hooks.registration import Hook

_FLA = "sglang.srt.layers.attention.fla"
NOT_OFFERED = "gated delta rule: SGLang's own functions, no backend offers others"
Function = Callable[..., Any]


def _chunk(fn: Function) -> Function:
    def chunk_gated_delta_rule(
        original: Function,
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any,
        scale: Any = None,
        initial_state: Any = None,
        initial_state_indices: Any = None,
        cu_seqlens: Any = None,
        head_first: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
    ) -> Any:
        return _run(
            fn,
            original,
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            scale=k.shape[-1] ** -0.5 if scale is None else scale,
            initial_state=initial_state,
            initial_state_indices=initial_state_indices,
            cu_seqlens=cu_seqlens,
            head_first=head_first,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )

    return chunk_gated_delta_rule


def _recurrent(fn: Function) -> Function:
    def fused_recurrent_gated_delta_rule(
        original: Function,
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any = None,
        scale: Any = None,
        initial_state: Any = None,
        output_final_state: bool = False,
        cu_seqlens: Any = None,
        use_qk_l2norm_in_kernel: bool = False,
    ) -> Any:
        return _run(
            fn,
            original,
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            scale=k.shape[-1] ** -0.5 if scale is None else scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )

    return fused_recurrent_gated_delta_rule


def _packed_decode(fn: Function) -> Function:
    def fused_recurrent_gated_delta_rule_packed_decode(
        original: Function,
        mixed_qkv: Any,
        a: Any,
        b: Any,
        A_log: Any,  # noqa: N803 - SGLang's own name
        dt_bias: Any,
        scale: Any,
        initial_state: Any,
        out: Any,
        ssm_state_indices: Any,
        use_qk_l2norm_in_kernel: bool = False,
    ) -> Any:
        return _run(
            fn,
            original,
            mixed_qkv=mixed_qkv,
            a=a,
            b=b,
            A_log=A_log,
            dt_bias=dt_bias,
            scale=scale,
            initial_state=initial_state,
            out=out,
            ssm_state_indices=ssm_state_indices,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )

    return fused_recurrent_gated_delta_rule_packed_decode


# Operator to the module of SGLang's function of the same name, and the hook's maker.
FUNCTIONS: dict[str, tuple[str, Callable[[Function], Function]]] = {
    "chunk_gated_delta_rule": (f"{_FLA}.chunk", _chunk),
    "fused_recurrent_gated_delta_rule": (f"{_FLA}.fused_recurrent", _recurrent),
    "fused_recurrent_gated_delta_rule_packed_decode": (f"{_FLA}.fused_recurrent", _packed_decode),
}


def hooks(binder: Binder) -> tuple[list[Hook], list[str]]:
    """The hooks on functions for which another implementation than SGLang's is chosen, and lines for the report.

    A function without a hook is SGLang's untouched.
    """
    found: list[Hook] = []
    offered = [name for name in FUNCTIONS if get_manager().registry.implementations(name)]
    lines = [] if offered else [NOT_OFFERED]
    for name in offered:
        fn, line = _choose(name, binder)
        lines.append(line)
        if fn is not None:
            module, make = FUNCTIONS[name]
            found.append(Hook(f"{module}.{name}", make(fn)))
    return found, lines


def _choose(name: str, binder: Binder) -> tuple[Function | None, str]:
    manager = get_manager()
    try:
        bound = manager.bind(name, None, extra=binder.candidates(name))
    except SelectionError as error:
        if manager.policy().strict:
            raise
        return None, f"{name}: SGLang's own function: {error}"
    line = describe(name, bound.impl, bound.selection)
    return (None if is_own_method(bound.impl) else bound.fn), line


def _run(fn: Function, original: Function, **arguments: Any) -> Any:
    try:
        return fn(**arguments)
    except OwnMethodError:
        return original(**arguments)
